"""Weights by shared memory on one host: the trainer stages a copy, engines map it, nothing crosses a socket but names.

    trainer: WeightStage.stage(v) --SharedWeights--> engine: attach() -> verify() -> use the views -> close()

Two segments take turns, so version v stays whole while v + 1 is written. Version v + 2 overwrites v: the caller of
`stage` sees to it that v + 1 is served by then (contract 7).
"""

import mmap
import secrets
from collections.abc import Callable, Mapping

import torch
from torch.distributed.tensor import DTensor

from flashflow.errors import WeightsError
from flashflow.records import SharedWeights, TensorSpec
from flashflow.transport.weights.digest import digest
from flashflow.transport.weights.plan import Placement, TensorInfo, plan_segment
from flashflow.transport.weights.segment import (
    create_segment,
    map_segment,
    remove_segments,
    segment_name,
    unlink_segment,
)

__all__ = ["AttachedWeights", "WeightStage", "attach", "remove_segments"]

NUM_SEGMENTS = 2


class WeightStage:
    """The trainer's end. Segments are named `flashflow-<run_id>-<prefix>-<random>`."""

    def __init__(self, run_id: str, prefix: str = "weights") -> None:
        """Removes what an earlier, killed incarnation with the same run and prefix left behind."""
        segment_name(run_id, prefix, "0")
        remove_segments(run_id, prefix)
        self._run_id, self._prefix = run_id, prefix
        self._segments: list[tuple[str, mmap.mmap]] = []
        self._turn = 0

    def stage(
        self,
        version: int,
        named_tensors: Mapping[str, torch.Tensor],
        gather: Callable[[str, torch.Tensor], torch.Tensor] | None = None,
        dtype: torch.dtype | None = None,
        *,
        fresh: bool = False,
    ) -> SharedWeights:
        """Copies the tensors, of any device, into the segment whose turn it is.

        `gather` turns each named tensor into its full form just before its copy, so that only one is gathered at a
        time.
        `fresh`: into a new segment; who still reads the old one keeps it, whole, until it lets go.
        `dtype`: floating-point tensors are staged in it; None: each in its own.
        """
        plan = plan_segment(describe(name, tensor, dtype) for name, tensor in named_tensors.items())
        name, memory = self._next_segment(plan.nbytes, fresh=fresh)
        whole = torch.frombuffer(memory, dtype=torch.uint8)
        specs = []
        for placement in plan.placements:
            tensor = named_tensors[placement.info.name].detach()
            if gather is not None:
                tensor = gather(placement.info.name, tensor)
            specs.append(_copy_in(whole, placement, tensor))
        return SharedWeights(version=version, segment=name, nbytes=plan.nbytes, tensors=specs)

    def close(self) -> None:
        """Unlinks both segments; engines keep what they have mapped. May be called twice."""
        for name, _ in self._segments:
            unlink_segment(name)
        self._segments.clear()

    def _next_segment(self, nbytes: int, *, fresh: bool) -> tuple[str, mmap.mmap]:
        turn, self._turn = self._turn, (self._turn + 1) % NUM_SEGMENTS
        if not fresh and turn < len(self._segments) and len(self._segments[turn][1]) == nbytes:
            return self._segments[turn]
        name = segment_name(self._run_id, self._prefix, secrets.token_hex(4))
        segment = (name, create_segment(name, nbytes))
        if turn < len(self._segments):
            unlink_segment(self._segments[turn][0])
            self._segments[turn] = segment
        else:
            self._segments.append(segment)
        return segment


class AttachedWeights:
    """The engine's end: views of a staged copy. What is written to them stays in this process."""

    def __init__(self, weights: SharedWeights) -> None:
        self._weights = weights
        memory = map_segment(weights.segment, weights.nbytes)
        whole = torch.frombuffer(memory, dtype=torch.uint8)
        self.tensors: dict[str, torch.Tensor] = {spec.name: _view(whole, spec) for spec in weights.tensors}
        """By name; zero copy. They stay valid after `close` for as long as somebody holds them."""

    @property
    def version(self) -> int:
        return self._weights.version

    def verify(self) -> None:
        """Recomputes every digest; raises WeightsError naming the first tensor that differs."""
        for spec in self._weights.tensors:
            found = digest(self.tensors[spec.name])
            if found != spec.digest:
                raise WeightsError(
                    f"tensor {spec.name!r} of version {self.version}: digest {found}, announced {spec.digest}; "
                    "its segment was overwritten, or damaged"
                )

    def close(self) -> None:
        """Lets go of the views; the memory is unmapped with the last one still held elsewhere."""
        # The map itself is never closed by hand: torch does not lock the buffer, a view would then dangle.
        self.tensors.clear()


def attach(weights: SharedWeights) -> AttachedWeights:
    """Maps a staged copy. Raises WeightsError when it is gone, too small, or described wrongly."""
    return AttachedWeights(weights)


def describe(name: str, tensor: torch.Tensor, dtype: torch.dtype | None) -> TensorInfo:
    target = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    identity = (local.data_ptr(), *tensor.shape, *local.stride()) if local.numel() else id(tensor)
    return TensorInfo(name, str(target).removeprefix("torch."), tuple(tensor.shape), target.itemsize, identity)


def _copy_in(whole: torch.Tensor, placement: Placement, tensor: torch.Tensor) -> TensorSpec:
    """The digest is the source's, so that a copy gone wrong is found by the reader."""
    info = placement.info
    tensor = tensor.to(getattr(torch, info.dtype))
    whole[placement.offset : placement.end].view(tensor.dtype).view(info.shape).copy_(tensor)
    return TensorSpec(
        name=info.name, dtype=info.dtype, shape=list(info.shape), offset=placement.offset, digest=digest(tensor)
    )


def _view(whole: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    dtype = getattr(torch, spec.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise WeightsError(f"tensor {spec.name!r} has the unknown dtype {spec.dtype!r}")
    nbytes = torch.Size(spec.shape).numel() * dtype.itemsize
    if spec.offset < 0 or spec.offset + nbytes > whole.numel():
        raise WeightsError(
            f"tensor {spec.name!r} lies at bytes {spec.offset}..{spec.offset + nbytes} of a segment of {whole.numel()}"
        )
    return whole[spec.offset : spec.offset + nbytes].view(dtype).view(spec.shape)

"""Weights by file, between hosts that share a folder: the trainer writes safetensors, engines read them whole.

    trainer: FileStage.stage(v) --FileWeights--> engine: attach() -> verify() -> keep the tensors

A file appears whole under its name or not at all, and the two newest are kept (contract 7 as for shared memory).
"""

import os
import secrets
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save_file

from flashflow.errors import WeightsError
from flashflow.records import FileWeights
from flashflow.transport.weights.digest import digest
from flashflow.transport.weights.plan import plan_segment
from flashflow.transport.weights.shared_memory import describe

NUM_FILES = 2


class FileStage:
    """The trainer's end. Files are named `<run_id>/<version>-<random>.safetensors`."""

    def __init__(self, folder: Path, run_id: str) -> None:
        """Removes what an earlier, killed incarnation of the same run left behind."""
        self._folder = folder / run_id
        self._files: list[Path] = []
        self.close()

    def stage(
        self,
        version: int,
        named_tensors: Mapping[str, torch.Tensor],
        gather: Callable[[str, torch.Tensor], torch.Tensor] | None = None,
        dtype: torch.dtype | None = None,
        *,
        fresh: bool = False,
    ) -> FileWeights:
        """As WeightStage.stage; every file is a fresh one."""
        del fresh
        plan = plan_segment(describe(name, tensor, dtype) for name, tensor in named_tensors.items())
        tensors: dict[str, torch.Tensor] = {}
        for placement in plan.placements:
            tensor, target = named_tensors[placement.info.name].detach(), getattr(torch, placement.info.dtype)
            tensors[placement.info.name] = (
                (gather(placement.info.name, tensor) if gather else tensor).to("cpu", target).contiguous()
            )
        path = self._folder / f"{version:08d}-{secrets.token_hex(4)}.safetensors"
        self._write(tensors, path)
        return FileWeights(
            version=version,
            path=str(path.resolve()),
            digests={name: digest(tensor) for name, tensor in tensors.items()},
        )

    def close(self) -> None:
        self._files.clear()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _write(self, tensors: Mapping[str, torch.Tensor], path: Path) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".partial")
        try:
            save_file(dict(tensors), partial)
            os.replace(partial, path)
        except (OSError, SafetensorError) as error:
            partial.unlink(missing_ok=True)
            raise WeightsError(f"cannot write the weights to {path} ({error}): is its disk full?") from error
        self._files.append(path)
        for old in self._files[:-NUM_FILES]:
            old.unlink(missing_ok=True)
        del self._files[:-NUM_FILES]


class ReadWeights:
    """The engine's end: tensors of its own, read from the file."""

    def __init__(self, weights: FileWeights) -> None:
        self._weights = weights
        path = Path(weights.path)
        try:
            # Whole and at once: a mapped file that another host removes can no longer be read.
            stored = load(path.read_bytes())
        except FileNotFoundError as error:
            raise WeightsError(
                f"no weights file {path}: a newer version has taken its place, or this host does not see run.folder; "
                "await the next update"
            ) from error
        except SafetensorError as error:
            raise WeightsError(f"weights file {path} is damaged: {error}") from error
        # Copies start on a cache line, as the engine's kernels need them to round alike.
        self.tensors: dict[str, torch.Tensor] = {name: tensor.clone() for name, tensor in stored.items()}

    def verify(self) -> None:
        """Recomputes every digest; raises WeightsError naming the first tensor that differs."""
        if self.tensors.keys() != self._weights.digests.keys():
            odd = sorted(self.tensors.keys() ^ self._weights.digests.keys())
            raise WeightsError(f"weights file {self._weights.path}: {', '.join(odd[:5])} announced or stored, not both")
        for name, expected in self._weights.digests.items():
            found = digest(self.tensors[name])
            if found != expected:
                raise WeightsError(
                    f"tensor {name!r} of version {self._weights.version}: digest {found}, announced {expected}; "
                    f"{self._weights.path} is damaged"
                )

    def close(self) -> None:
        self.tensors.clear()


def attach(weights: FileWeights) -> ReadWeights:
    """Reads a staged copy. Raises WeightsError when it is gone or damaged."""
    return ReadWeights(weights)

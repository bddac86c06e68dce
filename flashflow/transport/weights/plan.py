"""Where each tensor of a staged copy lies: names, sizes and identities in, offsets out. Pure; knows no torch."""

import math
from collections.abc import Iterable

import msgspec

from flashflow.errors import WeightsError

ALIGNMENT = 64
"""Bytes. Views must start on a cache line: CPU kernels may round differently on other alignments."""


class TensorInfo(msgspec.Struct, frozen=True):
    """One named tensor, as much of it as the plan needs."""

    name: str
    dtype: str
    """torch name without prefix, e.g. `float32`."""
    shape: tuple[int, ...]
    item_bytes: int
    """Of one element."""
    identity: int | tuple[int, ...]
    """Equal exactly for names of the same elements in memory (tied parameters)."""

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.item_bytes


class Placement(msgspec.Struct, frozen=True):
    """A tensor and the bytes it occupies: [offset, offset + nbytes)."""

    info: TensorInfo
    offset: int

    @property
    def end(self) -> int:
        return self.offset + self.info.nbytes


class SegmentPlan(msgspec.Struct, frozen=True):
    placements: tuple[Placement, ...]
    """In the order given; offsets ascend."""
    nbytes: int
    """Of the whole segment, a positive multiple of 64."""


def aligned(nbytes: int) -> int:
    """The smallest multiple of 64 that is at least `nbytes`."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def plan_segment(tensors: Iterable[TensorInfo]) -> SegmentPlan:
    """Lays the tensors out one behind another, 64-byte aligned; of tied ones only the first.

    Raises WeightsError when one name stands for two tensors, or when there is none at all.
    """
    placements: list[Placement] = []
    names: set[str] = set()
    identities: set[int | tuple[int, ...]] = set()
    offset = 0
    for info in tensors:
        if info.name in names:
            raise WeightsError(f"weights name {info.name!r} occurs twice; give each tensor a name of its own")
        names.add(info.name)
        if info.identity in identities:
            continue
        identities.add(info.identity)
        placements.append(Placement(info, offset))
        offset = aligned(offset + info.nbytes)
    if not placements:
        raise WeightsError("no tensors to stage: the model has no parameters")
    return SegmentPlan(tuple(placements), max(offset, ALIGNMENT))

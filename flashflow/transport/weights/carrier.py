"""What the carriers of weights have in common: a trainer's end that stages, an engine's end that attaches."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

import torch

from flashflow.records import FileWeights, SharedWeights, StagedWeights
from flashflow.transport.weights import file, shared_memory


class WeightStage(Protocol):
    """The trainer's end. Two copies take turns: version v stays whole while v + 1 is staged."""

    def stage(
        self,
        version: int,
        named_tensors: Mapping[str, torch.Tensor],
        gather: Callable[[str, torch.Tensor], torch.Tensor] | None = None,
        dtype: torch.dtype | None = None,
        *,
        fresh: bool = False,
    ) -> StagedWeights:
        """gather: turns each tensor into its full form just before its copy. dtype: of floating-point tensors; None:
        each its own. fresh: no copy that somebody may still read is overwritten."""
        ...

    def close(self) -> None:
        """Removes every copy; engines keep what they have attached. May be called twice."""
        ...


class AttachedWeights(Protocol):
    """The engine's end."""

    @property
    def tensors(self) -> Mapping[str, torch.Tensor]:
        """By name, each starting on a cache line; they may be kept."""
        ...

    def verify(self) -> None:
        """Raises WeightsError naming the first tensor whose digest is not the announced one."""
        ...

    def close(self) -> None: ...


def make_stage(run_id: str, folder: Path | None) -> WeightStage:
    """folder: of the files; None: in shared memory."""
    return shared_memory.WeightStage(run_id) if folder is None else file.FileStage(folder, run_id)


def attach(weights: StagedWeights) -> AttachedWeights:
    """Raises WeightsError when the copy is gone, too small, or described wrongly."""
    match weights:
        case SharedWeights():
            return shared_memory.attach(weights)
        case FileWeights():
            return file.attach(weights)

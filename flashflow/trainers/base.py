"""What a trainer must offer. Synchronous; one thread calls everything."""

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import msgspec

from flashflow.records import Manifest, StagedWeights, Trajectory


class TrainResult(msgspec.Struct, frozen=True):
    """Outcome of one batch."""

    step: int
    metrics: dict[str, float]
    """At least loss, grad_norm, learning_rate, tokens_trained, clip_fraction, empty_batch; unless it is one, also
    rho_mean, mismatch_k3, entropy, and r_mean, r_max, w_mean, w_max where the log-probabilities before the first
    optimizer step are known."""


class Trainer(Protocol):
    step: int
    """Number of batches trained into the weights = the policy version."""

    def rows_of(self, manifest: Manifest) -> Sequence[int]:
        """Places of the rows that this rank works on; each row of the manifest belongs to one rank."""
        ...

    def train(self, manifest: Manifest, rows: list[Trajectory]) -> TrainResult:
        """Train batch manifest.step == step + 1; rows are those of `rows_of`, in its order. Raises ContractError
        otherwise."""
        ...

    def stage(self, *, fresh: bool = False) -> StagedWeights:
        """Copy the present weights into a shared-memory segment; two segments take turns.

        fresh: into a new one, for an engine may still read the one whose turn it is.
        """
        ...

    def save(self, folder: Path) -> None:
        """Write a complete checkpoint of the present step, atomically (temporary name, fsync, rename)."""
        ...

    def load(self, folder: Path) -> None:
        """Weights, optimizer, schedule, random states and step from `save`."""
        ...

    def close(self) -> None:
        """Unlink the shared-memory segments."""
        ...

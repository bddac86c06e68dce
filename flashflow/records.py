"""What flows round the ring, as frozen records: Task -> Trajectory -> Manifest.

Letters of array shapes: T tokens of one trajectory, prompt and every turn, in order.
"""

from typing import Any, Literal, TypeAlias, dataclass_transform

import msgspec
import numpy as np
import numpy.typing as npt

from flashflow.errors import ContractError

Purpose = Literal["train", "eval"]
Outcome = Literal["completed", "truncated", "failed"]
"""`truncated`: the token or turn budget ended it (a normal sample). `failed`: no usable reward."""

Int32Array = npt.NDArray[np.int32]
Float32Array = npt.NDArray[np.float32]
UInt8Array = npt.NDArray[np.uint8]


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(msgspec.field,))
class Record(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of records."""


class SampleId(msgspec.Struct, frozen=True, order=True, array_like=True):
    """Names one attempt. `group` is the ordinal of admission, never the dataset row."""

    group: int
    """Ordinal of admission from 0; the index of the held-out problem when the purpose is `eval`."""
    member: int
    """0 .. group_size + redundant_members - 1."""
    retry: int = 0
    """Environment retries and re-admissions; part of the sampling key. Lease epochs are not."""

    def __str__(self) -> str:
        return f"g{self.group}m{self.member}" + (f"r{self.retry}" if self.retry else "")


class Task(Record):
    """One row of the dataset."""

    cursor: int
    """Position in the endless stream of tasks: pass * len(dataset) + place in that pass's shuffle."""
    row: dict[str, Any]
    """Columns; `prompt` is a string or a list of chat messages. Plain msgpack types only."""


class Trajectory(Record):
    """One finished attempt, token by token."""

    sample: SampleId
    tokens: Int32Array
    """[T] every token, prompt and observations included."""
    mask: UInt8Array
    """[T] 1 where the policy sampled the token."""
    logprobs: Float32Array
    """[T] behaviour log-probability at the sampling temperature, in nats; 0 where not sampled."""
    versions: Int32Array
    """[T] policy version of the weights that sampled the token; -1 where not sampled."""
    num_turns: int
    outcome: Outcome
    reward: float | None
    """Raw task reward; None when failed."""
    reward_components: dict[str, float]
    finish_reason: str
    """Of the last turn: stop | length | aborted, or the reason of the failure."""
    seconds: float
    """From lease to commit, on the env's clock."""

    def __post_init__(self) -> None:
        lengths = {len(self.tokens), len(self.mask), len(self.logprobs), len(self.versions)}
        if len(lengths) != 1:
            raise ContractError(f"trajectory {self.sample}: arrays of different lengths {sorted(lengths)}")

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def num_sampled(self) -> int:
        return int(self.mask.sum())

    @property
    def initiating_version(self) -> int | None:
        """Version of the oldest sampled token; None when nothing was sampled."""
        sampled = self.versions[self.mask.astype(bool)]
        return int(sampled.min()) if len(sampled) else None


class ManifestRow(Record):
    """What the packing of one sample needs, without its payload."""

    sample: SampleId
    num_tokens: int
    num_sampled: int
    initiating_version: int
    reward: float | None
    outcome: Outcome
    use: int = 1
    """Times the sample is trained, this one included; above 1 the row is a replay slot (contract 9)."""


class Manifest(Record):
    """Batch number `step`: which samples, in which order. Journalled before it is handed out (contract 5)."""

    step: int
    """k, from 1; the batch that turns version k - 1 into k."""
    rows: list[ManifestRow]
    """Fresh samples ordered by group, then member; after them the replay slots, group by group."""
    group_size: int
    """Rows of a group at most; one that went with a quorum has fewer."""
    rng_key: int
    """64 bits, for any randomness the optimizer step needs."""
    replaced: list[int] = []
    """Groups without signal in whose place replay slots are trained."""
    num_filtered: int = 0
    """Groups filtered since the batch before."""
    redone: bool = False
    """True when it was handed out before: its training repeats work lost after the last checkpoint."""


class TensorSpec(Record):
    """Where one tensor lies in a staged copy of the weights."""

    name: str
    dtype: str
    """torch name without prefix, e.g. `float32`."""
    shape: list[int]
    offset: int
    """Bytes from the start of the segment, a multiple of 64."""
    digest: int
    """Sum of the little-endian int32 view (the tail zero-padded), modulo 2**63."""


class SharedWeights(Record, tag="shared_memory"):
    """A complete staged copy of version `version` in a POSIX shared-memory segment."""

    version: int
    segment: str
    nbytes: int
    tensors: list[TensorSpec]
    """Each distinct storage once: of tied parameters only the first name."""


class FileWeights(Record, tag="file"):
    """A complete staged copy of version `version` in a safetensors file, for engines of any host that sees it."""

    version: int
    path: str
    digests: dict[str, int]
    """By name of the tensor, as in TensorSpec; of tied parameters only the first name."""


StagedWeights: TypeAlias = SharedWeights | FileWeights
"""Weights that engines can fetch, by the carrier that has them."""

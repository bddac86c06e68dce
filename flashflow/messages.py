"""Every message of the fleet, as tagged structs; `topology.py` says who sends which to whom.

A call is answered by exactly one reply. A streamed call may be preceded by partial replies of the same type.
Arrays travel as raw frames (transport/codec.py).
"""

from typing import Literal, dataclass_transform

import msgspec

from flashflow.records import (
    Float32Array,
    Int32Array,
    Manifest,
    Purpose,
    SampleId,
    StagedWeights,
    Task,
    Trajectory,
)


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(msgspec.field,))
class Message(msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """Base of messages; the tag is the class name."""


# ---- env -> buffer


class AcquireLease(Message):
    """Asks for one attempt to run; answered when there is one, or with NoLease after `long_poll_s`."""


class Lease(Message):
    """The right, until superseded, to run one attempt and commit it."""

    sample: SampleId
    lease_epoch: int
    purpose: Purpose
    task: Task
    min_version: int
    """No token may be sampled by weights older than this."""
    pin_version: int | None = None
    """Evaluation: exactly these weights."""
    block_size: int = 1
    """Attempts at the group whose first turns go to one engine together; 1 once one of them is tried again."""


class NoLease(Message):
    """Nothing may start now; `reason` is for a person (`admission is closed until version 4 is served`)."""

    reason: str
    finished: bool = False
    """True: nothing will ever come any more; the env may leave."""


class LeaseName(msgspec.Struct, frozen=True, array_like=True):
    """One lease of an env."""

    sample: SampleId
    lease_epoch: int
    purpose: Purpose


class AwaitRevoked(Message):
    """Asks which leases of this env have ended under it; answered by Revoked, empty after `long_poll_s`."""

    late: list[LeaseName] = []
    """Older than `trajectory_deadline_s`, and alive: what they waited for engines does not count."""


class Revoked(Message):
    """Their attempts are to be aborted at the engine and reported as failed, with what they sampled. Told once."""

    leases: list[LeaseName]


class AwaitScoring(Message):
    """Schedule sync_naive: the attempt's tokens are there; answered once it may be scored, or after `long_poll_s`."""

    sample: SampleId
    lease_epoch: int


class ScoringReply(Message):
    """`score: false`: not yet, ask again."""

    score: bool


class Commit(Message):
    """A finished attempt."""

    lease_epoch: int
    purpose: Purpose
    trajectory: Trajectory


class AttemptFailed(Message):
    """An attempt that ended without a trajectory because its environment broke."""

    sample: SampleId
    lease_epoch: int
    purpose: Purpose
    reason: str
    traceback: str
    num_sampled: int = 0
    """Tokens it had sampled: waste."""


class CommitReply(Message):
    """`duplicate` means it had already been accepted: as good as `accepted`."""

    status: Literal["accepted", "duplicate", "superseded"]


# ---- env -> proxy -> engine


class SamplingKey(msgspec.Struct, frozen=True, array_like=True):
    """With the token's position it keys the random number that samples the token (contract 3)."""

    seed: int
    group: int
    member: int
    retry: int
    turn: int


class Generate(Message):
    """Continue `prompt_ids`; answered by GenerateReply, streamed."""

    request: str
    """Unique over the run."""
    session: str
    """Same for all turns of one attempt, or of one group: the proxy keeps it on one engine."""
    key: SamplingKey
    prompt_ids: Int32Array
    generated_ids: Int32Array
    """Tokens already sampled for this request by an engine that died; they count against max_new_tokens."""
    max_new_tokens: int
    temperature: float
    """> 0; 0 means greedy (the log-probability is then at temperature 1)."""
    stop_ids: list[int]
    stop_strings: list[str]
    min_version: int
    pin_version: int | None = None
    block_size: int = 1
    """So many requests of this session begin together on one engine; the proxy gathers them first."""


class GenerateReply(Message):
    """The tokens since the previous part; the last part has a finish_reason."""

    token_ids: Int32Array
    logprobs: Float32Array
    versions: Int32Array
    finish_reason: Literal["", "stop", "length", "aborted"] = ""
    waited_s: float = 0.0
    """Since the part before: seconds in which no engine worked on it. They count against no deadline of the attempt."""
    num_waiting: int | None = None
    """Last part: requests that waited in the engine then; None where it does not say."""


class Abort(Message):
    """Ends requests now; their streams finish with `aborted`. Unknown ids are ignored."""

    requests: list[str]


class Suspend(Message):
    """Stop decoding between two steps, keep everything."""


class Resume(Message):
    """Go on decoding."""


class Update(Message):
    """Serve these weights from the next decode step on; answered by Serving once they are swapped in."""

    weights: StagedWeights
    deadline_s: float


class Serving(Message):
    """`version` is the lowest version served by an engine that may take requests."""

    version: int
    engines: list[str]


class EngineStatusRequest(Message):
    """Asks an engine what it is and does."""


class EngineStatus(Message):
    version: int
    """-1 before the first weights."""
    slots: int
    running: int
    waiting: int
    tokens_generated: int
    exact: bool
    """The start-up probe found batch invariance to the last bit."""
    packages: dict[str, str]


class Ack(Message):
    """Done; nothing to say."""


# ---- env -> reward


class Score(Message):
    """Score one finished attempt."""

    sample: SampleId
    purpose: Purpose
    prompt: str
    completion: str
    """Decoded sampled tokens of the last turn, special tokens left out."""
    row: Task


class ScoreReply(Message):
    """`error` is the traceback of a reward function that raised: the run stops."""

    reward: float | None
    components: dict[str, float]
    error: str = ""
    timed_out: bool = False


# ---- controller -> buffer, trainer -> buffer


class NextBatch(Message):
    """Batch `step`; asked again it gives the same. Answered by BatchReply."""

    step: int


class BatchReply(Message):
    """Without a manifest nothing is ready yet (`reason` says why, ask again), or `finished`: the data has ended."""

    manifest: Manifest | None
    reason: str = ""
    finished: bool = False
    stats: dict[str, float] = {}
    """Counts derived from the ledger at hand-over (see roles/buffer.py)."""


class FetchRows(Message):
    """Payloads of samples of manifest `step`, in the order asked."""

    step: int
    samples: list[SampleId]


class Rows(Message):
    trajectories: list[Trajectory]


class ServingVersion(Message):
    """All engines that take requests serve at least `version`."""

    version: int


class EnginesPaused(Message):
    """Engines sleep, drain or update: deadlines of groups stand still until `paused: false` or a ServingVersion."""

    paused: bool


class Checkpointed(Message):
    """A durable checkpoint covers manifests up to `step`."""

    step: int


class Evaluate(Message):
    """Run the held-out problems greedily on exactly `version`; answered by EvalReply when all are scored."""

    version: int


class EvalReply(Message):
    version: int
    num_problems: int
    accuracy: float
    """Mean reward; a failed attempt counts as 0."""
    mean_response_tokens: float
    num_failed: int
    """Ended without a reward; they count as 0."""
    num_missing: int
    """Not ended by evaluation.deadline_s; more than 0: the accuracy is none."""
    seconds: float


class JournalStatusRequest(Message):
    """Asks what the journal holds; for the start of a gang generation."""


class JournalStatus(Message):
    last_manifest: int
    """Highest manifest handed out; 0 for none."""
    counts: dict[str, int]
    tokens_wasted: int


class Finish(Message):
    """The run is over: hand out nothing more, flush."""


ANY = (
    AcquireLease | Lease | NoLease | AwaitRevoked | Revoked | AwaitScoring | ScoringReply
    | Commit | AttemptFailed | CommitReply
    | Generate | GenerateReply | Abort | Suspend | Resume | Update | Serving
    | EngineStatusRequest | EngineStatus | Ack | Score | ScoreReply
    | NextBatch | BatchReply | FetchRows | Rows | ServingVersion | EnginesPaused | Checkpointed
    | Evaluate | EvalReply | JournalStatusRequest | JournalStatus | Finish
)  # fmt: skip
"""The closed set the decoder accepts."""

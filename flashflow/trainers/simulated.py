"""A trainer that changes no weight: it fetches its rows, waits as long as training would take, stages a few bytes.

    CONTROLLER --train k--> TRAINER --FetchRows k--> BUFFER        TRAINER ~~staged version~~> engines

waits for: orders of the controller, rows of the buffer, the time of a batch.
unblocked by: the controller; the buffer's answer; its clock.
never: imports torch, trains.
"""

from pathlib import Path

import msgspec

from flashflow.clock import Clock
from flashflow.config.sections import CheckpointSection, NetworkSection
from flashflow.config.simulated import SimulatedTrainerSection
from flashflow.errors import ContractError
from flashflow.messages import FetchRows, Rows
from flashflow.records import Manifest, SharedWeights, Trajectory
from flashflow.simulate.spans import Spans, Unheard
from flashflow.simulate.weights import TinyStage, virtual_weights
from flashflow.trainers.base import TrainResult
from flashflow.trainers.checkpoint import Description, begin, finish, folder_name, newest_complete, prune
from flashflow.trainers.metrics import UNMEASURED, batch_metrics
from flashflow.transport.channel import Client

ROWS_PER_FETCH = 64
"""As the real trainer's."""


def train_seconds(section: SimulatedTrainerSection, num_tokens: int) -> float:
    """Of a batch of so many tokens."""
    return section.fixed_s + section.seconds_per_token * num_tokens / section.devices


class SimulatedTrainer:
    """Takes the place of TrainerRole: a controller's TrainerLink."""

    def __init__(
        self,
        *,
        section: SimulatedTrainerSection,
        rank: int,
        buffer: Client,
        folder: Path | None,
        checkpoint: CheckpointSection,
        network: NetworkSection,
        clock: Clock,
        run_id: str,
        spans: Spans | None = None,
    ) -> None:
        """folder: of checkpoints; None: on the virtual clock, where nothing is kept on disk or in shared memory."""
        self._section = section
        self._rank = rank
        self._buffer = buffer
        self._folder = folder
        self._checkpoint = checkpoint
        self._network = network
        self._clock = clock
        self._spans = spans if spans is not None else Unheard()
        self._stage = TinyStage(run_id) if folder is not None and rank == 0 else None
        self._step = 0
        self._doing = "waits for the controller"

    async def open(self, resume: bool) -> int:
        newest = newest_complete(self._folder) if resume and self._folder is not None else None
        self._step = int(newest.name.removeprefix("step-")) if newest is not None else 0
        return self._step

    def describe(self) -> str:
        return f"trainer-{self._rank}: at step {self._step}, {self._doing}"

    async def train(self, manifest: Manifest) -> TrainResult:
        """Raises ContractError unless it is the next batch."""
        if manifest.step != self._step + 1:
            raise ContractError(f"manifest {manifest.step} handed to a trainer at step {self._step}")
        self._doing = f"trains batch {manifest.step}"
        started = self._clock.now()
        rows = await self._fetch(manifest)
        num_tokens = sum(row.num_tokens for row in rows)
        seconds = train_seconds(self._section, num_tokens)
        if seconds > 0:
            await self._clock.sleep(seconds)
        self._step = manifest.step
        self._spans.add(f"trainer-{self._rank}", 0, f"batch {manifest.step}", started, self._clock.now())
        self._doing = "waits for the controller"
        return TrainResult(self._step, {**batch_metrics(manifest, rows), **_unchanged(manifest)})

    async def stage(self, *, fresh: bool) -> SharedWeights:
        """Every copy is a new one, `fresh` or not."""
        if self._section.stage_s > 0:
            await self._clock.sleep(self._section.stage_s)
        return self._stage.stage(self._step) if self._stage is not None else virtual_weights(self._step)

    async def save(self) -> Path:
        if self._folder is None or self._rank > 0:
            return Path()
        folder = self._folder / folder_name(self._step)
        begin(folder)
        finish(folder, Description(self._step, {}, {}, 0, 0, num_ranks=1))
        prune(self._folder, self._checkpoint.keep)
        return folder

    async def close(self) -> None:
        if self._stage is not None:
            self._stage.close()

    async def answer(self, method: str, payload: bytes) -> bytes:
        """The same calls as bytes, for RPC. Raises ContractError for an unknown method."""
        match method:
            case "open":
                return msgspec.msgpack.encode(await self.open(msgspec.msgpack.decode(payload, type=bool)))
            case "train":
                return msgspec.msgpack.encode(await self.train(msgspec.msgpack.decode(payload, type=Manifest)))
            case "stage":
                return msgspec.msgpack.encode(await self.stage(fresh=msgspec.msgpack.decode(payload, type=bool)))
            case "save":
                return str(await self.save()).encode()
            case _:
                raise ContractError(f"the trainer has no method {method!r}")

    async def _fetch(self, manifest: Manifest) -> list[Trajectory]:
        samples = [row.sample for row in manifest.rows]
        rows: list[Trajectory] = []
        for start in range(0, len(samples), ROWS_PER_FETCH):
            request = FetchRows(step=manifest.step, samples=samples[start : start + ROWS_PER_FETCH])
            reply = await self._buffer.call(request, Rows, deadline_s=self._network.call_deadline_s)
            rows += reply.trajectories
        return rows


def _unchanged(manifest: Manifest) -> dict[str, float]:
    """Of weights that never change: every log-probability is what it was when its token was sampled."""
    zeros = dict.fromkeys(("loss", "grad_norm", "learning_rate", "empty_batch"), 0.0)
    return {**UNMEASURED, **zeros, "tokens_trained": float(sum(row.num_sampled for row in manifest.rows))}

"""trainer: one rank of the gang; pulls its rows of the manifest itself and trains them.

    CONTROLLER --train k--> TRAINER --FetchRows k--> BUFFER        TRAINER ~~staged weights~~> engines

waits for: orders of the controller, rows of the buffer.
unblocked by: the controller; the buffer's answer.
never: decides what is trained, raises the version by itself, sends a trajectory over RPC.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor
from pathlib import Path
from typing import ParamSpec, TypeVar

import msgspec

from flashflow.config.sections import CheckpointSection, NetworkSection
from flashflow.errors import ContractError
from flashflow.messages import FetchRows, Rows
from flashflow.records import Manifest, StagedWeights, Trajectory
from flashflow.trainers.base import Trainer, TrainResult
from flashflow.trainers.checkpoint import folder_name, newest_complete, prune
from flashflow.transport.channel import Client

ROWS_PER_FETCH = 64
"""Bounds one message; a batch is fetched in several."""

P = ParamSpec("P")
T = TypeVar("T")


class TrainerRole:
    """A controller's TrainerLink onto a trainer in this process."""

    def __init__(
        self,
        *,
        trainer: Trainer,
        rank: int,
        buffer: Client,
        folder: Path,
        checkpoint: CheckpointSection,
        network: NetworkSection,
        executor: Executor | None,
    ) -> None:
        self._trainer = trainer
        self._rank = rank
        self._buffer = buffer
        self._folder = folder
        self._checkpoint = checkpoint
        self._network = network
        self._executor = executor
        self._doing = "waits for the controller"

    async def open(self, resume: bool) -> int:
        newest = newest_complete(self._folder) if resume else None
        if newest is not None:
            await self._compute(self._trainer.load, newest)
        return self._trainer.step

    def describe(self) -> str:
        return f"trainer-{self._rank}: at step {self._trainer.step}, {self._doing}"

    async def train(self, manifest: Manifest) -> TrainResult:
        self._doing = f"fetches the rows of batch {manifest.step}"
        rows = await self._fetch(manifest)
        self._doing = f"trains batch {manifest.step}"
        result = await self._compute(self._trainer.train, manifest, rows)
        self._doing = "waits for the controller"
        return result

    async def stage(self, *, fresh: bool) -> StagedWeights:
        return await self._compute(self._trainer.stage, fresh=fresh)

    async def save(self) -> Path:
        folder = self._folder / folder_name(self._trainer.step)
        await self._compute(self._trainer.save, folder)
        if self._rank == 0:
            await self._compute(prune, self._folder, self._checkpoint.keep)
        return folder

    async def close(self) -> None:
        await self._compute(self._trainer.close)

    async def answer(self, method: str, payload: bytes) -> bytes:
        """The same calls as bytes, for RPC. Raises ContractError for an unknown method."""
        match method:
            case "open":
                return msgspec.msgpack.encode(await self.open(msgspec.msgpack.decode(payload, type=bool)))
            case "train":
                return msgspec.msgpack.encode(await self.train(msgspec.msgpack.decode(payload, type=Manifest)))
            case "stage":
                fresh = msgspec.msgpack.decode(payload, type=bool)
                return msgspec.msgpack.encode(await self.stage(fresh=fresh))
            case "save":
                return str(await self.save()).encode()
            case _:
                raise ContractError(f"the trainer has no method {method!r}")

    async def _fetch(self, manifest: Manifest) -> list[Trajectory]:
        samples = [manifest.rows[place].sample for place in self._trainer.rows_of(manifest)]
        rows: list[Trajectory] = []
        for start in range(0, len(samples), ROWS_PER_FETCH):
            request = FetchRows(step=manifest.step, samples=samples[start : start + ROWS_PER_FETCH])
            reply = await self._buffer.call(request, Rows, deadline_s=self._network.call_deadline_s)
            rows += reply.trajectories
        return rows

    async def _compute(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """On the one thread that owns the model; here and now where there is none (one process, a debugger)."""
        if self._executor is None:
            return work(*args, **kwargs)
        return await asyncio.get_running_loop().run_in_executor(self._executor, lambda: work(*args, **kwargs))

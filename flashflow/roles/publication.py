"""The lane in which the controller publishes and evaluates, beside training, strictly in order of versions.

    stage(v) -> [ UPDATE v at the engines -> ServingVersion v to the buffer -> evaluation of v ] -> [ UPDATE v+1 ... ]

An evaluation pins its version: the next UPDATE waits until it ends (contract 9). Two staged copies take turns, so a
copy may be overwritten as soon as the version after it is served.
"""

import asyncio
from collections.abc import Awaitable, Callable

import msgspec

from flashflow.config.sections import EvalSection, NetworkSection, WeightsSection
from flashflow.messages import Ack, EnginesPaused, EvalReply, Evaluate, Serving, ServingVersion, Update
from flashflow.records import StagedWeights
from flashflow.transport.channel import Client


class Published(msgspec.Struct):
    """What the lane has done so far."""

    version: int = -1
    """Newest version served by the engines."""
    sync_s: float = 0.0
    """Seconds of the last UPDATE, from the order to all engines serving."""
    num_engines: int = 0
    """Engines that took it."""


class PublicationLane:
    def __init__(
        self,
        *,
        proxy: Client,
        buffer: Client,
        weights: WeightsSection,
        evaluation: EvalSection,
        network: NetworkSection,
        now: Callable[[], float],
        on_evaluation: Callable[[EvalReply], None],
    ) -> None:
        self._proxy = proxy
        self._buffer = buffer
        self._weights = weights
        self._evaluation = evaluation
        self._network = network
        self._now = now
        self._doing = "no update under way"
        self._on_evaluation = on_evaluation
        self._tail: asyncio.Task[None] | None = None
        self._served: asyncio.Task[None] | None = None
        self.published = Published()

    async def served(self) -> None:
        """Returns when the last published version is served (its evaluation may still run); raises what failed."""
        if self._served is not None:
            await asyncio.shield(self._served)

    async def drained(self) -> None:
        """Returns when everything in the lane, evaluations included, is done; raises what failed."""
        await self.served()
        if self._tail is not None:
            await asyncio.shield(self._tail)

    def publish(self, staged: StagedWeights, *, evaluate: bool) -> None:
        """Queue the update, then the evaluation of that version if asked for."""
        self._served = asyncio.create_task(_after(self._tail, lambda: self._update(staged)))
        self._tail = self._served
        if evaluate:
            self._tail = asyncio.create_task(_after(self._served, lambda: self._evaluate(staged.version)))

    @property
    def settled_version(self) -> int | None:
        """The version served, while no update is under way."""
        settled = self._served is not None and self._served.done()
        return self.published.version if settled and self.published.version >= 0 else None

    def evaluate(self, version: int) -> None:
        """Queue an evaluation of the version published last."""
        self._tail = asyncio.create_task(_after(self._tail, lambda: self._evaluate(version)))

    def failure(self) -> BaseException | None:
        """The first failure of the lane, so that the controller sees it while it waits for something else."""
        for task in (self._served, self._tail):
            if task is not None and task.done() and not task.cancelled() and task.exception() is not None:
                return task.exception()
        return None

    def describe(self) -> str:
        return self._doing

    async def close(self) -> None:
        tasks = [task for task in (self._served, self._tail) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _update(self, staged: StagedWeights) -> None:
        started = self._now()
        self._doing = f"engines update to version {staged.version}"
        update = Update(weights=staged, deadline_s=self._weights.deadline_s)
        margin_s = self._network.call_deadline_s
        deadline_s = self._weights.deadline_s + self._network.startup_deadline_s + margin_s
        await self._buffer.call(EnginesPaused(paused=True), Ack, deadline_s=margin_s)
        serving = await self._proxy.call(update, Serving, deadline_s=deadline_s)
        await self._buffer.call(ServingVersion(version=serving.version), Ack, deadline_s=margin_s)
        self.published = Published(
            version=serving.version, sync_s=self._now() - started, num_engines=len(serving.engines)
        )
        self._doing = "no update under way"

    async def _evaluate(self, version: int) -> None:
        deadline_s = self._evaluation.deadline_s + self._network.call_deadline_s
        self._doing = f"evaluation of version {version} runs"
        self._on_evaluation(await self._buffer.call(Evaluate(version=version), EvalReply, deadline_s=deadline_s))
        self._doing = "no update under way"


async def _after(before: asyncio.Task[None] | None, then: Callable[[], Awaitable[None]]) -> None:
    if before is not None:
        await asyncio.shield(before)
    await then()

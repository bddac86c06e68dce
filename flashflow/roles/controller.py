"""controller: the only clock of a run; it alone raises the policy version.

    BUFFER --Manifest k--> CONTROLLER --train k--> TRAINER --staged k--> [publication lane] --UPDATE k--> PROXY

waits for: batch k, the trainer, and before it stages k that k - 1 is served.
unblocked by: enough complete groups; the trainer's answer; engines that have swapped.
never: touches a sample, a weight or a token; pauses rollout for an evaluation or a checkpoint.
"""

import asyncio
import contextlib
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, Protocol, TypeVar

import msgspec

from flashflow.clock import Clock
from flashflow.config.sections import CheckpointSection, EvalSection, NetworkSection, RunSection, WeightsSection
from flashflow.errors import ContractError, DeadlineError
from flashflow.messages import (
    Ack,
    BatchReply,
    Checkpointed,
    EngineStatus,
    EngineStatusRequest,
    EvalReply,
    Finish,
    JournalStatus,
    JournalStatusRequest,
    NextBatch,
    ServingVersion,
)
from flashflow.metrics import manifest_metrics
from flashflow.records import Manifest, StagedWeights
from flashflow.roles.publication import PublicationLane
from flashflow.trainers.base import TrainResult
from flashflow.transport.channel import Client

T = TypeVar("T")


class _Stopped(Exception):
    """The run was told to stop while it waited."""


class TrainerLink(Protocol):
    """The trainer gang as the controller sees it: RPC between processes, direct calls in one."""

    async def open(self, resume: bool) -> int:
        """Load the newest complete checkpoint if `resume`; returns the number of batches in the weights."""
        ...

    async def train(self, manifest: Manifest) -> TrainResult: ...

    async def stage(self, *, fresh: bool) -> StagedWeights:
        """fresh: into a segment that no engine has."""
        ...

    async def save(self) -> Path:
        """Write a checkpoint of the present step, prune old ones."""
        ...


class Events(Protocol):
    """Where a person sees what happens."""

    def step(self, record: dict[str, Any]) -> None: ...

    def evaluation(self, reply: EvalReply) -> None: ...

    def evaluated(self, version: int) -> bool:
        """Whether an evaluation of this version is written down already, also by an earlier process."""
        ...

    def note(self, text: str) -> None: ...


class Outcome(msgspec.Struct, frozen=True):
    """How the run ended."""

    step: int
    reason: str
    """`steps` | `data` | `stopped`."""


class Controller:
    def __init__(
        self,
        *,
        run: RunSection,
        checkpoint: CheckpointSection,
        evaluation: EvalSection,
        weights: WeightsSection,
        network: NetworkSection,
        num_engines: int,
        buffer: Client,
        proxy: Client,
        trainer: TrainerLink,
        events: Events,
        clock: Clock,
        resume: bool,
    ) -> None:
        self._run = run
        self._checkpoint = checkpoint
        self._evaluation = evaluation
        self._weights = weights
        self._network = network
        self._num_engines = num_engines
        self._buffer = buffer
        self._proxy = proxy
        self._trainer = trainer
        self._events = events
        self._clock = clock
        self._resume = resume
        self._stop = asyncio.Event()
        self._evaluations: list[EvalReply] = []
        self._tokens_generated = 0
        self._tokens_wasted = 0.0
        self._saved = -1
        self._doing = "opens the trainer"
        self._lane = PublicationLane(
            proxy=proxy,
            buffer=buffer,
            weights=weights,
            evaluation=evaluation,
            network=network,
            now=clock.now,
            on_evaluation=self._evaluated,
        )

    def describe(self) -> str:
        served = self._lane.published.version
        return f"controller: {self._doing}; version {served} served, {self._lane.describe()}"

    def stop(self) -> None:
        """End in order: the step in training is finished, a checkpoint written."""
        self._stop.set()

    async def run(self) -> Outcome:
        try:
            step = await self._trainer.open(self._resume)
            self._saved = step if step else -1
            self._tokens_generated = (await self._engine_status()).tokens_generated
            step = await self._redo(step)
            if step >= self._run.steps and not self._evaluates(step):
                return await self._finish(step, "steps")
            self._lane.publish(await self._stage(), evaluate=self._evaluates(step))
            return await self._finish(*await self._train_from(step))
        finally:
            await self._lane.close()

    async def _redo(self, step: int) -> int:
        """Repeat the manifests handed out after the checkpoint, publishing nothing before the last (contract 5)."""
        status = await self._buffer.call(
            JournalStatusRequest(), JournalStatus, deadline_s=self._network.startup_deadline_s
        )
        self._tokens_wasted = float(status.tokens_wasted)
        if status.last_manifest < step:
            raise ContractError(
                f"checkpoint of step {step} is ahead of the journal (last manifest {status.last_manifest}): "
                "checkpoints/ and journal/ of the run folder do not belong together"
            )
        if status.last_manifest > step:
            self._events.note(
                f"redoing batches {step + 1} to {status.last_manifest} from the checkpoint of step {step}"
            )
        for redone in range(step + 1, status.last_manifest + 1):
            batch = await self._buffer.call(
                NextBatch(step=redone), BatchReply, deadline_s=self._network.call_deadline_s
            )
            if batch.manifest is None:
                raise ContractError(f"the journal holds no manifest {redone}: {batch.reason}")
            started = self._clock.now()
            result = await self._train(batch.manifest)
            step, train_s = redone, self._clock.now() - started
            times = {"time_step_s": train_s, "time_wait_s": 0.0, "time_train_s": train_s, "time_sync_s": 0.0}
            await self._report(step, batch, result, times)
        return step

    async def _train_from(self, step: int) -> tuple[int, str]:
        while step < self._run.steps:
            started = self._clock.now()
            self._doing = f"waits for batch {step + 1}"
            try:
                batch = await self._until_stopped(self._next_batch(step + 1))
            except _Stopped:
                return step, "stopped"
            if batch.manifest is None:
                return step, "data"
            waited = self._clock.now()
            result = await self._train(batch.manifest)
            step += 1
            trained = self._clock.now()
            with contextlib.suppress(_Stopped):
                await self._until_stopped(self._publish(step))
            synced = self._clock.now()
            times = {
                "time_step_s": synced - started,
                "time_wait_s": waited - started,
                "time_train_s": trained - waited,
                "time_sync_s": synced - trained,
            }
            if step == self._run.steps:
                with contextlib.suppress(_Stopped):  # so that the last line has the last evaluation
                    await self._until_stopped(self._lane.drained())
            await self._report(step, batch, result, times)
            await self._save_if_due(step)
            if self._stop.is_set():
                return step, "stopped"
        return step, "steps"

    async def _publish(self, step: int) -> None:
        """Stage once the version before is served, for its predecessor's segment is the one written to."""
        self._doing = f"waits for version {step - 1} to be served, to stage version {step}"
        await self._lane.served()
        self._doing = f"stages version {step}"
        self._lane.publish(await self._stage(), evaluate=self._evaluates(step))
        if self._weights.sync == "blocking":
            await self._lane.served()

    async def _stage(self) -> StagedWeights:
        """An engine that missed the last update may still decode with the segment whose turn it is."""
        return await self._trainer.stage(fresh=self._lane.published.num_engines < self._num_engines)

    async def _next_batch(self, step: int) -> BatchReply:
        """Says why when nothing comes for `stall_report_s`; raises what failed in the lane meanwhile."""
        waiting_since = reported = self._clock.now()
        deadline_s = self._network.long_poll_s + self._network.call_deadline_s
        while True:
            if (version := self._lane.settled_version) is not None:
                # Again, for a buffer that was started anew: it trusts no version that its journal names.
                await self._buffer.call(ServingVersion(version=version), Ack, deadline_s=deadline_s)
            batch = await self._buffer.call(NextBatch(step=step), BatchReply, deadline_s=deadline_s)
            if batch.manifest is not None or batch.finished:
                return batch
            if failure := self._lane.failure():
                raise failure
            if self._clock.now() - reported >= self._network.stall_report_s:
                reported = self._clock.now()
                self._events.note(f"no batch {step} for {reported - waiting_since:.0f} s: {batch.reason}")

    async def _until_stopped(self, waiting: Coroutine[Any, Any, T]) -> T:
        """The result, or _Stopped as soon as the run is told to stop."""
        task, stop = asyncio.create_task(waiting), asyncio.create_task(self._stop.wait())
        try:
            await asyncio.wait({task, stop}, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
            raise _Stopped
        finally:
            stop.cancel()
            task.cancel()

    async def _train(self, manifest: Manifest) -> TrainResult:
        deadline_s = self._network.train_step_deadline_s
        self._doing = f"waits for the trainer to train batch {manifest.step}"
        try:
            async with asyncio.timeout(deadline_s):
                return await self._trainer.train(manifest)
        except TimeoutError:
            raise DeadlineError(
                f"batch {manifest.step} was not trained within network.train_step_deadline_s {deadline_s:g} s"
            ) from None

    async def _engine_status(self) -> EngineStatus:
        """Sums over the engines."""
        return await self._proxy.call(EngineStatusRequest(), EngineStatus, deadline_s=self._network.startup_deadline_s)

    def _evaluates(self, step: int) -> bool:
        every = self._evaluation.every_steps
        due = every > 0 and (step % every == 0 or step == self._run.steps)
        return due and not self._events.evaluated(step)

    def _evaluated(self, reply: EvalReply) -> None:
        if reply.num_missing:
            self._events.note(
                f"evaluation of version {reply.version} given up: {reply.num_missing} of {reply.num_problems} problems "
                f"missing after evaluation.deadline_s {self._evaluation.deadline_s:g} s"
            )
            return
        self._evaluations.append(reply)
        self._events.evaluation(reply)

    async def _save_if_due(self, step: int) -> None:
        every = self._checkpoint.every_steps
        if every > 0 and step % every == 0:
            await self._save(step)

    async def _save(self, step: int) -> None:
        self._doing = f"waits for the checkpoint of step {step}"
        await self._trainer.save()
        self._saved = step
        await self._buffer.call(Checkpointed(step=step), Ack, deadline_s=self._network.call_deadline_s)

    async def _finish(self, step: int, reason: str) -> Outcome:
        if step > 0 and self._saved != step:
            await self._save(step)
        if reason == "data" and self._evaluation.every_steps and not self._events.evaluated(step):
            self._lane.evaluate(step)
        if reason != "stopped":
            with contextlib.suppress(_Stopped):
                await self._until_stopped(self._lane.drained())
        await self._buffer.call(Finish(), Ack, deadline_s=self._network.call_deadline_s)
        return Outcome(step=step, reason=reason)

    async def _report(self, step: int, batch: BatchReply, result: TrainResult, times: dict[str, float]) -> None:
        assert batch.manifest is not None
        total = (await self._engine_status()).tokens_generated
        # A proxy that was started again counts from 0.
        generated = total - self._tokens_generated if total >= self._tokens_generated else total
        self._tokens_generated = total
        wasted = batch.stats.get("tokens_wasted", 0.0)
        newly_wasted, self._tokens_wasted = wasted - self._tokens_wasted, wasted
        record: dict[str, Any] = {
            "step": step,
            "version": step,
            "redone": float(batch.manifest.redone),
            "published_version": self._lane.published.version,
            "groups": len({row.sample.group for row in batch.manifest.rows}),
            "samples": len(batch.manifest.rows),
            "tokens_generated": generated,
            "tokens_wasted": newly_wasted,
            "time_publish_s": self._lane.published.sync_s,
            **times,
            **manifest_metrics(batch.manifest),
            **{f"ledger_{name}": value for name, value in batch.stats.items() if name != "tokens_wasted"},
            **result.metrics,
        }
        if self._evaluations:
            last = self._evaluations[-1]
            record["eval_accuracy"] = last.accuracy
            record["evaluations"] = [msgspec.to_builtins(reply) for reply in self._evaluations]
            self._evaluations = []
        self._events.step(record)

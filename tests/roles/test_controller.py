"""The controller against a buffer, a proxy and a trainer that write down what happens, in order."""

import asyncio
from pathlib import Path

import pytest

from flashflow.clock import LoopClock
from flashflow.config.sections import CheckpointSection, EvalSection, NetworkSection, RunSection, WeightsSection
from flashflow.errors import ContractError, RemoteError
from flashflow.messages import (
    Ack,
    BatchReply,
    Checkpointed,
    EngineStatus,
    EngineStatusRequest,
    EvalReply,
    Evaluate,
    Finish,
    JournalStatus,
    JournalStatusRequest,
    NextBatch,
    Serving,
    ServingVersion,
    Update,
)
from flashflow.records import Manifest, ManifestRow, SampleId, SharedWeights
from flashflow.roles.controller import Controller
from flashflow.trainers.base import TrainResult


def manifest(step: int) -> Manifest:
    row = ManifestRow(
        sample=SampleId(step, 0),
        num_tokens=3,
        num_sampled=2,
        initiating_version=max(0, step - 2),
        reward=1.0,
        outcome="completed",
    )
    return Manifest(step=step, rows=[row], group_size=1, rng_key=0)


class World:
    """Buffer, proxy, trainer and events in one; `log` is the order of what happened."""

    def __init__(self, *, batches: int = 1000, trained: int = 0, last_manifest: int = 0) -> None:
        self.log: list[str] = []
        self.records: list[dict] = []
        self.evaluations: set[int] = set()
        self.fresh: list[bool] = []
        self.engines = ["engine-0"]
        self.notes: list[str] = []
        self.step_now = trained
        self.last_manifest = last_manifest
        self.batches = batches
        self.eval_gate = asyncio.Event()
        self.eval_gate.set()
        self.eval_started = asyncio.Event()
        self.trained_one = asyncio.Event()
        self.no_batch_from: int | None = None
        self.waiting_for_batch = asyncio.Event()
        self.update_error: Exception | None = None

    # Client
    async def call(self, message, reply, *, deadline_s):
        match message:
            case JournalStatusRequest():
                return JournalStatus(last_manifest=self.last_manifest, counts={}, tokens_wasted=0)
            case NextBatch(step=step):
                return await self._next_batch(step)
            case Update(weights=weights):
                if self.update_error:
                    raise self.update_error
                self.log.append(f"update {weights.version}")
                return Serving(version=weights.version, engines=self.engines)
            case ServingVersion(version=version):
                if f"serving {version}" not in self.log:  # it is repeated for a buffer that may be new
                    self.log.append(f"serving {version}")
            case Evaluate(version=version):
                self.eval_started.set()
                await self.eval_gate.wait()
                self.log.append(f"evaluated {version}")
                return EvalReply(
                    version=version,
                    num_problems=1,
                    accuracy=0.5,
                    mean_response_tokens=1.0,
                    num_failed=0,
                    num_missing=0,
                    seconds=0.1,
                )
            case EngineStatusRequest():
                return EngineStatus(
                    version=0, slots=1, running=0, waiting=0, tokens_generated=0, exact=True, packages={}
                )
            case Checkpointed(step=step):
                self.log.append(f"covered {step}")
            case Finish():
                self.log.append("finish")
        return Ack()

    async def _next_batch(self, step: int) -> BatchReply:
        if step > self.batches:
            return BatchReply(manifest=None, finished=True)
        if self.no_batch_from is not None and step >= self.no_batch_from:
            self.waiting_for_batch.set()
            await asyncio.Event().wait()
        return BatchReply(manifest=manifest(step), stats={"tokens_wasted": 0.0})

    # TrainerLink
    async def open(self, resume: bool) -> int:
        return self.step_now if resume else 0

    async def train(self, batch: Manifest) -> TrainResult:
        self.step_now = batch.step
        self.log.append(f"train {batch.step}")
        self.trained_one.set()
        return TrainResult(step=batch.step, metrics={"loss": 0.0})

    async def stage(self, *, fresh: bool) -> SharedWeights:
        self.fresh.append(fresh)
        self.log.append(f"stage {self.step_now}")
        return SharedWeights(version=self.step_now, segment="s", nbytes=0, tensors=[])

    async def save(self) -> Path:
        self.log.append(f"save {self.step_now}")
        return Path("x")

    # Events
    def step(self, record: dict) -> None:
        self.records.append(record)

    def evaluation(self, reply: EvalReply) -> None:
        self.evaluations.add(reply.version)

    def evaluated(self, version: int) -> bool:
        return version in self.evaluations

    def note(self, text: str) -> None:
        self.notes.append(text)


def controller(world: World, *, steps: int = 3, every_eval: int = 0, resume: bool = False, sync: str = "overlapped"):
    return Controller(
        run=RunSection(steps=steps),
        checkpoint=CheckpointSection(every_steps=0),
        evaluation=EvalSection(every_steps=every_eval),
        weights=WeightsSection(sync=sync),
        network=NetworkSection(),
        num_engines=1,
        buffer=world,
        proxy=world,
        trainer=world,
        events=world,
        clock=LoopClock(),
        resume=resume,
    )


def run(scenario) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(20):
            await scenario()

    asyncio.run(bounded())


def test_every_version_is_staged_only_after_the_one_before_is_served():
    async def scenario() -> None:
        world = World()
        outcome = await controller(world, steps=4).run()
        assert (outcome.step, outcome.reason) == (4, "steps")
        for version in range(1, 5):
            assert world.log.index(f"stage {version}") > world.log.index(f"serving {version - 1}")
        assert [entry for entry in world.log if entry.startswith("serving")] == [f"serving {v}" for v in range(5)]
        assert world.log[-3:] == ["save 4", "covered 4", "finish"]

    run(scenario)


def test_what_an_engine_that_missed_an_update_may_still_read_is_not_written_over():
    async def scenario() -> None:
        world = World()
        await controller(world, steps=3).run()
        assert world.fresh[1:] == [False, False, False]
        world = World()
        world.engines = []
        await controller(world, steps=3).run()
        assert world.fresh == [True, True, True, True]

    run(scenario)


def test_an_evaluation_pins_its_version_while_training_goes_on():
    async def scenario() -> None:
        world = World()
        world.eval_gate.clear()
        running = asyncio.create_task(controller(world, steps=2, every_eval=1).run())
        await world.eval_started.wait()
        await world.trained_one.wait()
        assert "update 1" not in world.log
        world.eval_gate.set()
        await running
        assert world.log.index("evaluated 0") < world.log.index("update 1") < world.log.index("evaluated 1")
        assert [r.get("eval_accuracy") for r in world.records][-1] == 0.5
        assert world.records[-1]["evaluations"][-1]["version"] == 2

    run(scenario)


def test_a_restart_repeats_the_manifests_and_publishes_nothing_before_the_last():
    async def scenario() -> None:
        world = World(trained=2, last_manifest=4)
        await controller(world, steps=5, resume=True).run()
        assert world.log[:3] == ["train 3", "train 4", "stage 4"]
        assert [e for e in world.log if e.startswith("update")] == ["update 4", "update 5"]

    run(scenario)


def test_a_checkpoint_ahead_of_the_journal_is_refused():
    async def scenario() -> None:
        with pytest.raises(ContractError, match="ahead of the journal"):
            await controller(World(trained=5, last_manifest=3), resume=True).run()

    run(scenario)


def test_stopped_while_it_waits_it_saves_what_is_trained():
    async def scenario() -> None:
        world = World()
        world.no_batch_from = 3
        it = controller(world, steps=10)
        running = asyncio.create_task(it.run())
        await world.waiting_for_batch.wait()
        it.stop()
        outcome = await running
        assert (outcome.step, outcome.reason) == (2, "stopped")
        assert world.log[-3:] == ["save 2", "covered 2", "finish"]

    run(scenario)


def test_stopped_during_an_evaluation_it_does_not_wait_for_it():
    async def scenario() -> None:
        world = World()
        world.eval_gate.clear()
        it = controller(world, steps=10, every_eval=1)
        running = asyncio.create_task(it.run())
        await world.trained_one.wait()
        it.stop()
        outcome = await running
        assert outcome.reason == "stopped"
        assert "evaluated 0" not in world.log
        assert f"save {outcome.step}" in world.log

    run(scenario)


def test_data_that_ends_ends_the_run_with_what_is_trained():
    async def scenario() -> None:
        world = World(batches=2)
        outcome = await controller(world, steps=10).run()
        assert (outcome.step, outcome.reason) == (2, "data")

    run(scenario)


def test_an_engine_that_refuses_weights_stops_the_run():
    async def scenario() -> None:
        world = World()
        world.update_error = RemoteError("ContractError", "engine-0 refuses version 0")
        with pytest.raises(RemoteError, match="refuses version 0"):
            await controller(world, steps=2).run()

    run(scenario)


def test_blocking_sync_trains_the_next_batch_only_after_all_engines_swapped():
    async def scenario() -> None:
        world = World()
        await controller(world, steps=3, sync="blocking").run()
        for version in (1, 2):
            assert world.log.index(f"serving {version}") < world.log.index(f"train {version + 1}")

    run(scenario)

"""The engine role: the decode loop and its calls, over a counting engine; weights and samples over the real one."""

import asyncio
import threading
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress

import msgspec
import numpy as np
import pytest
import torch

from flashflow.clock import LoopClock
from flashflow.config.sections import NetworkSection, TorchEngineSection
from flashflow.engines.base import Engine, Sampled
from flashflow.errors import ContractError, DeadlineError, NotServing, WeightsError
from flashflow.messages import (
    Abort,
    Ack,
    EngineStatus,
    EngineStatusRequest,
    Generate,
    Message,
    NextBatch,
    Resume,
    Serving,
    Suspend,
    Update,
)
from flashflow.roles.engine import EngineRole
from flashflow.transport.channel import Peer
from flashflow.transport.weights.shared_memory import WeightStage
from tests.engines.engine_cases import drain, make_engine, mates, only, prompt, request, tiny, weights_of

PROXY = Peer("proxy", 0, 1)
PATIENCE_S = 30
ENDLESS = 1_000_000
"""Tokens, far more than a test waits for."""


class CountingEngine:
    """Samples 0, 1, 2, ... for every request. With `permits` each step takes one; `poison` is what a step raises."""

    exact = True

    def __init__(self, permits: threading.Semaphore | None = None) -> None:
        self.version = 0
        self.steps = 0
        self.aborted: list[str] = []
        self.poison: Exception | None = None
        self.held: set[str] = set()
        """Requests that find no slot."""
        self._permits = permits
        self._running: dict[str, list[int]] = {}

    @property
    def num_running(self) -> int:
        return len(self._running)

    num_waiting = 0

    def submit(self, request: Generate) -> None:
        if request.max_new_tokens > ENDLESS:
            raise ContractError("too long")
        self._running[request.request] = [0, request.max_new_tokens]

    def abort(self, request: str) -> None:
        self.aborted.append(request)
        self._running.pop(request, None)

    def step(self) -> list[Sampled]:
        if self._permits is not None:
            assert self._permits.acquire(timeout=PATIENCE_S)
        self.steps += 1
        if self.poison is not None:
            raise self.poison
        news = []
        for name, state in list(self._running.items()):
            if name in self.held:
                continue
            token, limit = state
            state[0] += 1
            news.append(Sampled(name, token, -0.5, self.version, "length" if state[0] == limit else ""))
            if state[0] == limit:
                del self._running[name]
        return news

    def load(self, version: int, tensors: Mapping[str, torch.Tensor]) -> None:
        raise NotImplementedError


class Parts:
    """An emit that keeps what it was given; `came` is set by each part."""

    def __init__(self) -> None:
        self.parts: list[Message] = []
        self.came = asyncio.Event()

    async def __call__(self, part: Message) -> None:
        self.parts.append(part)
        self.came.set()


async def nowhere(part: Message) -> None: ...


def role_of(engine: Engine, executor: ThreadPoolExecutor | None = None, **network: float) -> EngineRole:
    return EngineRole(
        name="engine-0",
        engine=engine,
        section=TorchEngineSection(stream_every_s=0.005),
        network=NetworkSection(**network),
        clock=LoopClock(),
        executor=executor,
    )


@asynccontextmanager
async def running(role: EngineRole):
    """The decode loop beside the block; what it raises is raised here."""
    loop = asyncio.create_task(role.run())
    try:
        yield
    finally:
        loop.cancel()
        with suppress(asyncio.CancelledError):
            await loop


def run(test: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(PATIENCE_S):
            await test()

    asyncio.run(bounded())


async def some_turns_of_the_loop() -> None:
    for _ in range(50):
        await asyncio.sleep(0)


def tokens_of(parts: list[Message]) -> list[int]:
    return [int(token) for part in parts for token in part.token_ids]


# ---- requests


def test_an_answer_comes_in_parts_that_make_up_the_whole():
    async def test():
        permits = threading.Semaphore(0)
        with ThreadPoolExecutor(1) as executor:
            role, parts = role_of(CountingEngine(permits), executor), Parts()
            async with running(role):
                answer = asyncio.create_task(role.handle(request("r", [5], 9), PROXY, parts))
                permits.release(3)
                await parts.came.wait()
                assert not answer.done()
                permits.release(6)
                last = await answer
        assert [part.finish_reason for part in parts.parts] == [""] * len(parts.parts)
        assert last.finish_reason == "length"
        assert tokens_of([*parts.parts, last]) == list(range(9))
        assert last.logprobs.dtype == np.float32
        assert set(last.versions.tolist()) <= {0}

    run(test)


@pytest.mark.parametrize("threads", [0, 1], ids=["in the loop", "in a thread"])
def test_samples_are_the_engines_own(tmp_path, threads):
    model = tiny(tmp_path)
    expected = drain(make_engine(model), mates(12))

    async def test():
        executor = ThreadPoolExecutor(threads) if threads else None
        role = role_of(make_engine(model), executor)
        streams = {one.request: Parts() for one in mates(12)}
        async with running(role), asyncio.TaskGroup() as group:
            lasts = {one.request: group.create_task(role.handle(one, PROXY, streams[one.request])) for one in mates(12)}
        for name, answer in expected.items():
            parts = [*streams[name].parts, lasts[name].result()]
            assert tokens_of(parts) == answer.tokens
            assert [x for part in parts for x in part.logprobs.tolist()] == answer.logprobs
            assert parts[-1].finish_reason == answer.finish_reason
        if executor is not None:
            executor.shutdown()

    run(test)


def test_what_a_request_waits_in_the_engine_is_told():
    async def test() -> None:
        engine, parts = CountingEngine(), Parts()
        engine.held = {"held"}
        role = role_of(engine)
        async with running(role):
            busy = asyncio.create_task(role.handle(request("busy", [1], ENDLESS), PROXY, nowhere))
            held = asyncio.create_task(role.handle(request("held", [1], 3), PROXY, parts))
            while len(parts.parts) < 3:
                parts.came.clear()
                await parts.came.wait()
            assert tokens_of(parts.parts) == []
            assert all(part.waited_s > 0 for part in parts.parts)
            engine.held = set()
            assert len(tokens_of([*parts.parts, await held])) > 0
            busy.cancel()

    run(test)


def test_a_suspended_engine_says_that_its_requests_wait():
    async def test() -> None:
        role, parts = role_of(CountingEngine()), Parts()
        async with running(role):
            await role.handle(Suspend(), PROXY, nowhere)
            waiting = asyncio.create_task(role.handle(request("r", [1], 3), PROXY, parts))
            await parts.came.wait()
            assert parts.parts[0].waited_s > 0
            await role.handle(Resume(), PROXY, nowhere)
            await waiting

    run(test)


def test_an_abort_ends_the_stream_with_what_was_sampled_so_far():
    async def test():
        permits = threading.Semaphore(0)
        engine = CountingEngine(permits)
        with ThreadPoolExecutor(1) as executor:
            role, parts = role_of(engine, executor), Parts()
            async with running(role):
                answer = asyncio.create_task(role.handle(request("r", [5], 100), PROXY, parts))
                permits.release(2)
                await parts.came.wait()
                abort = asyncio.create_task(role.handle(Abort(requests=["r", "unknown"]), PROXY, nowhere))
                permits.release(2)
                assert await abort == Ack()
                last = await answer
                permits.release()
        assert last.finish_reason == "aborted"
        received = tokens_of([*parts.parts, last])
        assert received == list(range(len(received)))
        assert 1 <= len(received) <= 4
        assert engine.num_running == 0

    run(test)


def test_cancelling_the_call_aborts_the_request():
    async def test():
        engine = CountingEngine()
        role = role_of(engine)
        async with running(role):
            answer = asyncio.create_task(role.handle(request("r", [5], ENDLESS), PROXY, nowhere))
            await asyncio.sleep(0)
            answer.cancel()
            with pytest.raises(asyncio.CancelledError):
                await answer
            assert engine.aborted == ["r"]
            assert engine.num_running == 0

    run(test)


def test_a_call_cancelled_after_the_loop_and_its_thread_have_ended_ends_quietly():
    async def test():
        permits = threading.Semaphore(0)
        with ThreadPoolExecutor(1) as executor:
            role = role_of(CountingEngine(permits), executor)
            answer = asyncio.create_task(role.handle(request("r", [5], ENDLESS), PROXY, nowhere))
            async with running(role):
                await asyncio.sleep(0)
                permits.release(10)
        answer.cancel()
        with pytest.raises(asyncio.CancelledError):
            await answer

    run(test)


def test_a_finished_request_is_not_aborted():
    async def test():
        engine = CountingEngine()
        role = role_of(engine)
        async with running(role):
            await role.handle(request("r", [5], 3), PROXY, nowhere)
        assert engine.aborted == []

    run(test)


def test_what_the_engine_refuses_the_caller_is_told_and_others_go_on():
    async def test():
        role = role_of(CountingEngine())
        async with running(role):
            with pytest.raises(ContractError, match="too long"):
                await role.handle(request("r", [5], ENDLESS + 1), PROXY, nowhere)
            reply = await role.handle(request("r", [5], 2), PROXY, nowhere)
        assert reply.finish_reason == "length"

    run(test)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"min_version": 1}, "needs version 1, but 0 is served"),
        ({"min_version": 0, "pin_version": 1}, "is pinned to version 1, but 0 is served"),
        ({"min_version": -1, "pin_version": -1}, "is pinned to version -1, but 0 is served"),
    ],
)
def test_a_request_for_other_weights_is_refused(changes, message):
    async def test():
        engine = CountingEngine()
        role = role_of(engine)
        with pytest.raises(NotServing, match=message):
            await role.handle(request("r", [5], 3, **changes), PROXY, nowhere)
        assert engine.num_running == 0

    run(test)


def test_a_name_that_is_being_answered_is_refused_and_its_first_answer_goes_on():
    async def test():
        role = role_of(CountingEngine())
        async with running(role):
            first = asyncio.create_task(role.handle(request("r", [5], 30), PROXY, nowhere))
            await asyncio.sleep(0)
            with pytest.raises(ContractError, match="request r is already being answered"):
                await role.handle(request("r", [5], 30), PROXY, nowhere)
            assert (await first).finish_reason == "length"

    run(test)


def test_a_caller_that_takes_no_parts_loses_its_request_after_the_deadline():
    async def test():
        engine = CountingEngine()
        stuck = asyncio.Event()

        async def never_taken(part: Message) -> None:
            stuck.set()
            await asyncio.Event().wait()

        role = role_of(engine, call_deadline_s=0.01)
        async with running(role):
            with pytest.raises(DeadlineError, match=r"request r was not taken within 0\.01 s"):
                await role.handle(request("r", [5], ENDLESS), PROXY, never_taken)
        assert stuck.is_set()
        assert engine.aborted == ["r"]

    run(test)


# ---- the loop


def test_an_idle_engine_does_not_spin():
    async def test():
        engine = CountingEngine()
        role = role_of(engine)
        async with running(role):
            await some_turns_of_the_loop()
            assert engine.steps == 0
            await role.handle(request("r", [5], 3), PROXY, nowhere)
            await some_turns_of_the_loop()
            assert engine.steps == 3
            assert "idle" in role.describe()

    run(test)


def test_a_suspended_engine_takes_no_step_until_it_is_resumed_and_keeps_everything():
    async def test():
        engine = CountingEngine()
        role, parts = role_of(engine), Parts()
        async with running(role):
            before = asyncio.create_task(role.handle(request("before", [5], 900), PROXY, parts))
            await asyncio.sleep(0)
            assert await role.handle(Suspend(), PROXY, nowhere) == Ack()
            steps = engine.steps
            during = asyncio.create_task(role.handle(request("during", [5], 3), PROXY, nowhere))
            await some_turns_of_the_loop()
            assert engine.steps == steps
            assert "suspended" in role.describe()
            assert await role.handle(Resume(), PROXY, nowhere) == Ack()
            assert (await during).token_ids.tolist() == [0, 1, 2]
            last = await before
            assert tokens_of([*parts.parts, last]) == list(range(900))

    run(test)


def test_a_suspended_engine_still_aborts():
    async def test():
        role = role_of(CountingEngine())
        async with running(role):
            await role.handle(Suspend(), PROXY, nowhere)
            answer = asyncio.create_task(role.handle(request("r", [5], 900), PROXY, nowhere))
            await asyncio.sleep(0)
            await role.handle(Abort(requests=["r"]), PROXY, nowhere)
            last = await answer
            assert (len(last.token_ids), last.finish_reason) == (0, "aborted")

    run(test)


@pytest.mark.parametrize("threads", [0, 1], ids=["in the loop", "in a thread"])
def test_what_a_step_raises_ends_the_loop(threads):
    async def test():
        engine = CountingEngine()
        engine.poison = ValueError("no memory")
        executor = ThreadPoolExecutor(threads) if threads else None
        role = role_of(engine, executor)
        answer = asyncio.create_task(role.handle(request("r", [5], 3), PROXY, nowhere))
        with pytest.raises(ValueError, match="no memory"):
            await role.run()
        answer.cancel()
        if executor is not None:
            executor.shutdown()

    run(test)


def test_the_status_counts_tokens_and_names_packages():
    async def test():
        role = role_of(CountingEngine())
        async with running(role):
            await role.handle(request("r", [5], 7), PROXY, nowhere)
            status = await role.handle(EngineStatusRequest(), PROXY, nowhere)
        assert isinstance(status, EngineStatus)
        assert (status.version, status.slots, status.running, status.waiting) == (0, 32, 0, 0)
        assert (status.tokens_generated, status.exact) == (7, True)
        assert status.packages["torch"].split("+")[0] == torch.__version__.split("+")[0]
        assert set(status.packages) == {"flashflow", "torch", "transformers"}

    run(test)


def test_a_message_that_is_not_the_engines_is_refused():
    async def test():
        with pytest.raises(ContractError, match="engine-0: unexpected NextBatch from proxy-0-1"):
            await role_of(CountingEngine()).handle(NextBatch(step=1), PROXY, nowhere)

    run(test)


# ---- weights


@pytest.fixture
def stage(tmp_path):
    stage = WeightStage(f"test-{tmp_path.name}-{id(tmp_path)}")
    yield stage
    stage.close()


def update(stage: WeightStage, version: int, model: torch.nn.Module) -> Update:
    return Update(weights=stage.stage(version, weights_of(model)), deadline_s=10.0)


def test_an_update_is_served_between_two_steps_of_a_running_request(tmp_path, stage):
    old, new = tiny(tmp_path / "old"), tiny(tmp_path / "new", seed=1)

    async def test():
        with ThreadPoolExecutor(1) as executor:
            role, parts = role_of(make_engine(old), executor), Parts()
            async with running(role):
                answer = asyncio.create_task(role.handle(request("r", prompt(20, 0), 200), PROXY, parts))
                await parts.came.wait()
                reply = await role.handle(update(stage, 2, new), PROXY, nowhere)
                assert reply == Serving(version=2, engines=["engine-0"])
                last = await answer
                fresh_parts = Parts()
                fresh = await role.handle(request("fresh", prompt(20, 0), 10), PROXY, fresh_parts)
        versions = [int(v) for part in [*parts.parts, last] for v in part.versions]
        assert versions == sorted(versions)
        assert set(versions) == {0, 2}
        expected = only(drain(make_engine(new), [request("fresh", prompt(20, 0), 10)]))
        assert tokens_of([*fresh_parts.parts, fresh]) == expected.tokens

    run(test)


def test_versions_never_go_back_and_the_same_one_again_is_answered_at_once(tmp_path, stage):
    model = tiny(tmp_path / "model")

    async def test():
        role = role_of(make_engine(model))
        third = update(stage, 3, model)
        assert (await role.handle(third, PROXY, nowhere)).version == 3
        stage.close()  # a segment that is gone cannot be read again
        assert (await role.handle(third, PROXY, nowhere)).version == 3
        older = msgspec.structs.replace(third, weights=msgspec.structs.replace(third.weights, version=2))
        with pytest.raises(ContractError, match="update to version 2, but 3 is served already"):
            await role.handle(older, PROXY, nowhere)

    run(test)


def test_damaged_weights_are_refused_and_the_old_ones_served_on(tmp_path, stage):
    old, new = tiny(tmp_path / "old"), tiny(tmp_path / "new", seed=1)
    expected = only(drain(make_engine(old), [request("r", prompt(20, 0), 10)]))

    async def test():
        role = role_of(make_engine(old))
        good = update(stage, 1, new)
        specs = list(good.weights.tensors)
        specs[3] = msgspec.structs.replace(specs[3], digest=specs[3].digest ^ 1)
        damaged = msgspec.structs.replace(good, weights=msgspec.structs.replace(good.weights, tensors=specs))
        with pytest.raises(WeightsError, match=specs[3].name):
            await role.handle(damaged, PROXY, nowhere)
        parts = Parts()
        async with running(role):
            last = await role.handle(request("r", prompt(20, 0), 10), PROXY, parts)
            assert tokens_of([*parts.parts, last]) == expected.tokens
            assert set(last.versions.tolist()) <= {0}
            assert (await role.handle(good, PROXY, nowhere)).version == 1

    run(test)


def test_the_engine_serves_on_after_the_trainer_has_unlinked_its_segments(tmp_path, stage):
    old, new = tiny(tmp_path / "old"), tiny(tmp_path / "new", seed=1)
    expected = only(drain(make_engine(new), [request("r", prompt(20, 0), 10)]))

    async def test():
        role, parts = role_of(make_engine(old)), Parts()
        await role.handle(update(stage, 1, old), PROXY, nowhere)
        await role.handle(update(stage, 2, new), PROXY, nowhere)
        stage.close()
        async with running(role):
            last = await role.handle(request("r", prompt(20, 0), 10), PROXY, parts)
        assert tokens_of([*parts.parts, last]) == expected.tokens

    run(test)

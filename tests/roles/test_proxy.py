"""The proxy against engines that do what the test tells them."""

import asyncio
from collections.abc import AsyncIterator

import msgspec
import numpy as np
import pytest

from flashflow.clock import LoopClock
from flashflow.config.sections import NetworkSection, RolloutSection
from flashflow.errors import BudgetError, ContractError, DeadlineError, PeerLost, RemoteError
from flashflow.messages import (
    Abort,
    Ack,
    EngineStatus,
    EngineStatusRequest,
    Generate,
    GenerateReply,
    Resume,
    SamplingKey,
    Serving,
    Suspend,
    Update,
)
from flashflow.records import SharedWeights
from flashflow.roles.proxy import ProxyRole
from flashflow.transport.channel import Peer

ENV = Peer("env", 0, 1)


def part(*tokens: int, finish: str = "") -> GenerateReply:
    count = len(tokens)
    return GenerateReply(
        token_ids=np.array(tokens, np.int32),
        logprobs=np.full(count, -1.0, np.float32),
        versions=np.zeros(count, np.int32),
        finish_reason=finish,
    )


def generate(name: str, *, new: int = 10, min_version: int = 0, pin: int | None = None, session: str = "") -> Generate:
    return Generate(
        request=name,
        session=session or name,
        key=SamplingKey(0, 0, 0, 0, 0),
        prompt_ids=np.arange(5, dtype=np.int32),
        generated_ids=np.zeros(0, np.int32),
        max_new_tokens=new,
        temperature=1.0,
        stop_ids=[0],
        stop_strings=[],
        min_version=min_version,
        pin_version=pin,
    )


def weights(version: int) -> Update:
    return Update(weights=SharedWeights(version=version, segment="s", nbytes=0, tensors=[]), deadline_s=1.0)


class FakeEngine:
    """A Client whose engine answers a request when the test releases it."""

    def __init__(self, slots: int = 8) -> None:
        self.slots = slots
        self.version = 0
        self.requests: list[Generate] = []
        self.arrived = asyncio.Condition()
        self.release = asyncio.Event()
        self.parts: list[GenerateReply] = []
        self.dies_after: int | None = None
        self.refuses_updates = False
        self.calls: list[object] = []

    async def call(self, message, reply, *, deadline_s):
        self.calls.append(message)
        match message:
            case EngineStatusRequest():
                return EngineStatus(
                    version=self.version,
                    slots=self.slots,
                    running=0,
                    waiting=0,
                    tokens_generated=0,
                    exact=True,
                    packages={},
                )
            case Update():
                if self.refuses_updates:
                    raise DeadlineError("engine: no answer")
                self.version = message.weights.version
                return Serving(version=self.version, engines=["engine"])
            case _:
                return Ack()

    async def stream(self, message, reply, *, idle_deadline_s) -> AsyncIterator[GenerateReply]:
        self.requests.append(message)
        async with self.arrived:
            self.arrived.notify_all()
        for index, streamed in enumerate(self.parts):
            if self.dies_after == index:
                self.dies_after = None
                raise PeerLost("engine died")
            yield streamed
        await self.release.wait()
        yield part(9, finish="stop")

    async def close(self) -> None: ...

    async def has(self, count: int) -> None:
        async with self.arrived:
            await self.arrived.wait_for(lambda: len(self.requests) >= count)


async def proxy_of(*engines: FakeEngine, long_poll_s: float = 5.0) -> ProxyRole:
    ends = {f"engine-{index}": engine for index, engine in enumerate(engines)}
    network = NetworkSection(startup_deadline_s=0.2, long_poll_s=long_poll_s)
    proxy = ProxyRole(engines=ends, rollout=RolloutSection(), network=network, clock=LoopClock())
    await proxy.start()
    return proxy


class Caller:
    """One Generate under way."""

    def __init__(self, proxy: ProxyRole, request: Generate) -> None:
        self.parts: list[GenerateReply] = []
        self.task = asyncio.create_task(proxy.handle(request, ENV, self._emit))

    async def _emit(self, streamed: GenerateReply) -> None:
        self.parts.append(streamed)

    async def tokens(self) -> list[int]:
        last = await self.task
        return [int(t) for streamed in [*self.parts, last] for t in streamed.token_ids]


def run(scenario) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(20):
            await scenario()

    asyncio.run(bounded())


def test_a_request_goes_to_the_engine_with_the_least_outstanding_tokens():
    async def scenario() -> None:
        first, second = FakeEngine(), FakeEngine()
        proxy = await proxy_of(first, second)
        callers = [Caller(proxy, generate("long", new=100))]
        await first.has(1)
        callers += [Caller(proxy, generate(f"short-{n}", new=10)) for n in range(3)]
        await second.has(3)
        assert [r.request for r in first.requests] == ["long"]
        first.release.set(), second.release.set()
        for caller in callers:
            assert await caller.tokens() == [9]

    run(scenario)


def test_no_request_reaches_an_engine_below_its_min_version():
    async def scenario() -> None:
        engine = FakeEngine()
        engine.release.set()
        proxy = await proxy_of(engine)
        caller = Caller(proxy, generate("young", min_version=2))
        await proxy.handle(weights(1), ENV, caller._emit)
        assert engine.requests == []
        await proxy.handle(weights(2), ENV, caller._emit)
        assert await caller.tokens() == [9]

    run(scenario)


def test_a_pinned_request_is_served_by_exactly_that_version():
    async def scenario() -> None:
        old, new = FakeEngine(), FakeEngine()
        new.version = 3
        old.release.set(), new.release.set()
        proxy = await proxy_of(old, new)
        assert await Caller(proxy, generate("eval", pin=3)).tokens() == [9]
        assert (len(old.requests), len(new.requests)) == (0, 1)

    run(scenario)


def test_what_a_dead_engine_streamed_goes_on_elsewhere():
    async def scenario() -> None:
        dying, living = FakeEngine(), FakeEngine()
        dying.parts, dying.dies_after = [part(1, 2), part(3)], 1
        dying.release.set(), living.release.set()
        proxy = await proxy_of(dying, living)
        assert await Caller(proxy, generate("r")).tokens() == [1, 2, 9]
        assert living.requests[0].generated_ids.tolist() == [1, 2]
        await proxy.close()

    run(scenario)


def test_an_engine_that_comes_back_catches_up_its_weights():
    async def scenario() -> None:
        engine = FakeEngine()
        proxy = await proxy_of(engine)
        await proxy.handle(weights(4), ENV, lambda _: asyncio.sleep(0))
        engine.parts, engine.dies_after, engine.version = [part(1)], 0, -1
        engine.release.set()
        assert await Caller(proxy, generate("r", min_version=4)).tokens() == [1, 9]
        assert engine.version == 4
        await proxy.close()

    run(scenario)


def test_a_request_under_which_engines_keep_dying_ends_with_an_error():
    async def scenario() -> None:
        class Mortal(FakeEngine):
            async def stream(self, message, reply, *, idle_deadline_s):
                raise PeerLost("engine died")
                yield

        proxy = await proxy_of(Mortal())
        with pytest.raises(BudgetError, match="engines were lost"):
            await Caller(proxy, generate("cursed")).task
        await proxy.close()

    run(scenario)


def test_an_update_evicts_the_engine_that_does_not_take_it_and_names_all_when_none_does():
    async def scenario() -> None:
        good, bad = FakeEngine(), FakeEngine()
        bad.refuses_updates = True
        proxy = await proxy_of(good, bad)
        serving = await proxy.handle(weights(1), ENV, lambda _: asyncio.sleep(0))
        assert (serving.version, serving.engines) == (1, ["engine-0"])
        good.refuses_updates = True
        with pytest.raises(DeadlineError, match=r"version 2.*engine-0, engine-1"):
            await proxy.handle(weights(2), ENV, lambda _: asyncio.sleep(0))
        await proxy.close()

    run(scenario)


def test_suspended_nothing_is_dispatched_and_resumed_it_is():
    async def scenario() -> None:
        engine = FakeEngine()
        engine.release.set()
        proxy = await proxy_of(engine)
        await proxy.handle(Suspend(), ENV, lambda _: asyncio.sleep(0))
        caller = Caller(proxy, generate("r"))
        await asyncio.sleep(0)
        assert engine.requests == []
        await proxy.handle(Resume(), ENV, lambda _: asyncio.sleep(0))
        assert await caller.tokens() == [9]

    run(scenario)


def test_a_request_aborted_while_it_waits_ends_as_aborted():
    async def scenario() -> None:
        engine = FakeEngine()
        proxy = await proxy_of(engine)
        await proxy.handle(Suspend(), ENV, lambda _: asyncio.sleep(0))
        caller = Caller(proxy, generate("r"))
        await asyncio.sleep(0)
        await proxy.handle(Abort(requests=["r", "unknown"]), ENV, lambda _: asyncio.sleep(0))
        assert (await caller.task).finish_reason == "aborted"

    run(scenario)


def test_a_full_engine_gets_no_more_than_its_room():
    async def scenario() -> None:
        engine = FakeEngine(slots=8)
        proxy = await proxy_of(engine)
        callers = [Caller(proxy, generate(f"r{n}")) for n in range(20)]
        await engine.has(10)
        assert len(engine.requests) == 10
        engine.release.set()
        assert [await caller.tokens() for caller in callers] == [[9]] * 20

    run(scenario)


def test_the_turns_of_a_conversation_stay_on_one_engine():
    async def scenario() -> None:
        first, second = FakeEngine(), FakeEngine()
        first.release.set(), second.release.set()
        proxy = await proxy_of(first, second)
        for turn in range(4):
            await Caller(proxy, generate(f"t{turn}", session="s")).task
        assert (len(first.requests), len(second.requests)) == (4, 0)

    run(scenario)


def member(name: str, *, block: int, session: str = "g0", new: int = 10) -> Generate:
    return msgspec.structs.replace(generate(name, new=new, session=session), block_size=block)


def test_a_block_begins_together_on_one_engine_once_it_is_whole():
    async def scenario() -> None:
        first, second = FakeEngine(), FakeEngine()
        proxy = await proxy_of(first, second)
        callers = [Caller(proxy, member(f"m{n}", block=3)) for n in range(2)]
        callers.append(Caller(proxy, generate("alone")))
        await first.has(1)
        callers.append(Caller(proxy, member("m2", block=3)))
        await second.has(3)
        assert [r.request for r in first.requests] == ["alone"]
        first.release.set(), second.release.set()
        assert [await caller.tokens() for caller in callers] == [[9]] * 4

    run(scenario)


def test_nobody_overtakes_a_block_that_waits_for_room_for_all_of_it():
    async def scenario() -> None:
        engine = FakeEngine(slots=8)
        proxy = await proxy_of(engine)
        running = [Caller(proxy, generate(f"r{n}")) for n in range(7)]
        await engine.has(7)
        block = [Caller(proxy, member(f"m{n}", block=2)) for n in range(2)]
        await asyncio.sleep(0)
        later = Caller(proxy, generate("later"))
        await asyncio.sleep(0)
        assert len(engine.requests) == 7
        engine.release.set()
        for caller in [*running, *block, later]:
            await caller.task
        assert [r.request for r in engine.requests[7:]] == ["m0", "m1", "later"]

    run(scenario)


def test_a_block_larger_than_an_engine_begins_on_an_idle_one():
    async def scenario() -> None:
        engine = FakeEngine(slots=8)
        engine.release.set()
        proxy = await proxy_of(engine)
        callers = [Caller(proxy, member(f"m{n}", block=20)) for n in range(20)]
        for caller in callers:
            await caller.task
        assert len(engine.requests) == 20

    run(scenario)


def test_a_block_whose_last_member_never_comes_goes_without_it():
    async def scenario() -> None:
        engine = FakeEngine()
        engine.release.set()
        proxy = await proxy_of(engine, long_poll_s=0.05)
        callers = [Caller(proxy, member(f"m{n}", block=3)) for n in range(2)]
        assert [await caller.tokens() for caller in callers] == [[9], [9]]

    run(scenario)


def test_a_member_that_is_aborted_while_its_block_gathers_leaves_the_others_together():
    async def scenario() -> None:
        engine = FakeEngine()
        engine.release.set()
        proxy = await proxy_of(engine)
        gone = Caller(proxy, member("m0", block=2))
        await asyncio.sleep(0)
        await proxy.handle(Abort(requests=["m0"]), ENV, lambda _: asyncio.sleep(0))
        assert (await gone.task).finish_reason == "aborted"
        callers = [Caller(proxy, member(f"m{n}", block=2)) for n in (1, 2)]
        assert [await caller.tokens() for caller in callers] == [[9], [9]]

    run(scenario)


def test_an_engine_that_an_update_made_refuse_a_pinned_request_stays_in_service():
    async def scenario() -> None:
        class Updated(FakeEngine):
            async def stream(self, message, reply, *, idle_deadline_s):
                self.requests.append(message)
                if message.pin_version is not None:
                    await proxy.handle(weights(1), ENV, lambda _: asyncio.sleep(0))
                    raise RemoteError("NotServing", "pinned to version 0, but 1 is served")
                yield part(9, finish="stop")

        engine = Updated()
        proxy = await proxy_of(engine)
        assert (await Caller(proxy, generate("eval", pin=0)).task).finish_reason == "aborted"
        assert "serves version 1" in proxy.describe()
        assert not proxy._revivals
        assert await Caller(proxy, generate("r", min_version=1)).tokens() == [9]

    run(scenario)


def test_an_engine_that_cannot_be_told_to_abort_or_suspend_is_out_of_service_and_nobody_else_suffers():
    async def scenario() -> None:
        class Deaf(FakeEngine):
            async def call(self, message, reply, *, deadline_s):
                if isinstance(message, Abort | Suspend):
                    raise DeadlineError("engine: no answer")
                return await super().call(message, reply, deadline_s=deadline_s)

        deaf = Deaf()
        proxy = await proxy_of(deaf, FakeEngine())
        caller = Caller(proxy, generate("r"))
        await deaf.has(1)
        assert await proxy.handle(Abort(requests=["r"]), ENV, lambda _: asyncio.sleep(0)) == Ack()
        assert proxy._revivals
        caller.task.cancel()
        assert await proxy.handle(Suspend(), ENV, lambda _: asyncio.sleep(0)) == Ack()
        await proxy.close()

    run(scenario)


def test_a_request_that_is_being_answered_cannot_be_asked_again():
    async def scenario() -> None:
        engine = FakeEngine()
        proxy = await proxy_of(engine)
        first = Caller(proxy, generate("r"))
        await engine.has(1)
        with pytest.raises(ContractError, match="request r is already being answered"):
            await Caller(proxy, generate("r")).task
        engine.release.set()
        assert await first.tokens() == [9]

    run(scenario)

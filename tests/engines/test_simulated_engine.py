"""The simulated engine: times in closed form, slots in order, versions by the moments of the updates."""

import asyncio
from typing import Any

import numpy as np
import pytest

from flashflow.clock import LoopClock
from flashflow.config.sections import NetworkSection
from flashflow.config.simulated import FixedDistribution, GivenDistribution, SimulatedEngineSection
from flashflow.engines.simulated import SimulatedEngine
from flashflow.errors import ContractError, NotServing, WeightsError
from flashflow.messages import Abort, EngineStatusRequest, Generate, Resume, SamplingKey, Suspend, Update
from flashflow.simulate.clock import run_virtual
from flashflow.simulate.weights import TinyStage, virtual_weights
from flashflow.transport.channel import Peer

PROXY = Peer("proxy", 0, 1)


class Bench:
    """An engine of 10 tokens a second that serves version 0, and when its answers came."""

    def __init__(self, **fields: Any) -> None:
        section = SimulatedEngineSection(
            **{"slots": 2, "decode_tokens_per_s": 10.0, "answer_tokens": FixedDistribution(value=20), **fields}
        )
        self.clock = LoopClock()
        self.engine = SimulatedEngine(
            name="engine-0", section=section, group_size=1, network=NetworkSection(), clock=self.clock
        )
        self.parts: list[tuple[float, int]] = []
        self.ends: dict[str, float] = {}

    async def ready(self) -> "Bench":
        await self.update(0)
        return self

    async def update(self, version: int) -> None:
        await self.send(Update(weights=virtual_weights(version), deadline_s=10))

    async def send(self, message: Any) -> Any:
        return await self.engine.handle(message, PROXY, self._emit)

    async def ask(self, name: str, member: int = 0, **fields: Any) -> Any:
        reply = await self.send(generate(name, member, **fields))
        self.ends[name] = self.clock.now()
        return reply

    async def _emit(self, part: Any) -> None:
        self.parts.append((self.clock.now(), len(part.token_ids)))


def generate(name: str, member: int = 0, **fields: Any) -> Generate:
    given = {
        "request": name,
        "session": name,
        "key": SamplingKey(0, member, 0, 0, 0),
        "prompt_ids": np.zeros(5, np.int32),
        "generated_ids": np.zeros(0, np.int32),
        "max_new_tokens": 100,
        "temperature": 1.0,
        "stop_ids": [],
        "stop_strings": [],
        "min_version": 0,
    }
    return Generate(**{**given, **fields})


def test_an_answer_takes_its_prefill_and_its_tokens():
    async def scenario() -> None:
        bench = await Bench(prefill_tokens_per_s=50.0).ready()
        reply = await bench.ask("a", prompt_ids=np.zeros(25, np.int32))
        assert (len(reply.token_ids), reply.finish_reason) == (20, "stop")
        assert bench.ends["a"] == pytest.approx(25 / 50 + 20 / 10)
        assert bench.parts == []

    run_virtual(scenario())


def test_the_null_engine_takes_no_time():
    async def scenario() -> None:
        bench = await Bench(decode_tokens_per_s=0, answer_tokens=FixedDistribution(value=2500)).ready()
        reply = await bench.ask("a", max_new_tokens=2500)
        assert (len(reply.token_ids), reply.finish_reason, bench.ends["a"]) == (2500, "length", 0.0)

    run_virtual(scenario())


def test_slots_are_given_in_order_of_arrival():
    async def scenario() -> None:
        bench = await Bench(answer_tokens=GivenDistribution(values=[20, 50, 10, 10])).ready()
        await asyncio.gather(*(bench.ask(name, member) for member, name in enumerate("abcd")))
        assert bench.ends == {"a": 2.0, "c": 3.0, "d": 4.0, "b": 5.0}

    run_virtual(scenario())


def test_an_abort_frees_the_slot_at_once_and_returns_what_was_sampled():
    async def scenario() -> None:
        bench = await Bench(slots=1, answer_tokens=FixedDistribution(value=50)).ready()
        running, waiting, last = (asyncio.create_task(bench.ask(name)) for name in "abc")
        await asyncio.sleep(1.25)
        await bench.send(Abort(requests=["b", "a", "nobody"]))
        assert [len((await task).token_ids) for task in (running, waiting)] == [12, 0]
        assert running.result().finish_reason == waiting.result().finish_reason == "aborted"
        await last
        assert bench.ends == {"a": 1.25, "b": 1.25, "c": 6.25}
        status = await bench.send(EngineStatusRequest())
        assert (status.running, status.waiting, status.tokens_generated) == (0, 0, 62)

    run_virtual(scenario())


def test_a_request_whose_caller_is_gone_frees_its_slot_or_its_place():
    async def scenario() -> None:
        bench = await Bench(slots=1).ready()
        tasks = [asyncio.create_task(bench.ask(name)) for name in "abc"]
        await asyncio.sleep(0.5)
        for task in tasks[:2]:
            task.cancel()
        await tasks[2]
        assert bench.ends == {"c": 2.5}

    run_virtual(scenario())


def test_tokens_carry_the_version_of_the_moment_they_were_sampled_in():
    async def scenario() -> None:
        bench = await Bench().ready()
        asked = asyncio.create_task(bench.ask("a"))
        for version in (1, 2):
            await asyncio.sleep(0.55)
            await bench.update(version)
        assert (await asked).versions.tolist() == [0] * 5 + [1] * 6 + [2] * 9

    run_virtual(scenario())


def test_while_suspended_or_updating_nothing_is_decoded():
    async def scenario() -> None:
        bench = await Bench(update_s=3.0).ready()
        asked = asyncio.create_task(bench.ask("a"))
        await asyncio.sleep(1.0)
        await bench.send(Suspend())
        await bench.send(Suspend())
        late = asyncio.create_task(bench.ask("b"))
        await asyncio.sleep(10.0)
        await bench.send(Resume())
        await asyncio.sleep(0.5)
        await bench.update(1)
        await asyncio.gather(asked, late)
        assert bench.ends == {"a": pytest.approx(3 + 2 + 10 + 3), "b": pytest.approx(3 + 1 + 10 + 2 + 3)}

    run_virtual(scenario())


def test_parts_are_streamed_when_asked_for_and_add_up():
    async def scenario() -> None:
        bench = await Bench(stream_every_s=0.75).ready()
        reply = await bench.ask("a")
        assert bench.parts == [(0.75, 7), (1.5, 8)]
        assert len(reply.token_ids) == 5

    run_virtual(scenario())


def test_an_answer_that_another_engine_began_is_only_finished():
    async def scenario() -> None:
        bench = await Bench().ready()
        reply = await bench.ask("a", generated_ids=np.zeros(15, np.int32))
        assert (len(reply.token_ids), bench.ends["a"]) == (5, 0.5)

    run_virtual(scenario())


def test_a_conversation_is_not_read_again_by_the_engine_that_holds_it():
    async def scenario() -> None:
        bench = await Bench(prefill_tokens_per_s=10.0).ready()
        for name, prompt in (("t0", 10), ("t1", 40)):
            await bench.ask(name, session="s", prompt_ids=np.zeros(prompt, np.int32))
        assert bench.ends["t1"] - bench.ends["t0"] == pytest.approx((40 - 10 - 20) / 10 + 2.0)
        await bench.update(1)
        await bench.ask("t2", session="s", prompt_ids=np.zeros(60, np.int32))
        assert bench.ends["t2"] - bench.ends["t1"] == pytest.approx(60 / 10 + 2.0)

    run_virtual(scenario())


def test_what_an_engine_cannot_serve_it_refuses():
    async def scenario() -> None:
        bench = Bench()
        for fields in ({}, {"min_version": 1}, {"pin_version": 3}):
            with pytest.raises(NotServing):
                await bench.send(generate("a", **fields))
            await bench.update(0)
        with pytest.raises(ContractError, match="max_context_tokens"):
            await bench.send(generate("a", max_new_tokens=40_000))
        await bench.update(2)
        with pytest.raises(ContractError, match="2 is served already"):
            await bench.update(1)

    run_virtual(scenario())


def test_a_staged_version_crosses_shared_memory_and_a_damaged_one_is_refused():
    async def scenario() -> None:
        stage, bench = TinyStage("tinytest"), Bench()
        try:
            staged = stage.stage(7)
            await bench.send(Update(weights=staged, deadline_s=10))
            assert (await bench.send(EngineStatusRequest())).version == 7
            forged = type(staged)(version=8, segment=staged.segment, nbytes=staged.nbytes, tensors=staged.tensors)
            with pytest.raises(WeightsError, match="holds version 7"):
                await bench.send(Update(weights=forged, deadline_s=10))
        finally:
            stage.close()
        with pytest.raises(WeightsError, match="no shared-memory segment"):
            await bench.send(Update(weights=type(staged)(9, staged.segment, 64, staged.tensors), deadline_s=10))

    run_virtual(scenario())

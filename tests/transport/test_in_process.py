"""The in-process transport keeps the promises of the ZeroMQ one; all on virtual time, where deadlines cost nothing."""

import asyncio
import contextlib
import random

import numpy as np
import pytest

from flashflow import messages as m
from flashflow.config.sections import NetworkSection
from flashflow.errors import ContractError, DeadlineError, PeerLost, RemoteError, TransportError
from flashflow.records import SampleId, Task
from flashflow.simulate.clock import run_virtual
from flashflow.transport.channel import Emit, Handler, Peer
from flashflow.transport.in_process import InProcessNetwork, InProcessTransport
from flashflow.transport.sessions import STREAM_WINDOW

SECTION = NetworkSection(startup_deadline_s=20.0)
LONG_S = 1000.0
BUFFER, ENV = Peer("buffer", 0, 0), Peer("env", 0, 0)


def part(token: int) -> m.GenerateReply:
    ids = np.array([token], np.int32)
    return m.GenerateReply(token_ids=ids, logprobs=np.zeros(1, np.float32), versions=ids)


def generate() -> m.Generate:
    empty = np.zeros(0, np.int32)
    return m.Generate(
        request="q", session="s", key=m.SamplingKey(1, 2, 3, 4, 5), prompt_ids=empty, generated_ids=empty,
        max_new_tokens=4, temperature=1.0, stop_ids=[], stop_strings=[], min_version=0,
    )  # fmt: skip


class Held:
    """A handler whose every call waits for `release`, and tells when it starts and how it ends."""

    def __init__(self, version: int = 0) -> None:
        self.started: asyncio.Queue[m.Message] = asyncio.Queue()
        self.cancelled: asyncio.Queue[m.Message] = asyncio.Queue()
        self.lost: asyncio.Queue[Peer] = asyncio.Queue()
        self.release = asyncio.Event()
        self.version = version

    async def __call__(self, message: m.Message, peer: Peer, emit: Emit) -> m.Message:
        self.started.put_nowait(message)
        try:
            await self.release.wait()
        except asyncio.CancelledError:
            self.cancelled.put_nowait(message)
            raise
        return m.Serving(version=self.version, engines=[str(peer)])


async def served(network: InProcessNetwork, handler: Handler, peer: Peer = BUFFER) -> InProcessTransport:
    transport = network.transport(peer)
    await transport.listen(handler, handler.lost.put_nowait if isinstance(handler, Held) else lambda peer: None)
    return transport


def answering(reply: m.Message) -> Handler:
    async def handler(message: m.Message, peer: Peer, emit: Emit) -> m.Message:
        return reply

    return handler


def test_a_call_is_answered_and_its_arrays_arrive_read_only() -> None:
    async def scenario() -> None:
        network = InProcessNetwork(SECTION)
        sent = part(7)
        await served(network, answering(sent))
        reply = await network.transport(ENV).client("buffer-0").call(generate(), m.GenerateReply, deadline_s=1)
        assert reply.token_ids.tolist() == [7]
        assert not reply.token_ids.flags.writeable
        assert not np.shares_memory(reply.token_ids, sent.token_ids)

    run_virtual(scenario())


def test_without_the_codec_the_very_message_arrives() -> None:
    async def scenario() -> None:
        network = InProcessNetwork(SECTION, through_codec=False)
        sent = part(7)
        await served(network, answering(sent))
        client = network.transport(ENV).client("buffer-0")
        assert await client.call(m.Finish(), m.GenerateReply, deadline_s=1) is sent

    run_virtual(scenario())


def test_what_could_not_cross_a_socket_does_not_cross_here() -> None:
    async def scenario() -> None:
        network = InProcessNetwork(SECTION)
        task = Task(cursor=0, row={"x": {1j}})
        lease = m.Lease(sample=SampleId(0, 0), lease_epoch=0, purpose="train", task=task, min_version=0)
        await served(network, answering(lease))
        client = network.transport(ENV).client("buffer-0")
        with pytest.raises(TransportError, match="Lease cannot be encoded"):
            await client.call(lease, m.Ack, deadline_s=1)
        with pytest.raises(RemoteError, match="Lease cannot be encoded"):
            await client.call(m.AcquireLease(), m.Lease, deadline_s=1)

    run_virtual(scenario())


def test_a_deadline_is_by_the_loops_clock_and_cancels_the_handler() -> None:
    async def scenario() -> None:
        network, held = InProcessNetwork(SECTION), Held()
        await served(network, held)
        with pytest.raises(DeadlineError, match=r"buffer-0 did not answer Finish within 1000.0 s"):
            await network.transport(ENV).client("buffer-0").call(m.Finish(), m.Ack, deadline_s=LONG_S)
        assert asyncio.get_running_loop().time() == pytest.approx(1000.0)
        assert await held.cancelled.get() == m.Finish()

    run_virtual(scenario())


def test_a_server_that_never_appears_ends_the_call_at_the_startup_deadline() -> None:
    async def scenario() -> None:
        client = InProcessNetwork(SECTION).transport(ENV).client("buffer-0")
        with pytest.raises(DeadlineError, match=r"buffer-0 did not listen within network.startup_deadline_s = 20.0 s"):
            await client.call(m.Finish(), m.Ack, deadline_s=LONG_S)
        assert asyncio.get_running_loop().time() == pytest.approx(20.0)

    run_virtual(scenario())


def test_errors_of_handlers_reach_the_caller_and_only_foreign_ones_stop_the_role() -> None:
    async def scenario() -> None:
        async def handler(message: m.Message, peer: Peer, emit: Emit) -> m.Message:
            raise ContractError("expected") if isinstance(message, m.Finish) else KeyError("bug")

        network = InProcessNetwork(SECTION)
        server = await served(network, handler)
        client = network.transport(ENV).client("buffer-0")
        with pytest.raises(RemoteError, match="ContractError: expected"):
            await client.call(m.Finish(), m.Ack, deadline_s=1)
        assert not server.failed.done()
        with pytest.raises(RemoteError, match="KeyError: 'bug'"):
            await client.call(m.AcquireLease(), m.Ack, deadline_s=1)
        with pytest.raises(KeyError):
            await server.failed

    run_virtual(scenario())


def test_a_stream_gives_its_parts_in_order_whatever_their_delays() -> None:
    async def scenario() -> None:
        async def handler(message: m.Message, peer: Peer, emit: Emit) -> m.Message:
            for token in range(3 * STREAM_WINDOW):
                await emit(part(token))
            return part(-1)

        random_s = random.Random(3)
        network = InProcessNetwork(SECTION, delay=lambda sender, receiver, message: random_s.expovariate(1.0))
        await served(network, handler)
        stream = network.transport(ENV).client("buffer-0").stream(generate(), m.GenerateReply, idle_deadline_s=LONG_S)
        assert [int(p.token_ids[0]) async for p in stream] == [*range(3 * STREAM_WINDOW), -1]

    run_virtual(scenario())


def test_emit_waits_for_the_caller_to_take() -> None:
    async def scenario() -> None:
        emitted = 0

        async def handler(message: m.Message, peer: Peer, emit: Emit) -> m.Message:
            nonlocal emitted
            while True:
                await emit(part(emitted))
                emitted += 1

        network = InProcessNetwork(SECTION)
        await served(network, handler)
        client = network.transport(ENV).client("buffer-0")
        async with contextlib.aclosing(client.stream(generate(), m.GenerateReply, idle_deadline_s=1)) as stream:
            await anext(stream)
            await asyncio.sleep(100)  # virtual: the handler has done all it can
            assert emitted == STREAM_WINDOW

    run_virtual(scenario())


def test_leaving_a_stream_or_cancelling_a_call_cancels_the_handler() -> None:
    async def scenario() -> None:
        network, held = InProcessNetwork(SECTION), Held()
        await served(network, held)
        client = network.transport(ENV).client("buffer-0")
        call = asyncio.create_task(client.call(m.Finish(), m.Ack, deadline_s=LONG_S))
        part_of_stream = asyncio.create_task(anext(client.stream(generate(), m.GenerateReply, idle_deadline_s=LONG_S)))
        assert [type(await held.started.get()) for _ in range(2)] == [m.Finish, m.Generate]
        call.cancel()
        assert await held.cancelled.get() == m.Finish()
        part_of_stream.cancel()
        assert isinstance(await held.cancelled.get(), m.Generate)

    run_virtual(scenario())


def test_a_call_survives_the_death_of_its_server_and_a_stream_does_not() -> None:
    async def scenario() -> None:
        network, first, second = InProcessNetwork(SECTION), Held(), Held(version=1)
        server = await served(network, first)
        caller = network.transport(ENV)
        client = caller.client("buffer-0")
        call = asyncio.create_task(client.call(m.Finish(), m.Serving, deadline_s=LONG_S))
        stream = asyncio.create_task(anext(client.stream(generate(), m.GenerateReply, idle_deadline_s=LONG_S)))
        await first.started.get()
        await first.started.get()
        await server.close()
        with pytest.raises(PeerLost, match="buffer-0-0 was lost in the middle of Generate"):
            await stream
        assert not call.done()
        second.release.set()
        await served(network, second, Peer("buffer", 0, 1))
        assert await call == m.Serving(version=1, engines=["env-0-0"])
        assert caller.counters["resends"] == 1

    run_virtual(scenario())


def test_a_caller_that_closes_is_lost_and_its_handlers_are_cancelled() -> None:
    async def scenario() -> None:
        network, held = InProcessNetwork(SECTION), Held()
        await served(network, held)
        caller = network.transport(ENV)
        call = asyncio.create_task(caller.client("buffer-0").call(m.Finish(), m.Ack, deadline_s=LONG_S))
        await held.started.get()
        await caller.close()
        assert await held.lost.get() == ENV
        assert await held.cancelled.get() == m.Finish()
        with pytest.raises(PeerLost, match="the client of env-0-0 towards buffer-0 is closed"):
            await call
        with pytest.raises(PeerLost):
            await caller.client("buffer-0").call(m.Finish(), m.Ack, deadline_s=LONG_S)

    run_virtual(scenario())


def test_closing_wakes_a_call_that_waits_for_its_server() -> None:
    async def scenario() -> None:
        caller = InProcessNetwork(SECTION).transport(ENV)
        call = asyncio.create_task(caller.client("buffer-0").call(m.Finish(), m.Ack, deadline_s=LONG_S))
        await asyncio.sleep(1)
        await caller.close()
        with pytest.raises(PeerLost):
            await call
        assert asyncio.get_running_loop().time() == pytest.approx(1.0)

    run_virtual(scenario())


def test_a_newer_incarnation_of_a_caller_replaces_the_older_one_which_gets_no_answer() -> None:
    async def scenario() -> None:
        network, held = InProcessNetwork(SECTION), Held()
        server = await served(network, held)
        old, new = network.transport(ENV).client("buffer-0"), network.transport(Peer("env", 0, 1)).client("buffer-0")
        first = asyncio.create_task(old.call(m.Finish(), m.Serving, deadline_s=LONG_S))
        await held.started.get()
        held.release.clear()
        second = asyncio.create_task(new.call(m.AcquireLease(), m.Serving, deadline_s=LONG_S))
        assert await held.started.get() == m.AcquireLease()
        assert await held.lost.get() == ENV
        assert await held.cancelled.get() == m.Finish()
        held.release.set()
        assert (await second).engines == ["env-0-1"]
        with pytest.raises(DeadlineError):
            await old.call(m.Finish(), m.Serving, deadline_s=1)
        with pytest.raises(DeadlineError):
            await first
        assert server.counters["refused_older_incarnation"] == 1

    run_virtual(scenario())


def test_an_older_incarnation_cannot_serve_again() -> None:
    async def scenario() -> None:
        network = InProcessNetwork(SECTION)
        await served(network, Held(), Peer("buffer", 0, 1))
        with pytest.raises(ContractError, match="buffer-0-0 cannot serve after buffer-0-1"):
            await served(network, Held())

    run_virtual(scenario())


def test_each_message_takes_the_delay_it_is_given() -> None:
    async def scenario() -> None:
        seen = []

        def delay(sender: Peer, receiver: str, message: m.Message) -> float:
            seen.append((str(sender), receiver, type(message)))
            return 2.0 if isinstance(message, m.Finish) else 0.5

        network = InProcessNetwork(SECTION, delay=delay)
        await served(network, answering(m.Ack()))
        await network.transport(ENV).client("buffer-0").call(m.Finish(), m.Ack, deadline_s=LONG_S)
        assert asyncio.get_running_loop().time() == pytest.approx(2.5)
        assert seen == [("env-0-0", "buffer-0", m.Finish), ("buffer-0-0", "env-0", m.Ack)]

    run_virtual(scenario())


def test_a_reply_of_another_type_than_expected_is_an_error() -> None:
    async def scenario() -> None:
        network = InProcessNetwork(SECTION)
        await served(network, answering(m.Ack()))
        with pytest.raises(TransportError, match="buffer-0 answered Finish with Ack, expected Serving"):
            await network.transport(ENV).client("buffer-0").call(m.Finish(), m.Serving, deadline_s=1)

    run_virtual(scenario())

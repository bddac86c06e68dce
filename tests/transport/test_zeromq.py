"""The ZeroMQ transport on real sockets, and against real processes that die."""

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq
import zmq.asyncio

from flashflow import messages as m
from flashflow.config.sections import NetworkSection
from flashflow.errors import ConfigError, ContractError, DeadlineError, PeerLost, RemoteError, TransportError
from flashflow.records import SampleId, Task
from flashflow.transport import codec
from flashflow.transport import envelope as e
from flashflow.transport.addresses import Address, Addresses
from flashflow.transport.channel import Emit, Handler, Peer
from flashflow.transport.parcels import pack, unpack
from flashflow.transport.security import RunKey, create_run_key, load_run_key
from flashflow.transport.sessions import STREAM_WINDOW
from flashflow.transport.zeromq import ZmqTransport

NETWORK = NetworkSection(heartbeat_s=0.1, peer_deadline_s=2.0, startup_deadline_s=20.0, shutdown_deadline_s=2.0)
LONG_S = 30.0
"""A deadline that only a broken test reaches."""
BUFFER, ENV = Peer("buffer", 0, 0), Peer("env", 0, 0)
PROCESS = Path(__file__).with_name("zeromq_process.py")


def run(scenario: Coroutine[Any, Any, None]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(LONG_S):
            await scenario

    asyncio.run(bounded())


def part(token: int) -> m.GenerateReply:
    ids = np.array([token], np.int32)
    return m.GenerateReply(token_ids=ids, logprobs=np.zeros(1, np.float32), versions=ids)


def generate(tokens: int = 1) -> m.Generate:
    return m.Generate(
        request="q", session="s", key=m.SamplingKey(1, 2, 3, 4, 5), prompt_ids=np.zeros(tokens, np.int32),
        generated_ids=np.zeros(0, np.int32), max_new_tokens=4, temperature=1.0, stop_ids=[], stop_strings=[],
        min_version=0,
    )  # fmt: skip


class Held:
    """A handler whose every call waits for `release`, and tells when it starts and how it ends."""

    def __init__(self) -> None:
        self.started: asyncio.Queue[m.Message] = asyncio.Queue()
        self.cancelled: asyncio.Queue[m.Message] = asyncio.Queue()
        self.release = asyncio.Event()
        self.lost: asyncio.Queue[Peer] = asyncio.Queue()
        self.runs = 0

    async def __call__(self, message: m.Message, peer: Peer, emit: Emit) -> m.Message:
        self.runs += 1
        self.started.put_nowait(message)
        try:
            await self.release.wait()
        except asyncio.CancelledError:
            self.cancelled.put_nowait(message)
            raise
        return m.Serving(version=self.runs, engines=[])


def answering(reply: Callable[[m.Message], m.Message]) -> Handler:
    async def handler(message: m.Message, peer: Peer, emit: Emit) -> m.Message:
        return reply(message)

    return handler


class Pair:
    """A buffer that serves and an env that calls it, both in this process."""

    def __init__(self, server: ZmqTransport, caller: ZmqTransport, addresses: Addresses) -> None:
        self.server, self.caller, self.addresses = server, caller, addresses
        self.client = caller.client("buffer-0")


@asynccontextmanager
async def paired(
    handler: Handler, *, key: RunKey | None = None, caller_key: RunKey | None = None, credits: int = 1024
) -> AsyncIterator[Pair]:
    server = ZmqTransport(BUFFER, "run", Addresses(), NETWORK, key, credits=credits)
    lost = handler.lost.put_nowait if isinstance(handler, Held) else lambda peer: None
    await server.listen(handler, lost)
    addresses = Addresses({"buffer-0": server.address})
    caller = ZmqTransport(ENV, "run", addresses, NETWORK, caller_key or key)
    try:
        yield Pair(server, caller, addresses)
    finally:
        await caller.close()
        await server.close()


# ---- calls


def test_a_call_is_answered_with_its_arrays() -> None:
    async def scenario() -> None:
        async with paired(answering(lambda message: part(int(message.prompt_ids.sum())))) as pair:  # type: ignore[attr-defined]
            reply = await pair.client.call(generate(), m.GenerateReply, deadline_s=LONG_S)
            assert reply.token_ids.tolist() == [0]
            assert reply.token_ids.dtype == np.int32

    run(scenario())


def test_many_calls_at_once_get_each_its_own_answer() -> None:
    async def scenario() -> None:
        async with paired(answering(lambda message: m.ServingVersion(version=message.step)), credits=8) as pair:  # type: ignore[attr-defined]
            calls = [pair.client.call(m.NextBatch(step=i), m.ServingVersion, deadline_s=LONG_S) for i in range(200)]
            assert [reply.version for reply in await asyncio.gather(*calls)] == list(range(200))

    run(scenario())


def test_the_callee_learns_who_called() -> None:
    async def scenario() -> None:
        async def handler(message: m.Message, peer: Peer, emit: Emit) -> m.Message:
            return m.Serving(version=peer.generation, engines=[str(peer)])

        async with paired(handler) as pair:
            trainer = ZmqTransport(Peer("trainer", 3, 7, generation=2), "run", pair.addresses, NETWORK)
            reply = await trainer.client("buffer-0").call(m.Finish(), m.Serving, deadline_s=LONG_S)
            assert (reply.engines, reply.version) == (["trainer-3-7"], 2)
            await trainer.close()

    run(scenario())


def test_a_call_without_an_answer_ends_with_an_error_that_names_peer_and_message_and_cancels_the_handler() -> None:
    async def scenario() -> None:
        held = Held()
        async with paired(held) as pair:
            with pytest.raises(DeadlineError, match=r"buffer-0 did not answer Finish within 0.3 s \(connected to buff"):
                await pair.client.call(m.Finish(), m.Serving, deadline_s=0.3)
            assert await held.cancelled.get() == m.Finish()

    run(scenario())


def test_cancelling_a_call_cancels_its_handler() -> None:
    async def scenario() -> None:
        held = Held()
        async with paired(held) as pair:
            call = asyncio.create_task(pair.client.call(m.Finish(), m.Serving, deadline_s=LONG_S))
            await held.started.get()
            call.cancel()
            assert await held.cancelled.get() == m.Finish()

    run(scenario())


def test_a_broken_contract_in_a_handler_reaches_the_caller_and_only_the_caller() -> None:
    async def scenario() -> None:
        async def handler(message: m.Message, peer: Peer, emit: Emit) -> m.Message:
            raise ContractError("step 3 after step 1")

        async with paired(handler) as pair:
            with pytest.raises(RemoteError, match="ContractError: step 3 after step 1") as caught:
                await pair.client.call(m.Finish(), m.Ack, deadline_s=LONG_S)
            assert caught.value.kind == "ContractError"
            assert not pair.server.failed.done()

    run(scenario())


def test_any_other_exception_of_a_handler_reaches_the_caller_and_stops_the_role() -> None:
    async def scenario() -> None:
        async def handler(message: m.Message, peer: Peer, emit: Emit) -> m.Message:
            raise ZeroDivisionError("one over nothing")

        async with paired(handler) as pair:
            with pytest.raises(RemoteError, match="ZeroDivisionError: one over nothing"):
                await pair.client.call(m.Finish(), m.Ack, deadline_s=LONG_S)
            with pytest.raises(ZeroDivisionError):
                await pair.server.failed

    run(scenario())


def test_a_reply_of_another_type_than_expected_is_an_error() -> None:
    async def scenario() -> None:
        async with paired(answering(lambda message: m.Ack())) as pair:
            with pytest.raises(TransportError, match="buffer-0 answered NextBatch with Ack, expected Lease or NoLease"):
                await pair.client.call(m.NextBatch(step=1), (m.Lease, m.NoLease), deadline_s=LONG_S)

    run(scenario())


def test_what_cannot_be_encoded_raises_at_its_sender() -> None:
    async def scenario() -> None:
        lease = m.Lease(
            sample=SampleId(0, 0), lease_epoch=0, purpose="train", task=Task(cursor=0, row={"x": {1j}}), min_version=0
        )
        async with paired(answering(lambda message: lease)) as pair:
            with pytest.raises(TransportError, match="Lease cannot be encoded"):
                await pair.client.call(lease, m.Ack, deadline_s=LONG_S)
            with pytest.raises(RemoteError, match="TransportError: Lease cannot be encoded"):
                await pair.client.call(m.AcquireLease(), m.Lease, deadline_s=LONG_S)

    run(scenario())


def test_an_address_that_is_never_published_ends_the_call() -> None:
    async def scenario() -> None:
        network = NETWORK.model_copy(update={"startup_deadline_s": 0.1})
        caller = ZmqTransport(ENV, "run", Addresses(), network)
        with pytest.raises(DeadlineError, match=r"address of buffer-0 .* network.startup_deadline_s = 0.1 s"):
            await caller.client("buffer-0").call(m.Finish(), m.Ack, deadline_s=LONG_S)
        await caller.close()

    run(scenario())


def test_a_call_waits_for_the_address() -> None:
    async def scenario() -> None:
        async with paired(answering(lambda message: m.Ack())) as pair:
            late = Addresses()
            caller = ZmqTransport(Peer("env", 1, 0), "run", late, NETWORK)
            call = asyncio.create_task(caller.client("buffer-0").call(m.Finish(), m.Ack, deadline_s=LONG_S))
            await pair.client.call(m.Finish(), m.Ack, deadline_s=LONG_S)
            assert not call.done()
            late.update({"buffer-0": pair.server.address})
            assert await call == m.Ack()
            await caller.close()

    run(scenario())


def test_closing_ends_the_calls_that_wait() -> None:
    async def scenario() -> None:
        held = Held()
        async with paired(held, credits=1) as pair:
            calls = [asyncio.create_task(pair.client.call(m.Finish(), m.Ack, deadline_s=LONG_S)) for _ in range(2)]
            await held.started.get()
            await pair.caller.close()
            for outcome in await asyncio.gather(*calls, return_exceptions=True):
                assert isinstance(outcome, PeerLost)
            assert await held.lost.get() == ENV  # the caller said goodbye

    run(scenario())


# ---- streams


def test_a_stream_gives_its_parts_in_order_and_then_the_final_reply() -> None:
    async def scenario() -> None:
        async def handler(message: m.Message, peer: Peer, emit: Emit) -> m.Message:
            for token in range(5 * STREAM_WINDOW):
                await emit(part(token))
            return msgspec.structs.replace(part(-1), finish_reason="stop")

        async with paired(handler) as pair:
            parts = [p async for p in pair.client.stream(generate(), m.GenerateReply, idle_deadline_s=LONG_S)]
            assert [int(p.token_ids[0]) for p in parts] == [*range(5 * STREAM_WINDOW), -1]
            assert [p.finish_reason for p in parts[-2:]] == ["", "stop"]

    run(scenario())


def test_emit_waits_for_the_caller_to_take() -> None:
    async def scenario() -> None:
        emitted = 0

        async def handler(message: m.Message, peer: Peer, emit: Emit) -> m.Message:
            nonlocal emitted
            for token in range(4 * STREAM_WINDOW):
                await emit(part(token))
                emitted += 1
            return part(-1)

        async with paired(handler) as pair:
            taken = 0
            async for _ in pair.client.stream(generate(), m.GenerateReply, idle_deadline_s=LONG_S):
                assert emitted - taken <= STREAM_WINDOW
                taken += 1
            assert taken == 4 * STREAM_WINDOW + 1

    run(scenario())


def test_leaving_a_stream_cancels_its_handler() -> None:
    async def scenario() -> None:
        ended = asyncio.Event()

        async def handler(message: m.Message, peer: Peer, emit: Emit) -> m.Message:
            try:
                while True:
                    await emit(part(1))
            finally:
                ended.set()

        async with paired(handler) as pair:
            stream = pair.client.stream(generate(), m.GenerateReply, idle_deadline_s=LONG_S)
            await anext(stream)
            await stream.aclose()
            await ended.wait()

    run(scenario())


def test_a_silent_stream_ends_with_an_error() -> None:
    async def scenario() -> None:
        held = Held()
        async with paired(held) as pair:
            with pytest.raises(DeadlineError, match=r"buffer-0 did not send the next part for Generate within 0.3 s"):
                await anext(pair.client.stream(generate(), m.GenerateReply, idle_deadline_s=0.3))
            await held.cancelled.get()

    run(scenario())


def test_emitting_to_a_plain_call_is_a_broken_contract() -> None:
    async def scenario() -> None:
        async def handler(message: m.Message, peer: Peer, emit: Emit) -> m.Message:
            await emit(part(1))
            return part(2)

        async with paired(handler) as pair:
            with pytest.raises(RemoteError, match="GenerateReply emitted, but env-0-0 made a call, not a stream"):
                await pair.client.call(generate(), m.GenerateReply, deadline_s=LONG_S)

    run(scenario())


# ---- credits and lanes


def test_no_more_calls_run_than_there_are_credits() -> None:
    async def scenario() -> None:
        held = Held()
        async with paired(held, credits=2) as pair:
            calls = [asyncio.create_task(pair.client.call(m.Finish(), m.Serving, deadline_s=LONG_S)) for _ in range(5)]
            await held.started.get()
            await held.started.get()
            # A stream has a credit of its own, and arrives after every call that was sent before it.
            last = asyncio.create_task(anext(pair.client.stream(generate(), m.Serving, idle_deadline_s=LONG_S)))
            assert isinstance(await held.started.get(), m.Generate)
            assert held.runs == 3
            held.release.set()
            await asyncio.gather(last, *calls)
            assert held.runs == 6

    run(scenario())


def test_streams_that_hold_every_credit_do_not_hold_up_a_call() -> None:
    async def scenario() -> None:
        async def handler(message: m.Message, peer: Peer, emit: Emit) -> m.Message:
            if isinstance(message, m.Generate):
                await emit(part(1))
                await asyncio.Event().wait()
            return m.Ack()

        async with paired(handler, credits=1) as pair:
            stream = pair.client.stream(generate(), m.GenerateReply, idle_deadline_s=LONG_S)
            async with contextlib.aclosing(stream):
                await anext(stream)
                assert await pair.client.call(m.Finish(), m.Ack, deadline_s=LONG_S) == m.Ack()

    run(scenario())


def test_an_abort_overtakes_fifty_megabytes_of_data() -> None:
    async def scenario() -> None:
        held = Held()
        held.release.set()
        async with paired(held) as pair:
            await pair.client.call(m.Finish(), m.Serving, deadline_s=LONG_S)
            await held.started.get()
            big = asyncio.create_task(pair.client.call(generate(tokens=12_500_000), m.Serving, deadline_s=LONG_S))
            abort = asyncio.create_task(pair.client.call(m.Abort(requests=["q"]), m.Serving, deadline_s=LONG_S))
            assert isinstance(await held.started.get(), m.Abort)
            assert isinstance(await held.started.get(), m.Generate)
            await asyncio.gather(big, abort)

    run(scenario())


# ---- frames that must not count


class RawCaller:
    """Speaks the protocol frame by frame, and may break it."""

    def __init__(self, context: zmq.asyncio.Context, address: Address, peer: Peer, *, run_id: str = "run") -> None:
        self.peer, self.run_id = peer, run_id
        self.received: dict[str, list[list[codec.Frame]]] = {"data": [], "control": []}
        self.lanes = {"data": context.socket(zmq.DEALER), "control": context.socket(zmq.DEALER)}
        for lane, endpoint in (("data", address.data), ("control", address.control)):
            self.lanes[lane].routing_id = str(peer).encode()
            self.lanes[lane].connect(endpoint)

    def stamp(self, acknowledged: int = 1, to: str = "buffer-0") -> e.Stamp:
        return e.Stamp(self.run_id, self.peer, 1, to, acknowledged)

    async def send(self, lane: str, envelope: e.Envelope, message: m.Message | None = None) -> None:
        body = codec.encode(message) if message is not None else []
        await self.lanes[lane].send(pack([[e.seal(envelope), *body]]))

    async def receive(self, lane: str) -> tuple[e.FromServer, m.Message | None]:
        if not self.received[lane]:
            self.received[lane] = unpack(await self.lanes[lane].recv())
        first, *body = self.received[lane].pop(0)
        return e.open_from_server(first), codec.decode(body) if body else None

    async def hello(self) -> e.Welcome:
        await self.send("control", e.Hello(stamp=self.stamp(), next_sequence=1, outstanding=[]))
        welcome, _ = await self.receive("control")
        assert isinstance(welcome, e.Welcome)
        return welcome

    async def round_trip(self, acknowledged: int = 1) -> None:
        """Everything sent on control before has been handled."""
        await self.send("control", e.Heartbeat(stamp=self.stamp(acknowledged)))
        assert isinstance((await self.receive("control"))[0], e.Heartbeat)


@asynccontextmanager
async def raw(pair: Pair) -> AsyncIterator[Callable[..., RawCaller]]:
    made: list[RawCaller] = []

    def make(peer: Peer, **options: str) -> RawCaller:
        made.append(RawCaller(context, pair.server.address, peer, **options))
        return made[-1]

    with zmq.asyncio.Context() as context:
        try:
            yield make
        finally:
            for caller in made:
                for socket in caller.lanes.values():
                    socket.close(linger=0)


def with_raw(
    handler: Handler, scenario: Callable[[Pair, Callable[..., RawCaller]], Awaitable[None]]
) -> Coroutine[Any, Any, None]:
    async def both() -> None:
        async with paired(handler) as pair, raw(pair) as make:
            await scenario(pair, make)

    return both()


def test_a_repeated_call_runs_its_handler_once_and_gets_the_same_answer_until_it_is_acknowledged() -> None:
    held = Held()

    async def scenario(pair: Pair, make: Callable[..., RawCaller]) -> None:
        caller = make(Peer("env", 5, 0))
        await caller.hello()
        call = e.Call(stamp=caller.stamp(), sequence=1, streamed=False)
        await caller.send("data", call, m.Finish())
        await held.started.get()
        await caller.send("data", call, m.Finish())  # while it runs: attached
        await caller.round_trip()
        held.release.set()
        first = await caller.receive("data")
        await caller.send("data", call, m.Finish())  # after its end: answered from memory
        assert first[1] == m.Serving(version=1, engines=[])
        assert await caller.receive("data") == first
        assert pair.server.counters["duplicates"] == 2
        await caller.round_trip(acknowledged=2)
        await caller.send("data", call, m.Finish())  # acknowledged: forgotten, neither run nor answered
        await caller.send("data", e.Call(stamp=caller.stamp(2), sequence=2, streamed=False), m.Finish())
        reply, message = await caller.receive("data")
        assert isinstance(reply, e.Reply)
        assert (reply.sequence, message, held.runs) == (2, m.Serving(version=2, engines=[]), 2)

    run(with_raw(held, scenario))


def test_a_cancellation_that_overtakes_its_call_keeps_it_from_starting() -> None:
    held = Held()
    held.release.set()

    async def scenario(pair: Pair, make: Callable[..., RawCaller]) -> None:
        caller = make(Peer("env", 5, 0))
        await caller.hello()
        await caller.send("control", e.Cancel(stamp=caller.stamp(), sequence=2))
        await caller.round_trip()
        for sequence in (2, 3):
            await caller.send("data", e.Call(stamp=caller.stamp(), sequence=sequence, streamed=False), m.Finish())
        assert (await caller.receive("data"))[0].sequence == 3  # type: ignore[union-attr]
        assert held.runs == 1

    run(with_raw(held, scenario))


def test_frames_of_another_run_of_another_target_and_garbage_are_refused_and_counted() -> None:
    held = Held()

    async def scenario(pair: Pair, make: Callable[..., RawCaller]) -> None:
        stranger = make(Peer("env", 8, 0), run_id="other")
        await stranger.send("control", e.Hello(stamp=stranger.stamp(), next_sequence=1, outstanding=[]))
        caller = make(Peer("env", 5, 0))
        await caller.send("control", e.Hello(stamp=caller.stamp(to="proxy-0"), next_sequence=1, outstanding=[]))
        for garbage in (b"", b"\xc1", b"\x00" * 100, pack([[]]), pack([[b"\xc1"]])):
            await caller.lanes["control"].send(garbage)
        await caller.send("control", e.Welcome(stamp=caller.stamp(), unknown=[], credits=1))
        await caller.hello()
        # An own round trip of the stranger cannot be had: it gets no answers. Its one frame was sent first of all.
        call = e.Call(stamp=caller.stamp(), sequence=1, streamed=False)
        await caller.lanes["data"].send(pack([[e.seal(call), b"\xc1"]]))
        failure, _ = await caller.receive("data")
        assert isinstance(failure, e.Failure)
        assert failure.kind == "TransportError"
        assert pair.server.counters["refused_malformed"] == 7
        assert pair.server.counters["refused_other_target"] == 1
        while not pair.server.counters["refused_other_run"]:
            await caller.round_trip()
        assert held.runs == 0
        assert not pair.server.failed.done()

    run(with_raw(held, scenario))


def test_a_newer_incarnation_replaces_the_older_one_which_is_then_refused() -> None:
    held = Held()

    async def scenario(pair: Pair, make: Callable[..., RawCaller]) -> None:
        old, new = make(Peer("env", 5, 0)), make(Peer("env", 5, 1))
        await old.hello()
        await old.send("data", e.Call(stamp=old.stamp(), sequence=1, streamed=False), m.Finish())
        await held.started.get()
        await new.hello()
        assert await held.lost.get() == old.peer
        assert await held.cancelled.get() == m.Finish()
        await old.send("data", e.Call(stamp=old.stamp(), sequence=2, streamed=False), m.Finish())
        while not pair.server.counters["refused_older_incarnation"]:
            await new.round_trip()
        assert held.runs == 1

    run(with_raw(held, scenario))


def test_gang_members_of_an_older_generation_are_refused() -> None:
    held = Held()

    async def scenario(pair: Pair, make: Callable[..., RawCaller]) -> None:
        old, new = make(Peer("trainer", 0, 0, generation=1)), make(Peer("trainer", 1, 0, generation=2))
        await old.hello()
        await new.hello()
        await old.send("data", e.Call(stamp=old.stamp(), sequence=1, streamed=False), m.Finish())
        while not pair.server.counters["refused_older_generation"]:
            await new.round_trip()
        assert held.runs == 0

    run(with_raw(held, scenario))


def test_calls_of_a_connection_that_never_said_hello_are_refused_and_told_so() -> None:
    held = Held()

    async def scenario(pair: Pair, make: Callable[..., RawCaller]) -> None:
        caller = make(Peer("env", 5, 0))
        await caller.send("control", e.Call(stamp=caller.stamp(), sequence=1, streamed=False), m.Abort(requests=[]))
        assert isinstance((await caller.receive("control"))[0], e.Stranger)
        assert pair.server.counters["refused_unknown_connection"] == 1
        assert held.runs == 0

    run(with_raw(held, scenario))


# ---- connections that break while both ends live


class Cable:
    """A TCP proxy in front of one endpoint, which can be cut, and can swallow what the caller sends."""

    def __init__(self, endpoint: str) -> None:
        self._host, port = endpoint.removeprefix("tcp://").rsplit(":", 1)
        self._port = int(port)
        self._writers: set[asyncio.StreamWriter] = set()
        self.swallow = False
        self.swallowed = asyncio.Event()
        self.connected_again = asyncio.Event()
        self._cuts = 0

    async def plug(self) -> str:
        self._server = await asyncio.start_server(self._connect, "127.0.0.1", 0)
        return f"tcp://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    def cut(self) -> None:
        """Break every connection; new ones are accepted at once."""
        self._cuts += 1
        for writer in self._writers:
            writer.transport.abort()
        self._writers.clear()

    async def unplug(self) -> None:
        self._server.close()
        self.cut()

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection(self._host, self._port)
        self._writers |= {writer, far_writer}
        if self._cuts:
            self.connected_again.set()
        await asyncio.gather(
            self._pump(reader, far_writer, may_swallow=True), self._pump(far_reader, writer, may_swallow=False)
        )

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, may_swallow: bool) -> None:
        with contextlib.suppress(OSError):
            while received := await reader.read(1 << 16):
                if may_swallow and self.swallow:
                    self.swallowed.set()
                    continue
                writer.write(received)
                await writer.drain()
        writer.close()


@asynccontextmanager
async def cabled(pair: Pair) -> AsyncIterator[tuple[ZmqTransport, Cable]]:
    """A second env whose data goes through a cable."""
    cable = Cable(pair.server.address.data)
    address = msgspec.structs.replace(pair.server.address, data=await cable.plug())
    caller = ZmqTransport(Peer("env", 1, 0), "run", Addresses({"buffer-0": address}), NETWORK)
    try:
        yield caller, cable
    finally:
        await caller.close()
        await cable.unplug()


def test_a_call_that_runs_while_its_connection_breaks_is_answered_over_the_next_one() -> None:
    async def scenario() -> None:
        held = Held()
        async with paired(held) as pair, cabled(pair) as (caller, cable):
            call = asyncio.create_task(caller.client("buffer-0").call(m.Finish(), m.Serving, deadline_s=LONG_S))
            await held.started.get()
            cable.cut()
            await cable.connected_again.wait()
            held.release.set()
            assert await call == m.Serving(version=1, engines=[])
            assert (held.runs, caller.counters["connections_lost"], caller.counters["resends"]) == (1, 1, 0)

    run(scenario())


def test_a_call_lost_with_its_connection_is_sent_again() -> None:
    async def scenario() -> None:
        held = Held()
        held.release.set()
        async with paired(held) as pair, cabled(pair) as (caller, cable):
            client = caller.client("buffer-0")
            await client.call(m.Finish(), m.Serving, deadline_s=LONG_S)
            cable.swallow = True
            call = asyncio.create_task(client.call(m.NextBatch(step=2), m.Serving, deadline_s=LONG_S))
            await cable.swallowed.wait()
            assert held.runs == 1
            cable.swallow = False
            cable.cut()
            assert await call == m.Serving(version=2, engines=[])
            assert (held.runs, caller.counters["resends"]) == (2, 1)

    run(scenario())


def test_a_stream_ends_with_peer_lost_when_its_connection_breaks() -> None:
    async def scenario() -> None:
        ended = asyncio.Event()

        async def handler(message: m.Message, peer: Peer, emit: Emit) -> m.Message:
            await emit(part(1))
            try:
                await asyncio.Event().wait()
            finally:
                ended.set()
            return part(2)

        async with paired(handler) as pair, cabled(pair) as (caller, cable):
            stream = caller.client("buffer-0").stream(generate(), m.GenerateReply, idle_deadline_s=LONG_S)
            await anext(stream)
            cable.cut()
            with pytest.raises(PeerLost, match="buffer-0 was lost in the middle of Generate"):
                await anext(stream)
            await ended.wait()  # the next Hello tells the server that nobody wants it any more

    run(scenario())


# ---- processes that die


class Child:
    """A process of zeromq_process.py."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process

    async def heard(self) -> Any:
        """The next thing it says."""
        assert self.process.stdout is not None
        return msgspec.json.decode(await self.process.stdout.readline())

    def signal(self, number: int) -> None:
        os.kill(self.process.pid, number)


@asynccontextmanager
async def child(*arguments: str) -> AsyncIterator[Child]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, str(PROCESS), *arguments, stdout=asyncio.subprocess.PIPE
    )
    try:
        yield Child(process)
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


def test_a_call_survives_the_sigkill_of_its_server_and_a_stream_does_not() -> None:
    async def scenario() -> None:
        addresses = Addresses()
        caller = ZmqTransport(Peer("proxy", 0, 0), "run", addresses, NETWORK)
        client = caller.client("engine-0")
        async with child("serve", "0") as first, child("serve", "1") as second:
            addresses.update({"engine-0": msgspec.convert(await first.heard(), Address)})
            call = asyncio.create_task(client.call(m.EngineStatusRequest(), m.Serving, deadline_s=LONG_S))
            assert await first.heard() == "EngineStatusRequest"
            stream = client.stream(generate(), m.GenerateReply, idle_deadline_s=LONG_S)
            await anext(stream)
            first.signal(signal.SIGKILL)
            with pytest.raises(PeerLost, match="engine-0 was lost in the middle of Generate"):
                await anext(stream)
            assert not call.done()
            addresses.update({"engine-0": msgspec.convert(await second.heard(), Address)})
            assert await call == m.Serving(version=1, engines=["proxy-0-0"])
            assert caller.counters["resends"] == 1
        await caller.close()

    run(scenario())


def test_a_sigkilled_caller_is_lost_and_its_handlers_are_cancelled() -> None:
    async def scenario() -> None:
        held = Held()
        async with paired(held) as pair:
            address = msgspec.json.encode(pair.server.address).decode()
            async with child("call", "4", address) as caller:
                await held.started.get()
                caller.signal(signal.SIGKILL)
                assert await held.lost.get() == Peer("env", 9, 4)
                assert await held.cancelled.get() == m.NextBatch(step=1)

    run(scenario())


def test_a_caller_that_was_only_stopped_is_lost_and_starts_again_when_it_goes_on() -> None:
    async def scenario() -> None:
        held = Held()
        async with paired(held) as pair:
            address = msgspec.json.encode(pair.server.address).decode()
            async with child("call", "4", address) as caller:
                await held.started.get()
                caller.signal(signal.SIGSTOP)
                assert await held.lost.get() == Peer("env", 9, 4)
                assert await held.cancelled.get() == m.NextBatch(step=1)
                caller.signal(signal.SIGCONT)
                assert await held.started.get() == m.NextBatch(step=1)

    run(scenario())


# ---- encryption


def test_two_ends_with_the_runs_key_talk_encrypted(tmp_path: Path) -> None:
    async def scenario() -> None:
        made = create_run_key(tmp_path / "run.key")
        assert (tmp_path / "run.key").stat().st_mode & 0o777 == 0o600
        async with paired(answering(lambda message: m.Ack()), key=load_run_key(tmp_path / "run.key")) as pair:
            assert await pair.client.call(m.Finish(), m.Ack, deadline_s=LONG_S) == m.Ack()
            assert load_run_key(tmp_path / "run.key") == made

    run(scenario())


@pytest.mark.parametrize("server_known", [True, False])
def test_a_caller_with_another_key_is_refused(tmp_path: Path, server_known: bool) -> None:
    async def scenario() -> None:
        held = Held()
        right, wrong = create_run_key(tmp_path / "right"), create_run_key(tmp_path / "wrong")
        other = RunKey(public=wrong.public, secret=wrong.secret)
        if server_known:  # an intruder who knows the server's public key, but not its secret
            other = Intruder(public=right.public, secret=right.secret, own_public=wrong.public, own_secret=wrong.secret)
        async with paired(held, key=right, caller_key=other) as pair:
            with pytest.raises(DeadlineError, match="buffer-0 did not answer Finish"):
                await pair.client.call(m.Finish(), m.Ack, deadline_s=0.7)
            assert held.runs == 0

    run(scenario())


class Intruder(RunKey, frozen=True):
    own_public: str
    own_secret: str

    def secure_client(self, socket: "zmq.Socket[bytes]") -> None:
        socket.curve_publickey, socket.curve_secretkey = self.own_public.encode(), self.own_secret.encode()
        socket.curve_serverkey = self.public.encode()


def test_a_caller_without_a_key_is_refused(tmp_path: Path) -> None:
    async def scenario() -> None:
        server = ZmqTransport(BUFFER, "run", Addresses(), NETWORK, create_run_key(tmp_path / "key"))
        held = Held()
        await server.listen(held, held.lost.put_nowait)
        caller = ZmqTransport(ENV, "run", Addresses({"buffer-0": server.address}), NETWORK)
        with pytest.raises(DeadlineError):
            await caller.client("buffer-0").call(m.Finish(), m.Ack, deadline_s=0.5)
        assert held.runs == 0
        await caller.close()
        await server.close()

    run(scenario())


def test_calls_cross_ipv6() -> None:
    async def scenario() -> None:
        network = NETWORK.model_copy(update={"interface": "::1"})
        server = ZmqTransport(BUFFER, "run", Addresses(), network)
        await server.listen(answering(lambda message: m.Ack()), lambda peer: None)
        assert server.address.data.startswith("tcp://[::1]:")
        caller = ZmqTransport(ENV, "run", Addresses({"buffer-0": server.address}), network)
        assert await caller.client("buffer-0").call(m.Finish(), m.Ack, deadline_s=5) == m.Ack()
        await caller.close()
        await server.close()

    run(scenario())


def test_leaving_the_host_without_a_key_is_a_config_error() -> None:
    async def scenario() -> None:
        network = NETWORK.model_copy(update={"interface": "192.0.2.1"})
        with pytest.raises(ConfigError, match=r"network.interface: 192.0.2.1 leaves this host"):
            ZmqTransport(BUFFER, "run", Addresses(), network)

    run(scenario())


def test_a_key_that_others_can_read_is_refused(tmp_path: Path) -> None:
    create_run_key(tmp_path / "key")
    (tmp_path / "key").chmod(0o644)
    with pytest.raises(ConfigError, match="mode 644"):
        load_run_key(tmp_path / "key")


def test_a_key_in_use_is_not_replaced(tmp_path: Path) -> None:
    create_run_key(tmp_path / "key")
    with pytest.raises(FileExistsError):
        create_run_key(tmp_path / "key")

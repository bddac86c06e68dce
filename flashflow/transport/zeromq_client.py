"""The calling half of the ZeroMQ transport: one client per process called, over one Link after another.

Waits for: the other end's address, its Welcome, credits, answers, each within a deadline.
Unblocked by: the server; the directory, when the other end moves.
Never: sends a stream twice, or lets a call be answered twice.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable

from flashflow.config.sections import NetworkSection
from flashflow.errors import DeadlineError, PeerLost, RemoteError, TransportError
from flashflow.messages import Message
from flashflow.transport import codec
from flashflow.transport import envelope as e
from flashflow.transport.addresses import Address, Addresses
from flashflow.transport.channel import Peer, ReplyT
from flashflow.transport.link import ConnectSocket, Link
from flashflow.transport.outstanding import Credits, Pending, checked
from flashflow.transport.sessions import STREAM_WINDOW

CONTROL_CREDITS = 1 << 30
"""Calls on the control lane wait for the connection only."""


class ZmqClient:
    """Made on the running loop; connects as soon as the directory knows `name`."""

    def __init__(
        self,
        me: Peer,
        run_id: str,
        name: str,
        addresses: Addresses,
        network: NetworkSection,
        connect: ConnectSocket,
        *,
        counters: Counter[str],
        fail: Callable[[BaseException], None],
        on_welcome: Callable[[], None],
    ) -> None:
        self._me, self._my_name, self._run_id, self._name = me, e.name_of(me), run_id, name
        self._addresses, self._network, self._connect = addresses, network, connect
        self._counters, self._fail, self._on_welcome = counters, fail, on_welcome
        self._link: Link | None = None
        self._server: Peer | None = None
        self._connection = 0
        self._silent_s = 0.0
        self._state = "its address is not known yet"
        self._closed = False
        self._next_sequence = 1
        self._outstanding: dict[int, Pending] = {}
        self._greeted: list[int] = []
        self._credits = {"call": Credits(), "stream": Credits(), "control": Credits()}
        self._unsubscribe = addresses.subscribe(name, self._on_address)
        self._open()

    @property
    def connected(self) -> bool:
        """Its server has welcomed it."""
        return self._server is not None

    # ---- what roles use

    async def call(
        self, message: Message, reply: type[ReplyT] | tuple[type[ReplyT], ...], *, deadline_s: float
    ) -> ReplyT:
        pending = self._pending(message, streamed=False)
        await self._addresses.wait_for(self._name, deadline_s=self._network.startup_deadline_s)
        try:
            async with asyncio.timeout(deadline_s):
                await self._begin(pending)
                answer, _ = await pending.take()
        except TimeoutError as error:
            raise self._deadline_error(pending, "answer", deadline_s) from error
        finally:
            self._end(pending)
        return checked(answer, reply, asked=pending.message, by=self._name)

    async def stream(self, message: Message, reply: type[ReplyT], *, idle_deadline_s: float) -> AsyncIterator[ReplyT]:
        pending = self._pending(message, streamed=True)
        await self._addresses.wait_for(self._name, deadline_s=self._network.startup_deadline_s)
        consumed, final = 0, False
        try:
            while not final:
                try:
                    async with asyncio.timeout(idle_deadline_s):
                        if not pending.sequence:
                            await self._begin(pending)
                        part, final = await pending.take()
                except TimeoutError as error:
                    raise self._deadline_error(pending, "send the next part for", idle_deadline_s) from error
                yield checked(part, reply, asked=pending.message, by=self._name)
                consumed += 1
                if consumed % (STREAM_WINDOW // 2) == 0 and not pending.answered:
                    self._send("control", e.Grant(stamp=self._stamp(), sequence=pending.sequence, consumed=consumed))
        finally:
            self._end(pending)

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._unsubscribe()
        reason = f"the client of {self._my_name} towards {self._name} is closed"
        for credits in self._credits.values():
            credits.close(reason)
        for pending in list(self._outstanding.values()):
            pending.put(PeerLost(reason), final=True)
        if self._link is not None:
            linger_ms = 0
            if self._server is not None:
                self._send("control", e.Bye(stamp=self._stamp()))
                linger_ms = int(self._network.shutdown_deadline_s * 250)
            self._link.close(linger_ms=linger_ms)
            self._link = None

    def watch(self, elapsed_s: float) -> None:
        """Called once per heartbeat with the time watched since the last one."""
        if self._closed:
            return
        self._silent_s += elapsed_s
        if self._link is None:
            self._open()
        elif self._silent_s > self._network.peer_deadline_s:
            self._drop(f"silent for more than network.peer_deadline_s = {self._network.peer_deadline_s} s")
            self._open()
        elif self._server is not None:
            self._send("control", e.Heartbeat(stamp=self._stamp()))

    # ---- calls

    def _pending(self, message: Message, *, streamed: bool) -> Pending:
        return Pending(type(message).__name__, e.lane_of(message), codec.encode(message), streamed=streamed)

    def _credits_of(self, pending: Pending) -> Credits:
        # Streams have credits of their own: calls must get through when the streams of a suspended engine hold theirs.
        return self._credits["control" if pending.lane == "control" else "stream" if pending.streamed else "call"]

    async def _begin(self, pending: Pending) -> None:
        await self._credits_of(pending).acquire()
        pending.sequence = self._next_sequence
        self._next_sequence += 1
        self._outstanding[pending.sequence] = pending
        self._transmit(pending)

    def _transmit(self, pending: Pending) -> None:
        call = e.Call(stamp=self._stamp(), sequence=pending.sequence, streamed=pending.streamed)
        self._send(pending.lane, call, pending.frames)

    def _end(self, pending: Pending) -> None:
        if not pending.sequence:
            return
        self._outstanding.pop(pending.sequence, None)
        self._credits_of(pending).release()
        if not pending.answered:
            self._send("control", e.Cancel(stamp=self._stamp(), sequence=pending.sequence))

    def _deadline_error(self, pending: Pending, what: str, deadline_s: float) -> DeadlineError:
        return DeadlineError(f"{self._name} did not {what} {pending.message} within {deadline_s} s ({self._state})")

    # ---- connection

    def _on_address(self, address: Address) -> None:
        self._drop(f"it moved to {address.data}")
        self._open()

    def _open(self) -> None:
        address = self._addresses.get(self._name)
        if address is None or self._closed:
            return
        self._connection += 1
        self._silent_s = 0.0
        self._state = f"not connected to {address.data}"
        identity = f"{self._me}#{self._connection}".encode()
        self._link = Link(
            self._connect, address, identity, on_frames=self._on_frames, on_ended=self._on_ended, on_error=self._fail
        )
        self._greeted = list(self._outstanding)
        self._send(
            "control",
            e.Hello(stamp=self._stamp(), next_sequence=self._next_sequence, outstanding=self._greeted),
        )

    def _on_ended(self, link: Link, reason: str) -> None:
        if link is not self._link:
            return
        was_welcome = self._server is not None
        self._drop(reason)
        # Where it was never welcome the next heartbeat tries again, so that a refusal is not asked for in a hot loop.
        if was_welcome:
            self._open()

    def _drop(self, reason: str) -> None:
        """Give up the connection: streams end, calls stay outstanding for the next one."""
        if self._link is None:
            return
        self._link.close(linger_ms=0)
        self._counters["connections_lost"] += 1
        self._state = reason
        self._link = self._server = None
        for credits in self._credits.values():
            credits.set_limit(0)
        for pending in [p for p in self._outstanding.values() if p.streamed]:
            del self._outstanding[pending.sequence]
            pending.put(PeerLost(f"{self._name} was lost in the middle of {pending.message}: {reason}"), final=True)

    def _stamp(self) -> e.Stamp:
        acknowledged = next(iter(self._outstanding), self._next_sequence)
        return e.Stamp(self._run_id, self._me, self._connection, self._name, acknowledged)

    def _send(self, lane: e.Lane, envelope: e.Envelope, body: list[codec.Frame] | None = None) -> None:
        if self._link is not None:
            self._link.send(lane, [e.seal(envelope), *(body or ())])

    # ---- frames

    def _on_frames(self, frames: list[bytes]) -> None:
        try:
            envelope = e.open_from_server(frames[0])
        except TransportError:
            self._refuse("malformed")
            return
        reason = self._reason_to_refuse(envelope)
        if reason:
            self._refuse(reason)
            return
        self._silent_s = 0.0
        match envelope:
            case e.Welcome():
                self._take_welcome(envelope)
            case e.Part(sequence=sequence) | e.Reply(sequence=sequence):
                self._on_reply(sequence, frames[1:], final=isinstance(envelope, e.Reply))
            case e.Failure(sequence=sequence, kind=kind, text=text):
                if sequence in self._outstanding:
                    self._outstanding[sequence].put(RemoteError(kind, text), final=True)
            case e.Stranger():
                self._drop("it had forgotten this connection")
                self._open()
            case e.Heartbeat():
                pass

    def _reason_to_refuse(self, envelope: e.FromServer) -> str:
        stamp = envelope.stamp
        if stamp.run != self._run_id:
            return "other_run"
        if stamp.to != self._my_name or e.name_of(stamp.sender) != self._name:
            return "other_target"
        if self._link is None or stamp.connection != self._connection:
            return "older_connection"
        if isinstance(envelope, e.Welcome | e.Stranger):
            return "older_incarnation" if stamp.sender.incarnation < self._link.address.incarnation else ""
        return "" if stamp.sender == self._server else "unknown_connection"

    def _take_welcome(self, welcome: e.Welcome) -> None:
        if self._server is not None:
            return
        self._server = welcome.stamp.sender
        self._state = f"connected to {self._server}"
        known = set(self._greeted) - set(welcome.unknown)
        for pending in self._outstanding.values():
            if pending.sequence in known:
                self._send(pending.lane, e.Attach(stamp=self._stamp(), sequence=pending.sequence))
            else:
                self._counters["resends"] += 1
                self._transmit(pending)
        self._credits["control"].set_limit(CONTROL_CREDITS)
        self._credits["call"].set_limit(welcome.credits)
        self._credits["stream"].set_limit(welcome.credits)
        self._on_welcome()

    def _on_reply(self, sequence: int, body: list[bytes], *, final: bool) -> None:
        pending = self._outstanding.get(sequence)
        if pending is None:
            return  # cancelled meanwhile
        try:
            pending.put(codec.decode(body), final=final)
        except TransportError as error:
            self._refuse("malformed")
            pending.put(TransportError(f"{self._name} answered {pending.message} unreadably: {error}"), final=True)

    def _refuse(self, reason: str) -> None:
        self._counters[f"refused_{reason}"] += 1

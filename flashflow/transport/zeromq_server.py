"""The serving half of the ZeroMQ transport: two ROUTERs, a session per caller, a task per call.

Waits for: frames; the watch of its transport.   Unblocked by: callers.
Never: runs a handler twice for one sequence, or answers a caller of another run, an older incarnation or generation.
"""

import asyncio
from collections import Counter
from collections.abc import Callable
from functools import partial

import zmq

from flashflow.errors import ConfigError, ContractError, FlashflowError, TransportError
from flashflow.messages import Message
from flashflow.topology import GANG
from flashflow.transport import codec
from flashflow.transport import envelope as e
from flashflow.transport.addresses import Address
from flashflow.transport.channel import Handler, Peer, PeerLostHook
from flashflow.transport.codec import Frame
from flashflow.transport.parcels import unpack
from flashflow.transport.sessions import ServedCall, Session, age, wait_until_ended
from flashflow.transport.sockets import LoopSocket, PlainSocket

BindSocket = Callable[[str], PlainSocket]
"""Makes a ROUTER bound to the endpoint."""


class ZmqServer:
    """Serves one process's own role. Made on the running loop; bound from the start."""

    def __init__(
        self,
        me: Peer,
        run_id: str,
        interface: str,
        bind: BindSocket,
        handler: Handler,
        on_peer_lost: PeerLostHook,
        *,
        credits: int,
        counters: Counter[str],
        fail: Callable[[BaseException], None],
    ) -> None:
        self._me, self._name, self._run_id = me, e.name_of(me), run_id
        self._handler, self._on_peer_lost = handler, on_peer_lost
        self._credits, self._counters, self._fail = credits, counters, fail
        self._sessions: dict[str, Session] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._gang_generation = 0
        host = f"[{interface}]" if ":" in interface else interface
        sockets = {lane: bind(f"tcp://{host}:0") for lane in ("data", "control")}
        self.address = Address(
            data=_endpoint(sockets["data"]), control=_endpoint(sockets["control"]), incarnation=me.incarnation
        )
        self._control = LoopSocket(sockets["control"], partial(self._on_frames, "control"), fail)
        self._data = LoopSocket(sockets["data"], self._on_data, fail)

    def watch(self, elapsed_s: float, peer_deadline_s: float) -> None:
        """Count `elapsed_s` more seconds of silence for every caller; those past the deadline are lost."""
        for session in list(self._sessions.values()):
            session.silent_s += elapsed_s
            if session.silent_s > peer_deadline_s and not session.lost:
                self._lose(session)

    async def close(self, *, deadline_s: float, linger_ms: int) -> None:
        """Cancel every handler, wait for their ends, close the sockets. Raises DeadlineError when one does not end."""
        for session in self._sessions.values():
            session.lose()
        try:
            await wait_until_ended(self._tasks, deadline_s=deadline_s)
        finally:
            self._data.close(linger_ms=linger_ms)
            self._control.close(linger_ms=linger_ms)

    # ---- frames

    def _on_data(self, frames: list[bytes]) -> None:
        # What has arrived on control goes first, even when both sockets became readable in the same turn of the loop.
        self._control.drain()
        self._on_frames("data", frames)

    def _on_frames(self, lane: e.Lane, frames: list[bytes]) -> None:
        try:
            identity, parcel = frames
            messages = unpack(parcel)
        except (ValueError, TransportError):
            self._refuse("malformed")
            return
        for message in messages:
            self._on_message(lane, identity, message)

    def _on_message(self, lane: e.Lane, identity: bytes, frames: list[Frame]) -> None:
        try:
            first, *body = frames
            envelope = e.open_from_caller(first)
        except (ValueError, TransportError):
            self._refuse("malformed")
            return
        reason = self._reason_to_refuse(envelope.stamp)
        if reason:
            self._refuse(reason)
        elif isinstance(envelope, e.Hello):
            self._on_hello(envelope, identity)
        else:
            self._on_session_frame(lane, envelope, identity, body)

    def _reason_to_refuse(self, stamp: e.Stamp) -> str:
        sender = stamp.sender
        if stamp.run != self._run_id:
            return "other_run"
        if stamp.to != self._name:
            return "other_target"
        if sender.role in GANG:
            self._gang_generation = max(self._gang_generation, sender.generation)
            if sender.generation < self._gang_generation:
                return "older_generation"
        session = self._sessions.get(e.name_of(sender))
        if session is None:
            return ""
        if age(sender) < age(session.peer):
            return "older_incarnation"
        if sender == session.peer and stamp.connection < session.connection:
            return "older_connection"
        return ""

    def _on_hello(self, hello: e.Hello, identity: bytes) -> None:
        peer = hello.stamp.sender
        session = self._sessions.get(e.name_of(peer))
        if session is None or session.peer != peer:
            if session is not None and not session.lost:
                self._lose(session)
            session = self._sessions[e.name_of(peer)] = Session(peer)
        session.identity, session.connection = identity, hello.stamp.connection
        session.lost, session.silent_s = False, 0.0
        session.forget_below(hello.stamp.acknowledged)
        unknown = session.reconcile(hello.outstanding, hello.next_sequence)
        self._send(session, "control", e.Welcome(stamp=self._stamp(session), unknown=unknown, credits=self._credits))

    def _on_session_frame(self, lane: e.Lane, envelope: e.FromCaller, identity: bytes, body: list[Frame]) -> None:
        stamp = envelope.stamp
        session = self._sessions.get(e.name_of(stamp.sender))
        if session is None or session.lost or (session.peer, session.identity) != (stamp.sender, identity):
            self._refuse("unknown_connection")
            answer = e.Stamp(self._run_id, self._me, stamp.connection, e.name_of(stamp.sender), 0)
            self._control.send([e.seal(e.Stranger(stamp=answer))], identity)
            return
        session.silent_s = 0.0
        session.forget_below(stamp.acknowledged)
        match envelope:
            case e.Call():
                self._on_call(session, lane, envelope, body)
            case e.Attach(sequence=sequence):
                self._answer_again(session, session.calls.get(sequence))
            case e.Cancel(sequence=sequence):
                session.cancel(sequence)
            case e.Grant(sequence=sequence, consumed=consumed):
                if sequence in session.calls:
                    session.calls[sequence].grant(consumed)
            case e.Heartbeat():
                self._send(session, "control", e.Heartbeat(stamp=self._stamp(session)))
            case e.Bye():
                self._lose(session)
            case e.Hello():
                raise ContractError("a Hello is handled before its session is looked up")

    def _on_call(self, session: Session, lane: e.Lane, envelope: e.Call, body: list[Frame]) -> None:
        sequence = envelope.sequence
        if session.is_forgotten(sequence) or sequence in session.calls:
            self._counters["duplicates"] += 1
            self._answer_again(session, session.calls.get(sequence))
            return
        call = session.calls[sequence] = ServedCall(sequence, lane, streamed=envelope.streamed)
        try:
            message = codec.decode(body)
        except TransportError as error:
            self._refuse("malformed")
            self._answer_failure(session, call, error)
            return
        call.task = asyncio.create_task(
            self._serve(session, call, message), name=f"{type(message).__name__} {sequence} of {session.peer}"
        )
        self._tasks.add(call.task)
        call.task.add_done_callback(self._tasks.discard)

    # ---- calls

    async def _serve(self, session: Session, call: ServedCall, message: Message) -> None:
        try:
            reply = await self._handler(message, session.peer, partial(self._emit, session, call))
            body = codec.encode(reply)
        except asyncio.CancelledError:
            if call.is_running:  # nobody asked for it: the handler cancelled itself
                self._answer_failure(session, call, TransportError("the handler was cancelled"))
            raise
        except FlashflowError as error:
            self._answer_failure(session, call, error)
        except Exception as error:
            self._answer_failure(session, call, error)
            self._fail(error)
        else:
            self._answer(session, call, e.Reply, {}, body)

    async def _emit(self, session: Session, call: ServedCall, part: Message) -> None:
        if not call.streamed:
            raise ContractError(f"{type(part).__name__} emitted, but {session.peer} made a call, not a stream")
        frames = codec.encode(part)
        await call.take_slot()
        self._send(session, call.lane, e.Part(stamp=self._stamp(session), sequence=call.sequence), frames)

    def _answer_failure(self, session: Session, call: ServedCall, error: Exception) -> None:
        self._answer(session, call, e.Failure, {"kind": type(error).__name__, "text": str(error)}, [])

    def _answer(
        self,
        session: Session,
        call: ServedCall,
        kind: type[e.Reply] | type[e.Failure],
        fields: dict[str, str],
        body: list[Frame],
    ) -> None:
        call.answer, call.task = (kind, fields, body), None
        self._answer_again(session, call)
        if call.streamed:
            call.answer = None  # a stream is never asked for again

    def _answer_again(self, session: Session, call: ServedCall | None) -> None:
        if call is None or call.answer is None or session.lost:
            return
        kind, fields, body = call.answer
        self._send(session, call.lane, kind(stamp=self._stamp(session), sequence=call.sequence, **fields), body)

    # ---- peers

    def _lose(self, session: Session) -> None:
        session.lose()
        self._counters["peers_lost"] += 1
        self._on_peer_lost(session.peer)

    def _refuse(self, reason: str) -> None:
        self._counters[f"refused_{reason}"] += 1

    def _stamp(self, session: Session) -> e.Stamp:
        return e.Stamp(self._run_id, self._me, session.connection, e.name_of(session.peer), 0)

    def _send(self, session: Session, lane: e.Lane, envelope: e.Envelope, body: list[Frame] | None = None) -> None:
        frames = [e.seal(envelope), *(body or ())]
        if lane == "data":
            self._data.post(frames, session.identity)
        else:
            self._control.send(frames, session.identity)


def _endpoint(socket: PlainSocket) -> str:
    endpoint = socket.getsockopt_string(zmq.LAST_ENDPOINT)
    if "//0.0.0.0:" in endpoint or "//[::]:" in endpoint:
        raise ConfigError([f"network.interface: {endpoint} is no address others can connect to; name one interface"])
    return endpoint

"""The serving half of the in-process transport, and what lies between the two halves: wire and directory."""

import asyncio
from collections import Counter
from collections.abc import Callable
from functools import partial

from flashflow.errors import ContractError, FlashflowError, PeerLost, RemoteError, TransportError
from flashflow.messages import Message
from flashflow.transport import codec
from flashflow.transport.channel import Handler, Peer, PeerLostHook
from flashflow.transport.envelope import name_of
from flashflow.transport.outstanding import Pending
from flashflow.transport.sessions import ServedCall, age

Delay = Callable[[Peer, str, Message], float]
"""Seconds, >= 0, that a message (call, part or reply) takes from a process to the process named `role-index`."""


class Wire:
    """What happens to a message on its way."""

    def __init__(self, *, through_codec: bool, delay: Delay | None) -> None:
        self._through_codec = through_codec
        self._delay = delay
        self.delays = delay is not None

    def cross(self, message: Message) -> Message:
        """What the other end sees: a copy with read-only arrays. Raises TransportError where the encoder does."""
        return codec.decode([bytes(frame) for frame in codec.encode(message)]) if self._through_codec else message

    async def travel(self, sender: Peer, receiver: str, message: Message) -> None:
        if self._delay is not None:
            await asyncio.sleep(self._delay(sender, receiver, message))


class Endpoint:
    """One process that serves. It dies by `close`, and another incarnation is another Endpoint."""

    def __init__(
        self,
        peer: Peer,
        wire: Wire,
        handler: Handler,
        on_peer_lost: PeerLostHook,
        *,
        counters: Counter[str],
        fail: Callable[[BaseException], None],
    ) -> None:
        self.peer, self.closed = peer, False
        self._wire, self._handler, self._on_peer_lost = wire, handler, on_peer_lost
        self._counters, self._fail = counters, fail
        self._callers: dict[str, Peer] = {}
        self._between: dict[Peer, str] = {}
        """` of <caller> at <server>`, for names of tasks."""
        self._running: dict[asyncio.Task[None], tuple[Peer, Pending, ServedCall]] = {}

    def start(self, caller: Peer, message: Message, pending: Pending) -> ServedCall:
        """Run the handler as a task; what it replies arrives in `pending`. An outdated caller never gets an answer."""
        call = ServedCall(0, "data", streamed=pending.streamed)
        if caller not in self._between and not self._introduce(caller):
            self._counters["refused_older_incarnation"] += 1
            return call
        task = asyncio.create_task(
            self._serve(caller, message, pending, call), name=pending.message + self._between[caller]
        )
        call.task = task
        self._running[task] = (caller, pending, call)
        task.add_done_callback(self._ended)
        return call

    def _introduce(self, caller: Peer) -> bool:
        """False for one that a newer incarnation has replaced."""
        known = self._callers.get(name_of(caller))
        if known is not None and age(caller) < age(known):
            return False
        if known is not None and known != caller:
            self.lose(known)
        self._callers[name_of(caller)] = caller
        self._between[caller] = f" of {caller} at {self.peer}"
        return True

    def lose(self, caller: Peer) -> None:
        """The caller died or left."""
        if self.closed or self._callers.get(name_of(caller)) != caller:
            return
        del self._callers[name_of(caller)], self._between[caller]
        for peer, _, call in self._running.values():
            if peer == caller:
                call.cancel()
        self._counters["peers_lost"] += 1
        self._on_peer_lost(caller)

    def close(self) -> list[asyncio.Task[None]]:
        """Die: handlers are cancelled, their callers see the loss. Returns the tasks that are still ending."""
        self.closed = True
        for _, pending, call in self._running.values():
            pending.put(PeerLost(f"{self.peer} was lost in the middle of {pending.message}"), final=True)
            call.cancel()
        return list(self._running)

    def _ended(self, task: asyncio.Task[None]) -> None:
        del self._running[task]

    async def _serve(self, caller: Peer, message: Message, pending: Pending, call: ServedCall) -> None:
        receiver = name_of(caller)
        try:
            if self._wire.delays:
                await self._wire.travel(caller, name_of(self.peer), message)
            answer = await self._handler(message, caller, partial(self._emit, receiver, pending, call))
            reply = self._wire.cross(answer)
            if self._wire.delays:
                await self._wire.travel(self.peer, receiver, reply)
        except asyncio.CancelledError:
            if call.is_running:  # nobody asked for it: the handler cancelled itself
                pending.put(_failure(TransportError("the handler was cancelled")), final=True)
            raise
        except FlashflowError as error:
            pending.put(_failure(error), final=True)
        except Exception as error:
            pending.put(_failure(error), final=True)
            self._fail(error)
        else:
            pending.put(reply, final=True)

    async def _emit(self, receiver: str, pending: Pending, call: ServedCall, part: Message) -> None:
        if not call.streamed:
            raise ContractError(f"{type(part).__name__} emitted, but {receiver} made a call, not a stream")
        part = self._wire.cross(part)
        await call.take_slot()
        await self._wire.travel(self.peer, receiver, part)
        pending.put(part, final=False)


class Directory:
    """The living endpoints by `role-index`."""

    def __init__(self) -> None:
        self._endpoints: dict[str, Endpoint] = {}
        self._changes: dict[str, asyncio.Event] = {}

    def open(self, endpoint: Endpoint) -> None:
        """It replaces an older incarnation. Raises ContractError when it is not newer itself."""
        name = name_of(endpoint.peer)
        known = self._endpoints.get(name)
        if known is not None:
            if age(endpoint.peer) <= age(known.peer):
                raise ContractError(f"{endpoint.peer} cannot serve after {known.peer}: incarnations only go up")
            known.close()
        self._endpoints[name] = endpoint
        self.wake(name)

    def has_seen(self, name: str) -> bool:
        return name in self._endpoints

    def find(self, name: str) -> Endpoint | None:
        endpoint = self._endpoints.get(name)
        return None if endpoint is None or endpoint.closed else endpoint

    async def change(self, name: str) -> None:
        """Wait until there may be news of `name`."""
        await self._changes.setdefault(name, asyncio.Event()).wait()

    def wake(self, name: str) -> None:
        """Let everyone who waits for a change of `name` look again."""
        change = self._changes.pop(name, None)
        if change is not None:
            change.set()

    def leave(self, caller: Peer) -> None:
        for endpoint in self._endpoints.values():
            endpoint.lose(caller)


def _failure(error: Exception) -> RemoteError:
    return RemoteError(type(error).__name__, str(error))

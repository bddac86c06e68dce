"""The calling half of the in-process transport: one client per process called."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator

from flashflow.errors import DeadlineError, PeerLost
from flashflow.messages import Message
from flashflow.transport.channel import Peer, ReplyT
from flashflow.transport.in_process_server import Directory, Endpoint, Wire
from flashflow.transport.outstanding import Pending, checked
from flashflow.transport.sessions import ServedCall


class InProcessClient:
    def __init__(
        self,
        me: Peer,
        name: str,
        wire: Wire,
        directory: Directory,
        *,
        startup_deadline_s: float,
        counters: Counter[str],
    ) -> None:
        self._me, self._name, self._wire, self._directory = me, name, wire, directory
        self._startup_deadline_s, self._counters = startup_deadline_s, counters
        self._outstanding: set[Pending] = set()
        self._closed = False

    async def call(
        self, message: Message, reply: type[ReplyT] | tuple[type[ReplyT], ...], *, deadline_s: float
    ) -> ReplyT:
        message = self._wire.cross(message)
        await self._first_appearance()
        try:
            async with asyncio.timeout(deadline_s):
                answer = await self._answer(message)
        except TimeoutError as error:
            raise DeadlineError(
                f"{self._name} did not answer {type(message).__name__} within {deadline_s} s"
            ) from error
        return checked(answer, reply, asked=type(message).__name__, by=self._name)

    async def stream(self, message: Message, reply: type[ReplyT], *, idle_deadline_s: float) -> AsyncIterator[ReplyT]:
        message = self._wire.cross(message)
        if not self._directory.has_seen(self._name):
            await self._first_appearance()
        pending, call = self._pending(message, streamed=True), None
        consumed, final = 0, False
        try:
            while not final:
                try:
                    if call is None:
                        endpoint = await self._endpoint_within(idle_deadline_s)
                        call = endpoint.start(self._me, message, pending)
                    part, final = await pending.take(idle_deadline_s)
                except TimeoutError as error:
                    raise DeadlineError(
                        f"{self._name} did not send the next part for {pending.message} within {idle_deadline_s} s"
                    ) from error
                yield checked(part, reply, asked=pending.message, by=self._name)
                consumed += 1
                call.grant(consumed)
        finally:
            self._end(pending, call)

    async def close(self) -> None:
        self._closed = True
        self._directory.wake(self._name)
        for pending in self._outstanding:
            pending.put(self._closed_error(), final=True)

    async def _answer(self, message: Message) -> Message:
        """One attempt per incarnation of the other end."""
        while True:
            endpoint = await self._endpoint()
            pending = self._pending(message, streamed=False)
            call = endpoint.start(self._me, message, pending)
            try:
                return (await pending.take())[0]
            except PeerLost:
                if self._closed or not endpoint.closed:
                    raise
                self._counters["resends"] += 1
            finally:
                self._end(pending, call)

    async def _first_appearance(self) -> None:
        if self._directory.has_seen(self._name):
            return
        try:
            async with asyncio.timeout(self._startup_deadline_s):
                await self._endpoint()
        except TimeoutError as error:
            raise DeadlineError(
                f"{self._name} did not listen within network.startup_deadline_s = {self._startup_deadline_s} s"
            ) from error

    async def _endpoint_within(self, seconds: float) -> Endpoint:
        """Raises TimeoutError."""
        endpoint = self._directory.find(self._name)
        if endpoint is not None and not self._closed:
            return endpoint
        async with asyncio.timeout(seconds):
            return await self._endpoint()

    async def _endpoint(self) -> Endpoint:
        while not self._closed:
            endpoint = self._directory.find(self._name)
            if endpoint is not None:
                return endpoint
            await self._directory.change(self._name)
        raise self._closed_error()

    def _pending(self, message: Message, *, streamed: bool) -> Pending:
        pending = Pending(type(message).__name__, "data", [], streamed=streamed)
        self._outstanding.add(pending)
        return pending

    def _end(self, pending: Pending, call: ServedCall | None) -> None:
        self._outstanding.discard(pending)
        if call is not None and not pending.answered:
            call.cancel()

    def _closed_error(self) -> PeerLost:
        return PeerLost(f"the client of {self._me} towards {self._name} is closed")

"""A caller's side of its calls: what is outstanding, and how much may be."""

import asyncio
from collections import deque

from flashflow.errors import FlashflowError, PeerLost, TransportError
from flashflow.messages import Message
from flashflow.transport.channel import ReplyT
from flashflow.transport.codec import Frame
from flashflow.transport.envelope import Lane


class Pending:
    """One call or stream that waits for its answer."""

    def __init__(self, message: str, lane: Lane, frames: list[Frame], *, streamed: bool) -> None:
        self.message = message
        """Its type's name, for errors."""
        self.lane: Lane = lane
        self.frames = frames
        self.streamed = streamed
        self.sequence = 0
        """From 1; 0 until it has got a credit and is sent."""
        self.answered = False
        """The final reply, or a failure, has come."""
        self._items: deque[Message | FlashflowError] = deque()
        self._taker: asyncio.Future[None] | None = None

    def put(self, item: Message | FlashflowError, *, final: bool) -> None:
        if not self.answered:
            self.answered = final
            self._add(item)

    def expire(self, error: FlashflowError) -> None:
        """What waits for it waits no longer; it stays unanswered. A reply that is there already was in time."""
        if not self._items:
            self._add(error)

    async def take(self, within_s: float | None = None) -> tuple[Message, bool]:
        """The next reply and whether it is the last. One may wait at a time.

        Raises what the call failed with, and TimeoutError.
        """
        if not self._items:
            loop = asyncio.get_running_loop()
            self._taker = loop.create_future()
            timer = None if within_s is None else loop.call_later(within_s, _give_up, self._taker)
            try:
                await self._taker
            finally:
                self._taker = None
                if timer is not None:
                    timer.cancel()
        item = self._items.popleft()
        if isinstance(item, FlashflowError):
            raise item
        return item, self.answered and not self._items

    def _add(self, item: Message | FlashflowError) -> None:
        self._items.append(item)
        if self._taker is not None and not self._taker.done():
            self._taker.set_result(None)


def _give_up(taker: asyncio.Future[None]) -> None:
    if not taker.done():
        taker.set_exception(TimeoutError())


class Credits:
    """How many calls may be outstanding at once. Waiters are served in order; the limit dies with the connection."""

    def __init__(self) -> None:
        self._limit = 0
        self._used = 0
        self._closed = ""
        self._waiting: deque[asyncio.Future[None]] = deque()

    def acquire_now(self) -> bool:
        """Takes a credit if none needs to be waited for. Raises PeerLost when the client is closed."""
        if self._closed:
            raise PeerLost(self._closed)
        if self._used < self._limit and not self._waiting:
            self._used += 1
            return True
        return False

    async def acquire(self) -> None:
        """Waits for a credit. Raises PeerLost when the client is closed."""
        if self.acquire_now():
            return
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(waiter)
        try:
            await waiter
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled() and waiter.exception() is None:
                self.release()  # the credit came together with the cancellation
            else:
                self._waiting = deque(other for other in self._waiting if other is not waiter)
            raise

    def release(self) -> None:
        self._used -= 1
        self._hand_out()

    def set_limit(self, limit: int) -> None:
        self._limit = limit
        self._hand_out()

    def close(self, reason: str) -> None:
        self._closed = reason
        while self._waiting:
            waiter = self._waiting.popleft()
            if not waiter.done():
                waiter.set_exception(PeerLost(reason))

    def _hand_out(self) -> None:
        while self._waiting and self._used < self._limit:
            waiter = self._waiting.popleft()
            if not waiter.done():
                self._used += 1
                waiter.set_result(None)


def checked(answer: Message, reply: type[ReplyT] | tuple[type[ReplyT], ...], *, asked: str, by: str) -> ReplyT:
    """The answer, as one of the types the caller expects. Raises TransportError."""
    if not isinstance(answer, reply):
        expected = " or ".join(kind.__name__ for kind in (reply if isinstance(reply, tuple) else (reply,)))
        raise TransportError(f"{by} answered {asked} with {type(answer).__name__}, expected {expected}")
    return answer

"""The one pattern of the fleet: a call, answered once, perhaps streamed. Implemented by zeromq.py and in_process.py.

Waits for: nothing; it defines protocols only.
"""

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Protocol, TypeVar

import msgspec

from flashflow.messages import Message

ReplyT = TypeVar("ReplyT", bound=Message)


class Peer(msgspec.Struct, frozen=True):
    """Who called. Identity = role-index-incarnation, never reused."""

    role: str
    index: int
    incarnation: int
    generation: int = 0
    """Gang generation; 0 for the fleet."""

    def __str__(self) -> str:
        return f"{self.role}-{self.index}-{self.incarnation}"


Emit = Callable[[Message], Awaitable[None]]
"""Sends a partial reply of a streamed call; waits when the connection is full."""

Handler = Callable[[Message, Peer, Emit], Awaitable[Message]]
"""Serves one call and returns its final reply. Runs as a task of its own; it is cancelled when the caller cancels or
dies. A FlashflowError it raises reaches the caller as RemoteError; any other exception too, and also stops the role."""

PeerLostHook = Callable[[Peer], None]


class Client(Protocol):
    """One role's end towards one process of another role."""

    async def call(
        self, message: Message, reply: type[ReplyT] | tuple[type[ReplyT], ...], *, deadline_s: float
    ) -> ReplyT:
        """Raises DeadlineError (names peer and message), PeerLost, RemoteError. Cancelling it cancels the handler.

        Survives a restart of the other end: unanswered calls are sent again to its next incarnation.
        """
        ...

    def stream(self, message: Message, reply: type[ReplyT], *, idle_deadline_s: float) -> AsyncIterator[ReplyT]:
        """Partial replies, then the final one as the last item; `idle_deadline_s` between two items.

        Never sent again by itself: PeerLost when the other end dies in mid-stream.
        """
        ...

    async def close(self) -> None: ...


class Transport(Protocol):
    """What a role process has of the world. `names` are `role-index`, e.g. `engine-1`."""

    async def listen(self, handler: Handler, on_peer_lost: PeerLostHook) -> None:
        """Serve this process's own role."""
        ...

    def client(self, name: str) -> Client:
        """The (cached) client towards process `name`."""
        ...

    async def close(self) -> None: ...

"""What a server remembers of its callers: one session per caller process, one entry per call that may be repeated.

Pure bookkeeping: no sockets. Entries below the caller's cumulative acknowledgement are dropped, so memory is bounded
by the calls a caller may have outstanding.
"""

import asyncio
from collections.abc import Collection, Iterable

from flashflow.errors import DeadlineError
from flashflow.transport.channel import Peer
from flashflow.transport.codec import Frame
from flashflow.transport.envelope import Failure, Lane, Reply

STREAM_WINDOW = 32
"""Parts of one stream that may be under way; then Emit waits for the caller to take them."""


def age(peer: Peer) -> tuple[int, int]:
    """Orders the processes that have borne one name."""
    return peer.generation, peer.incarnation


async def wait_until_ended(tasks: Collection[asyncio.Task[None]], *, deadline_s: float) -> None:
    """Wait for cancelled handlers. Raises DeadlineError naming those that go on."""
    if not tasks:
        return
    _, late = await asyncio.wait(tasks, timeout=deadline_s)
    if late:
        names = ", ".join(sorted(task.get_name() for task in late))
        raise DeadlineError(f"not ended within network.shutdown_deadline_s = {deadline_s} s of cancelling: {names}")


class ServedCall:
    """One sequence of one caller: running, answered, or ended without an answer (cancelled, or a finished stream)."""

    def __init__(self, sequence: int, lane: Lane, *, streamed: bool) -> None:
        self.sequence = sequence
        self.lane: Lane = lane
        self.streamed = streamed
        self.task: asyncio.Task[None] | None = None
        """The running handler; None before it starts and once it has ended or was told to."""
        self.answer: tuple[type[Reply] | type[Failure], dict[str, str], list[Frame]] | None = None
        """Envelope type, its own fields, message frames: what a repeated call is answered with."""
        self._parts_sent = 0
        self._parts_taken = 0
        self._room = asyncio.Event()

    @property
    def is_running(self) -> bool:
        return self.task is not None

    @property
    def is_dead(self) -> bool:
        """It will never be answered."""
        return self.task is None and self.answer is None

    def cancel(self) -> None:
        """End the handler; the entry stays, so that a late copy of the call starts nothing."""
        if self.task is not None:
            self.task.cancel()
            self.task = None

    async def take_slot(self) -> None:
        """Wait until one more part may be sent, and count it."""
        while self._parts_sent - self._parts_taken >= STREAM_WINDOW:
            self._room.clear()
            await self._room.wait()
        self._parts_sent += 1

    def grant(self, consumed: int) -> None:
        self._parts_taken = max(self._parts_taken, consumed)
        self._room.set()


class Session:
    """One caller process, over all its connections."""

    def __init__(self, peer: Peer) -> None:
        self.peer = peer
        self.identity = b""
        """Routing id of its present connection, the same on both sockets."""
        self.connection = -1
        self.lost = False
        self.silent_s = 0.0
        """Watched time since its last frame."""
        self.calls: dict[int, ServedCall] = {}
        self._floor = 0

    def forget_below(self, acknowledged: int) -> None:
        if acknowledged <= self._floor:
            return
        self._floor = acknowledged
        for sequence in [s for s in self.calls if s < acknowledged]:
            self.calls.pop(sequence).cancel()

    def is_forgotten(self, sequence: int) -> bool:
        """Its answer was received, or is not wanted any more."""
        return sequence < self._floor

    def cancel(self, sequence: int) -> None:
        if self.is_forgotten(sequence):
            return
        # A cancellation overtakes its call: the entry made here keeps the call from starting when it comes.
        call = self.calls.setdefault(sequence, ServedCall(sequence, "data", streamed=False))
        call.cancel()

    def reconcile(self, outstanding: Iterable[int], next_sequence: int) -> list[int]:
        """After a Hello: cancel what is not wanted, return the outstanding sequences that must be sent again."""
        wanted = set(outstanding)
        for sequence, call in self.calls.items():
            if sequence < next_sequence and sequence not in wanted:
                call.cancel()
        unknown = [s for s in sorted(wanted) if s not in self.calls or self.calls[s].is_dead]
        for sequence in unknown:
            self.calls.pop(sequence, None)
        return unknown

    def lose(self) -> None:
        """The caller is gone: cancel its handlers, keep its answers in case it was only silent."""
        self.lost = True
        for call in self.calls.values():
            call.cancel()

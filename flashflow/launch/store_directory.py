"""The directory over torchrun's store: one thread per slot reads and writes it, so that the loop never waits for it.

    news/<slot>/<n>   what slot said, from 1      count/<slot>  how many         beat/<slot>  alive
    changes           rises with every write      gang          generation       over         the end

Lists of one slot each have no holes when their writer dies between two writes. A store whose answers stay away, as when
a link is cut, is noticed by the loop, for its thread may hang in the socket for minutes.
"""

import asyncio
import contextlib
import queue
import threading
import time
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING

import msgspec

from flashflow.errors import PeerLost
from flashflow.launch.directory import ANY_NEWS, Asked, GangAdvanced, Gathers, Over, Placed, Said, Signalled

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

POLL_S = 0.1
KEPT_NEWS = 4096
"""Older news of a slot are deleted: every slot has read them long since, or is lost."""
LEAVE_S = 5.0
"""So long slot 0, on whose host the store may lie, waits at the end for the others to hear of it."""
CLOSE_S = 2.0
"""A last write may take so long."""


class StoreDirectory:
    """Made on the running loop."""

    def __init__(self, store: "Store", *, slot: int, names: list[str], heartbeat_s: float, deadline_s: float) -> None:
        """names: of all slots, for a person, in the order of their numbers. deadline_s: of silence."""
        self._store = store
        self._slot = slot
        self._names = names
        self._heartbeat_s = heartbeat_s
        self._deadline_s = deadline_s
        self._loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[ANY_NEWS] = asyncio.Queue()
        self._tasks: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._decoder: msgspec.json.Decoder[ANY_NEWS] = msgspec.json.Decoder(ANY_NEWS)
        self._read = [0] * len(names)
        self._written = 0
        self._changes = -1
        self._registers = {"gang": b"", "over": b""}
        self._beats = [b""] * len(names)
        self._beat_at = [time.monotonic()] * len(names)
        self._next_beat = 0.0
        self._answered_at = time.monotonic()
        self._failure: BaseException | None = None
        self.cut_off = False
        """This slot reaches no other."""
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="directory", daemon=True)
        self._thread.start()

    def post(self, news: Placed | Gathers | Said | Signalled | Asked) -> None:
        self._queue.put_nowait(news)
        self._tasks.put(lambda: self._append(news))

    async def news(self) -> AsyncIterator[ANY_NEWS]:
        while True:
            yield await self._queue.get()

    async def advance_gang(self, generation: int, reason: str) -> bool:
        advanced = GangAdvanced(generation=generation + 1, reason=reason)
        won: asyncio.Future[bool] = self._loop.create_future()

        def decide() -> None:
            first = self._decide("gang", advanced, lambda found: _generation(found) == generation)
            self._loop.call_soon_threadsafe(won.set_result, first)

        self._tasks.put(decide)
        return await won

    def end(self, over: Over) -> None:
        def decide() -> None:
            self._decide("over", over, lambda found: not found)

        self._tasks.put(decide)

    async def watch(self) -> None:
        while True:
            await asyncio.sleep(self._heartbeat_s / 2)
            if self._failure is not None:
                self.cut_off = True
                raise PeerLost(f"torchrun's store failed: {self._failure}") from self._failure
            now = time.monotonic()
            if now - self._answered_at > self._deadline_s:
                self.cut_off = True
                raise PeerLost(
                    f"torchrun's store has not answered for network.peer_deadline_s = {self._deadline_s:g} s: "
                    f"{self._names[self._slot]} is cut off, or the host of rank 0 is gone"
                )
            # As of the thread's last look: when it was late itself, the others were not silent.
            looked_at = self._answered_at
            silent = [
                name for name, at in zip(self._names, self._beat_at, strict=True) if looked_at - at > self._deadline_s
            ]
            if silent:
                raise PeerLost(
                    f"{', '.join(silent)} gave no sign of life for network.peer_deadline_s = {self._deadline_s:g} s"
                )

    async def close(self) -> Over | None:
        self._closing.set()
        await asyncio.to_thread(self._thread.join, LEAVE_S + CLOSE_S)
        over = self._registers["over"]
        return msgspec.json.decode(over, type=Over) if over else None

    # ---- on the thread

    def _run(self) -> None:
        try:
            self._store.set(f"count/{self._slot}", "0")
            while not (self._closing.is_set() and self._tasks.empty()):
                self._work()
                self._look()
                self._answered_at = time.monotonic()
            self._leave()
        except Exception as error:
            self._failure = error

    def _work(self) -> None:
        """What the loop wants done, or a short rest."""
        with contextlib.suppress(queue.Empty):
            self._tasks.get(timeout=0 if self._closing.is_set() else POLL_S)()
            while True:
                self._tasks.get_nowait()()

    def _leave(self) -> None:
        self._store.add("left", 1)
        ends = time.monotonic() + LEAVE_S
        while self._slot == 0 and self._store.add("left", 0) < len(self._names) and time.monotonic() < ends:
            time.sleep(POLL_S)

    def _append(self, news: ANY_NEWS) -> None:
        self._written += 1
        self._store.set(f"news/{self._slot}/{self._written}", _text(news))
        self._store.set(f"count/{self._slot}", str(self._written))
        self._store.add("changes", 1)
        if self._written > KEPT_NEWS:
            self._store.delete_key(f"news/{self._slot}/{self._written - KEPT_NEWS}")

    def _decide(self, register: str, news: GangAdvanced | Over, may: Callable[[bytes], bool]) -> bool:
        """Writes `news` if what the register holds allows it, and nobody else has written meanwhile."""
        found = self._register(register)
        if not may(found):
            return False
        mine = _text(news)
        first = bytes(self._store.compare_set(register, found.decode(), mine)) == mine.encode()
        self._store.add("changes", 1)
        return first

    def _register(self, name: str) -> bytes:
        return bytes(self._store.get(name)) if self._store.check([name]) else b""

    def _look(self) -> None:
        self._beat()
        changes = self._store.add("changes", 0)
        if changes == self._changes:
            return
        self._changes = changes
        for register, before in self._registers.items():
            found = self._register(register)
            if found != before:
                self._registers[register] = found
                self._tell(found)
        for slot in range(len(self._names)):
            if slot != self._slot and self._store.check([f"count/{slot}"]):
                count = int(self._store.get(f"count/{slot}"))
                for number in range(self._read[slot] + 1, count + 1):
                    self._tell(self._store.get(f"news/{slot}/{number}"))
                self._read[slot] = count

    def _beat(self) -> None:
        """Shows that this slot lives. Slot 0 listens to all, the others to slot 0."""
        now = time.monotonic()
        if now < self._next_beat:
            self._beat_at[self._slot] = now
            return
        self._next_beat = now + self._heartbeat_s
        self._store.set(f"beat/{self._slot}", str(now))
        watched = range(len(self._names)) if self._slot == 0 else range(1)
        for slot in watched:
            beat = bytes(self._register(f"beat/{slot}"))
            if beat != self._beats[slot]:
                self._beats[slot], self._beat_at[slot] = beat, now
        for slot in set(range(len(self._names))) - set(watched):
            self._beat_at[slot] = now

    def _tell(self, payload: bytes) -> None:
        self._loop.call_soon_threadsafe(self._queue.put_nowait, self._decoder.decode(payload))


def _text(news: ANY_NEWS) -> str:
    return msgspec.json.encode(news).decode()


def _generation(register: bytes) -> int:
    return msgspec.json.decode(register, type=GangAdvanced).generation if register else 1

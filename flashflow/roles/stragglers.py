"""The deadline of groups: rollout.straggler_deadline_s from a group's first attempt on, while engines decode."""

from collections import OrderedDict
from collections.abc import Callable

from flashflow.clock import Clock
from flashflow.roles.signal import Signal


class Stragglers:
    """Its clock stands still while engines sleep, drain or update."""

    def __init__(self, deadline_s: float | None, clock: Clock, end: Callable[[int], None]) -> None:
        """`end` is called with every group whose deadline has come; None: it never comes."""
        self._deadline_s = deadline_s
        self._clock = clock
        self._end = end
        self._started: OrderedDict[int, float] = OrderedDict()
        """Group -> reading of the stopped clock at its start; in the order of their deadlines."""
        self._paused_at: float | None = None
        self._paused_s = 0.0
        self._news = Signal()

    def __len__(self) -> int:
        return len(self._started)

    def start(self, group: int) -> None:
        """An attempt at it begins; only the first counts."""
        if self._deadline_s is not None and group not in self._started:
            self._started[group] = self._now()
            self._news.notify()

    def forget(self, group: int) -> None:
        """It has ended, or is complete."""
        self._started.pop(group, None)

    def pause(self, paused: bool) -> None:
        now = self._clock.now()
        if paused and self._paused_at is None:
            self._paused_at = now
        elif not paused and self._paused_at is not None:
            self._paused_s += now - self._paused_at
            self._paused_at = None
            self._news.notify()

    async def run(self) -> None:
        """For ever; raises what `end` raises."""
        while True:
            while (remaining_s := self._remaining_s()) is not None and remaining_s <= 0:
                self._end(self._started.popitem(last=False)[0])
            await self._news.wait(remaining_s)

    def _now(self) -> float:
        """Seconds in which engines decoded."""
        return (self._paused_at if self._paused_at is not None else self._clock.now()) - self._paused_s

    def _remaining_s(self) -> float | None:
        """Until the next deadline; None while there is nothing to wait for but news."""
        if self._deadline_s is None or not self._started or self._paused_at is not None:
            return None
        return next(iter(self._started.values())) + self._deadline_s - self._now()

"""Deadlines of calls under way, each at the price of a dictionary entry and not of a timer.

Calls with the same number of seconds expire in the order in which they began, so one timer serves all of them.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Deadlines(Generic[T]):
    """`on_expired` is called with what was added, at its deadline, unless it was taken out before."""

    def __init__(self, on_expired: Callable[[T, float], None]) -> None:
        """on_expired: gets the seconds too."""
        self._on_expired = on_expired
        self._due: dict[float, OrderedDict[T, float]] = {}
        """Seconds -> what waits so long, in order, and until when. A timer runs for each."""

    def __len__(self) -> int:
        return sum(map(len, self._due.values()))

    def add(self, item: T, seconds: float) -> None:
        loop = asyncio.get_running_loop()
        until = loop.time() + seconds
        if seconds not in self._due:
            self._due[seconds] = OrderedDict()
            loop.call_at(until, self._look, seconds)
        self._due[seconds][item] = until

    def remove(self, item: T, seconds: float) -> None:
        """Nothing happens when it is not there."""
        if seconds in self._due:
            self._due[seconds].pop(item, None)

    def _look(self, seconds: float) -> None:
        loop, due = asyncio.get_running_loop(), self._due[seconds]
        now = loop.time()
        while due and (until := next(iter(due.values()))) <= now:
            item, _ = due.popitem(last=False)
            self._on_expired(item, seconds)
        if due:
            loop.call_at(until, self._look, seconds)
        else:
            del self._due[seconds]

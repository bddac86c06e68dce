"""What the simulated parts tell of their time: who did what from when to when; and its trace for Perfetto."""

import json
import math
from array import array
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple, Protocol


class Spans(Protocol):
    def add(self, role: str, lane: int, name: str, start: float, end: float) -> None:
        """role: name of the process, e.g. `engine-0`. lane: what of it was busy, e.g. a slot. Seconds on its clock."""
        ...


class Unheard:
    """Nobody listens."""

    def add(self, role: str, lane: int, name: str, start: float, end: float) -> None: ...


class Span(NamedTuple):
    """One stretch of work."""

    role: str
    lane: int
    name: str
    start: float
    end: float


class Recorder:
    """Keeps the first spans for the trace, and of all of them when they were."""

    def __init__(self, max_spans: int) -> None:
        self._max_spans = max_spans
        self.spans: list[Span] = []
        self._closed = False
        self._busy: defaultdict[str, array[float]] = defaultdict(lambda: array("d"))
        """Role -> start, end, start, end, ..."""

    def add(self, role: str, lane: int, name: str, start: float, end: float) -> None:
        if self._closed:
            return
        if len(self.spans) < self._max_spans:
            self.spans.append(Span(role, lane, name, start, end))
        self._busy[role].extend((start, end))

    def close(self) -> None:
        """What ends from now on was cut off."""
        self._closed = True

    def lane_seconds(self, kind: str, since: float = 0.0, until: float = math.inf) -> float:
        """Busy seconds between the two of all lanes of the roles `kind`-0, `kind`-1, ... together."""
        return sum(
            max(0.0, min(end, until) - max(start, since))
            for role in self._of(kind)
            for start, end in self._stretches(role)
        )

    def busy_seconds(self, kind: str, since: float = 0.0, until: float = math.inf) -> float:
        """The same, but a role that is busy with several things counts once."""
        return sum(_union(sorted(self._stretches(role)), since, until) for role in self._of(kind))

    def _of(self, kind: str) -> Iterator[str]:
        return (role for role in sorted(self._busy) if role.rpartition("-")[0] == kind)

    def _stretches(self, role: str) -> Iterable[tuple[float, float]]:
        busy = self._busy[role]
        return zip(busy[::2], busy[1::2], strict=True)


def write_trace(path: Path, spans: Iterable[Span]) -> None:
    """In Chrome's trace format, one process per role and one thread per lane; times in microseconds."""
    events: list[dict[str, object]] = []
    numbers: dict[str, int] = {}
    for span in spans:
        if span.role not in numbers:
            numbers[span.role] = len(numbers)
            name = {"name": "process_name", "ph": "M", "pid": numbers[span.role], "args": {"name": span.role}}
            events.append(name)
        events.append(
            {
                "name": span.name,
                "ph": "X",
                "pid": numbers[span.role],
                "tid": span.lane,
                "ts": round(span.start * 1e6),
                "dur": round((span.end - span.start) * 1e6),
            }
        )
    path.write_text(json.dumps({"traceEvents": events}, separators=(",", ":")), encoding="utf-8")


def _union(stretches: Iterable[tuple[float, float]], since: float, until: float) -> float:
    """Length of the union of stretches in order of their starts, of what of it lies between the two."""
    total, reached = 0.0, since
    for start, end in stretches:
        if (end := min(end, until)) > max(start, reached):
            total += end - max(start, reached)
            reached = end
    return total

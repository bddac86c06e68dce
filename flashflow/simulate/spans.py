"""What the simulated parts tell of their time: who did what from when to when."""

from typing import Protocol


class Spans(Protocol):
    def add(self, role: str, lane: int, name: str, start: float, end: float) -> None:
        """role: name of the process, e.g. `engine-0`. lane: what of it was busy, e.g. a slot. Seconds on its clock."""
        ...


class Unheard:
    """Nobody listens."""

    def add(self, role: str, lane: int, name: str, start: float, end: float) -> None: ...

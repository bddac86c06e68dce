"""A journal that forgets: for simulations, where there is nothing to recover and the disk would set the pace."""

from collections.abc import Set
from pathlib import Path

from flashflow.config.sections import JournalSection
from flashflow.journal.offload import Offload, in_place
from flashflow.ledger import Ledger, Rules
from flashflow.ledger import events as e
from flashflow.ledger.events import Location
from flashflow.records import Trajectory

SEGMENT_TRAJECTORIES = 256
"""Trajectories that are forgotten together."""


class MemoryPayloads:
    def __init__(self) -> None:
        self._segments: list[list[Trajectory]] = [[]]

    def append(self, trajectory: Trajectory) -> Location:
        if len(self._segments[-1]) == SEGMENT_TRAJECTORIES:
            self._segments.append([])
        self._segments[-1].append(trajectory)
        return Location(len(self._segments) - 1, len(self._segments[-1]) - 1, 1)

    def durable(self, location: Location) -> bool:
        return True

    def read(self, location: Location) -> Trajectory:
        return self._segments[location.segment][location.offset]

    def keep_only(self, segments: Set[int]) -> None:
        for number, segment in enumerate(self._segments[:-1]):
            if number not in segments:
                segment.clear()


class MemoryJournal:
    def __init__(self) -> None:
        self.payloads = MemoryPayloads()
        self.offload: Offload = in_place

    def append(self, event: e.AnyEvent) -> None: ...

    async def sync(self) -> None: ...

    def close(self) -> None: ...


def open_in_memory(
    folder: Path, section: JournalSection, rules: Rules, *, run: str, seed: int, offload: Offload
) -> tuple[MemoryJournal, Ledger]:
    """As open_journal for a run that has not begun; nothing is read or written."""
    ledger = Ledger(rules)
    opened = e.Opened(
        format=e.FORMAT,
        opening=0,
        run=run,
        seed=seed,
        group_size=rules.group_size,
        groups=rules.batch_groups,
        alpha=rules.alpha,
    )
    ledger.apply(opened)
    return MemoryJournal(), ledger

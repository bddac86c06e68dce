"""What the buffer needs of its journal: the one on disk, or one in memory on the virtual clock."""

from collections.abc import Set
from pathlib import Path
from typing import Protocol

from flashflow.config.sections import JournalSection
from flashflow.journal.offload import Offload
from flashflow.ledger import Ledger, Rules
from flashflow.ledger import events as e
from flashflow.ledger.events import Location
from flashflow.records import Trajectory


class PayloadStore(Protocol):
    def append(self, trajectory: Trajectory) -> Location: ...

    def durable(self, location: Location) -> bool: ...

    def read(self, location: Location) -> Trajectory: ...

    def keep_only(self, segments: Set[int]) -> None: ...


class EventLog(Protocol):
    offload: Offload

    @property
    def payloads(self) -> PayloadStore: ...

    def append(self, event: e.AnyEvent) -> None: ...

    async def sync(self) -> None: ...

    def close(self) -> None: ...


class OpenJournal(Protocol):
    """`open_journal`, or `open_in_memory`."""

    def __call__(
        self, folder: Path, section: JournalSection, rules: Rules, *, run: str, seed: int, offload: Offload
    ) -> tuple[EventLog, Ledger]: ...

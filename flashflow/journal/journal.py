"""Opening, replaying and writing the journal. One process at a time has it.

<folder>/transitions-000000.log   events of the first buffer process, headed by Opened; one file per opening
<folder>/payload-000000.log       trajectories
"""

import asyncio
import fcntl
import os
import threading
from pathlib import Path

import msgspec

from flashflow.config.sections import JournalSection
from flashflow.errors import ConfigError, ContractError, JournalError
from flashflow.journal.framing import AppendFile, read_records, sync_folder
from flashflow.journal.offload import Offload
from flashflow.journal.payloads import Payloads
from flashflow.ledger import Ledger, Rules, State
from flashflow.ledger import events as e

_FINGERPRINT = {
    "seed": "run.seed",
    "group_size": "rollout.group_size",
    "groups": "batch.groups",
    "alpha": "rollout.alpha",
}
"""Fields of Opened that a run keeps for life, and where the config has them."""


class Journal:
    """The transitions file of this opening, and the payloads. What append() returned from survives the process."""

    def __init__(self, transitions: AppendFile, payloads: Payloads, lock: int, offload: Offload) -> None:
        self.payloads = payloads
        self.offload = offload
        self._transitions = transitions
        self._lock = lock
        self._syncing = threading.Lock()
        """Held in the thread that syncs, which goes on when the call that asked for it is cancelled."""
        self._newest_named = -1
        """Newest payload segment whose name is on the disk."""

    def append(self, event: e.AnyEvent) -> None:
        self._transitions.append(msgspec.msgpack.encode(event))

    @property
    def dirty(self) -> bool:
        """Something is not yet known to be on the disk."""
        return self.payloads.dirty or self._transitions.size > self._transitions.synced

    async def sync(self) -> None:
        """Returns once everything appended before the call is on the disk; fsync runs in `offload`."""
        if self.dirty:
            await self.offload(self.sync_blocking)

    def sync_blocking(self) -> None:
        """Payloads first, for transitions speak of them."""
        with self._syncing:
            newest = self.payloads.newest
            self.payloads.sync()
            if newest != self._newest_named:
                sync_folder(self._transitions.path.parent)
                self._newest_named = newest
            self._transitions.sync()

    def close(self) -> None:
        """Syncs, and lets another process have the journal."""
        self.sync_blocking()
        self.payloads.close()
        self._transitions.close()
        os.close(self._lock)


def open_journal(
    folder: Path, section: JournalSection, rules: Rules, *, run: str, seed: int, offload: Offload = asyncio.to_thread
) -> tuple[Journal, Ledger]:
    """The journal and the ledger it gives back: outstanding leases are admitted again under new epochs.

    Raises ConfigError when the run began with another seed, group size, batch or alpha; JournalError when it is
    damaged other than by a torn end, or another process has it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    lock = _lock(folder)
    try:
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
        opening = _replay(folder, ledger, opened)
        opened = msgspec.structs.replace(opened, opening=opening)
        transitions = AppendFile(_transitions(folder, opening))
        journal = Journal(transitions, Payloads(folder, section.segment_bytes), lock, offload)
        events: list[e.AnyEvent] = [opened]
        events += _lost_payloads(ledger, journal.payloads)
        for event in events:
            ledger.apply(event)
            journal.append(event)
        journal.sync_blocking()
        journal.payloads.keep_only(ledger.segments())
        return journal, ledger
    except BaseException:
        os.close(lock)
        raise


def replay(folder: Path, ledger: Ledger) -> None:
    """Applies every event of a finished journal, changing no file."""
    for path in sorted(folder.glob("transitions-*.log")):
        for _, body in read_records(path, may_be_torn=True):
            ledger.apply(_decode(path, body))


def _lock(folder: Path) -> int:
    fd = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        raise JournalError(
            f"{folder}: another process has this journal; end it, or give the run another name"
        ) from None
    return fd


def _transitions(folder: Path, opening: int) -> Path:
    return folder / f"transitions-{opening:06d}.log"


def _replay(folder: Path, ledger: Ledger, present: e.Opened) -> int:
    """Restores the ledger, cuts a torn end off, and returns the ordinal of this opening."""
    paths = sorted(folder.glob("transitions-*.log"))
    for path in paths:
        end = 0
        for end, body in read_records(path, may_be_torn=path == paths[-1]):
            event = _decode(path, body)
            if isinstance(event, e.Opened):
                _check_same_run(path, event, present)
            _apply(path, end, ledger, event)
        if path == paths[-1]:
            os.truncate(path, end)
    return int(paths[-1].stem.removeprefix("transitions-")) + 1 if paths else 0


def _apply(path: Path, end: int, ledger: Ledger, event: e.AnyEvent) -> None:
    try:
        ledger.apply(event)
    except ContractError as error:
        raise JournalError(f"{path}: the event that ends at byte {end} cannot have happened: {error}") from error


def _decode(path: Path, body: bytes) -> e.AnyEvent:
    try:
        return msgspec.msgpack.decode(body, type=e.AnyEvent)
    except msgspec.DecodeError as error:
        raise JournalError(f"{path}: an event of another version of flashflow ({error})") from error


def _check_same_run(path: Path, past: e.Opened, present: e.Opened) -> None:
    mistakes = [
        f"{where}: {getattr(present, name)}, but the journal {path.parent} began with {getattr(past, name)}; "
        "set it back, or start a new run (run.name)"
        for name, where in _FINGERPRINT.items()
        if getattr(present, name) != getattr(past, name)
    ]
    if past.format != present.format:
        mistakes.append(f"journal {path.parent} has format {past.format}, this version reads {present.format}")
    if mistakes:
        raise ConfigError(mistakes)


def _lost_payloads(ledger: Ledger, payloads: Payloads) -> list[e.PayloadLost]:
    """Commits in no batch whose payload a dying host did not write. Raises JournalError when a later one is sound."""
    commits = sorted(
        (member.result.payload, group.id, index)
        for group in ledger.outstanding.values()
        for index, member in enumerate(group.members)
        if member.state is State.COMMITTED and member.result is not None
    )
    lost: list[e.PayloadLost] = []
    for num_later, (location, group, index) in enumerate(reversed(commits)):
        if payloads.intact(location):
            continue
        if len(lost) < num_later:
            payloads.read(location)
        lost.append(e.PayloadLost(group, index))
    return lost

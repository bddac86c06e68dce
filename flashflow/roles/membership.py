"""Who may still speak to the buffer, and who holds which lease since when (contract 3)."""

import math
from collections.abc import Iterator

import msgspec

from flashflow.errors import ContractError
from flashflow.records import SampleId
from flashflow.roles.signal import Signal
from flashflow.topology import GANG
from flashflow.transport.channel import Peer

Attempt = tuple[int, int]
"""(group, member)."""


class Holding(msgspec.Struct, frozen=True):
    """A lease in somebody's hands."""

    peer: Peer
    sample: SampleId
    epoch: int
    since: float
    """Seconds on the buffer's clock."""
    named: float = -math.inf
    """When its holder last said that it lives."""


class Membership:
    """The newest incarnation of every process, and the gang's generation. An older one is fenced off."""

    def __init__(self) -> None:
        self._newest: dict[tuple[str, int], int] = {}
        self._generation = 0
        self._lost: set[Peer] = set()

    def see(self, peer: Peer) -> bool:
        """Notes a message of `peer`; True when it is the first of its incarnation, so that an elder one is gone."""
        if peer.role in GANG:
            self._generation = max(self._generation, peer.generation)
        self._lost.discard(peer)
        key = (peer.role, peer.index)
        if peer.incarnation <= self._newest.get(key, -1):
            return False
        self._newest[key] = peer.incarnation
        self._lost = {lost for lost in self._lost if (lost.role, lost.index) != key}
        return True

    def check(self, peer: Peer) -> None:
        """Raises ContractError for an incarnation, or a gang generation, below the newest seen."""
        if self.fenced(peer):
            raise ContractError(f"{peer} is superseded by incarnation {self._newest[peer.role, peer.index]}")
        if peer.role in GANG and peer.generation < self._generation:
            raise ContractError(f"{peer}: gang generation {peer.generation} is superseded by {self._generation}")

    def lose(self, peer: Peer) -> None:
        """Its connection is gone; should it speak again it is welcome."""
        self._lost.add(peer)

    def fenced(self, peer: Peer) -> bool:
        """A newer incarnation has spoken."""
        return peer.incarnation < self._newest.get((peer.role, peer.index), 0)

    def may_hold(self, peer: Peer) -> bool:
        """A lease given to `peer` now would be in living hands."""
        return peer not in self._lost and not self.fenced(peer)


class Leases:
    """Holdings by attempt."""

    def __init__(self) -> None:
        self._held: dict[Attempt, Holding] = {}
        self._generated: set[Attempt] = set()
        """Of those held: which are only to be scored."""
        self.news = Signal()
        """One of them ended, or has its tokens."""

    def __iter__(self) -> Iterator[Holding]:
        return iter(list(self._held.values()))

    def __len__(self) -> int:
        return len(self._held)

    def give(self, holding: Holding) -> None:
        self._held[holding.sample.group, holding.sample.member] = holding

    def holds(self, sample: SampleId, epoch: int) -> bool:
        """Whether this very lease is in somebody's hands."""
        held = self._held.get((sample.group, sample.member))
        return held is not None and (held.sample, held.epoch) == (sample, epoch)

    def renew(self, sample: SampleId, epoch: int, now: float) -> None:
        """Its holder says that it lives."""
        if self.holds(sample, epoch):
            attempt = sample.group, sample.member
            self._held[attempt] = msgspec.structs.replace(self._held[attempt], named=now)

    def end(self, sample: SampleId, epoch: int) -> None:
        """Nobody holds this very lease any more; another one of the attempt stays."""
        if self.holds(sample, epoch):
            del self._held[sample.group, sample.member]
            self._generated.discard((sample.group, sample.member))
            self.news.notify()

    def generated(self, sample: SampleId, epoch: int) -> None:
        """The attempt has all its tokens."""
        if self.holds(sample, epoch):
            self._generated.add((sample.group, sample.member))
            self.news.notify()

    @property
    def all_generated(self) -> bool:
        return len(self._generated) == len(self._held)

    def of_group(self, group: int, num_members: int) -> list[Holding]:
        held = (self._held.get((group, member)) for member in range(num_members))
        return [holding for holding in held if holding is not None]

    def older_than(self, moment: float) -> list[Holding]:
        """Held since before it, and not named since; those who wait for the others to be generated left out."""
        waiting = set() if self.all_generated else self._generated
        return [
            held
            for attempt, held in list(self._held.items())
            if max(held.since, held.named) < moment and attempt not in waiting
        ]

"""A group and its members: what the ledger keeps of each."""

import enum
import math

import msgspec

from flashflow.ledger.events import Committed
from flashflow.records import ManifestRow, SampleId
from flashflow.staleness import last_batch


class State(enum.StrEnum):
    ADMITTED = "admitted"
    LEASED = "leased"
    COMMITTED = "committed"
    CONSUMED = "consumed"
    FILTERED = "filtered"
    FAILED = "failed"
    EXPIRED = "expired"
    SURPLUS = "surplus"


RUNNING = (State.ADMITTED, State.LEASED)
WAITING = (*RUNNING, State.COMMITTED)
FINAL = (State.CONSUMED, State.FILTERED, State.FAILED, State.EXPIRED, State.SURPLUS)

ENDED = (State.COMMITTED, State.FAILED, State.CONSUMED)
"""Of a member with a place in its group's rows."""

PLACEHOLDER_TOKENS = 1
"""Length of the row of a member that left no trajectory: one token nobody sampled, for a row needs a length."""


class Member(msgspec.Struct):
    """One attempt at the group's task."""

    state: State
    epoch: int
    """Of the current lease, or of the next one while admitted."""
    retry: int
    served: int = -1
    """Lowest version served when the current lease was given; -1 before the first."""
    result: Committed | None = None
    """The accepted commit."""

    @property
    def has_reward(self) -> bool:
        reward = self.result.reward if self.result is not None else None
        return reward is not None and math.isfinite(reward)

    def oldest_version(self, served: int) -> int | None:
        """Initiating version, or a lower bound of it; `served` is today's lowest version. None: leaves no token."""
        match self.state:
            case State.ADMITTED:
                return served
            case State.LEASED:
                return self.served
            case _:
                return self.result.initiating_version if self.result is not None else None


class Group(msgspec.Struct):
    id: int
    cursor: int
    retry: int
    size: int
    """Rows it is to have in a batch; members above that are redundant."""
    members: list[Member]
    taken_by: int | None = None
    """Step of the manifest it is in."""

    @property
    def num_usable(self) -> int:
        """Members with a usable reward."""
        return sum(member.has_reward for member in self.members)

    @property
    def complete(self) -> bool:
        """As many usable rewards as rows, or nothing is missing that could still come."""
        return self.num_usable >= self.size or not any(member.state in RUNNING for member in self.members)

    @property
    def hopeless(self) -> bool:
        """Complete without one usable reward."""
        return self.complete and not self.num_usable

    @property
    def spoilt(self) -> bool:
        """So many members have ended without a usable reward that it can have no row for each."""
        num_ended = sum(member.state in ENDED and not member.has_reward for member in self.members)
        return num_ended > len(self.members) - self.size

    @property
    def chosen(self) -> list[int]:
        """Members a batch takes: those with a usable reward, then what else has ended, `size` at most; ascending."""
        ended = [index for index, member in enumerate(self.members) if member.state in ENDED]
        ended.sort(key=lambda index: (not self.members[index].has_reward, self.members[index].result is None, index))
        return sorted(ended[: self.size])

    @property
    def rewards(self) -> tuple[float | None, ...]:
        """Raw task rewards of the chosen members; None where there is no usable one."""
        chosen = [self.members[index] for index in self.chosen]
        return tuple(m.result.reward if m.result is not None and m.has_reward else None for m in chosen)

    @property
    def oldest_token(self) -> int | None:
        """Version of the oldest token of any member; None when there is none."""
        return min((m.result.initiating_version for m in self.members if m.result is not None), default=None)

    def sample(self, member: int) -> SampleId:
        return SampleId(self.id, member, self.members[member].retry)

    def due(self, served: int, alpha: float) -> int:
        """Last batch that may take it; a lower bound while members are uncommitted."""
        versions = [member.oldest_version(served) for member in self.members]
        return last_batch(min((v for v in versions if v is not None), default=served), alpha)

    def too_old(self, step: int, alpha: float, *, certainly: bool) -> bool:
        """No batch from `step` on may take it. `certainly`: by commits alone, not by what leases suggest."""
        states = (State.COMMITTED,) if certainly else (State.COMMITTED, State.LEASED)
        versions = [member.oldest_version(0) for member in self.members if member.state in states]
        return any(v is not None and last_batch(v, alpha) < step for v in versions)

    def rows(self, step: int, use: int = 1) -> list[ManifestRow]:
        return [self._row(index, self.members[index], step, use) for index in self.chosen]

    def _row(self, index: int, member: Member, step: int, use: int) -> ManifestRow:
        result = member.result
        if result is None:
            return ManifestRow(
                sample=self.sample(index),
                num_tokens=PLACEHOLDER_TOKENS,
                num_sampled=0,
                initiating_version=step - 1,
                reward=None,
                outcome="failed",
                use=use,
            )
        return ManifestRow(
            sample=self.sample(index),
            num_tokens=result.num_tokens,
            num_sampled=result.num_sampled,
            initiating_version=result.initiating_version,
            reward=result.reward,
            outcome=result.outcome,
            use=use,
        )

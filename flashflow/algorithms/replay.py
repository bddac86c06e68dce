"""Replay of good groups in place of groups without signal. Pure: every call gives a new buffer. Free of torch.

Replayed groups keep their own behaviour log-probabilities and versions, so corrections see their true age.
"""

import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Generic, TypeVar

from flashflow.algorithms.filters import scorable, zero_variance
from flashflow.algorithms.settings import ReplayConfig

P = TypeVar("P")


@dataclass(frozen=True)
class ReplayGroup(Generic[P]):
    """A finished group as the buffer keeps it."""

    group: int
    """Ordinal of admission."""
    version: int
    """Of the oldest sampled token of any member."""
    rewards: tuple[float | None, ...]
    """Raw task rewards of the members."""
    payload: P
    """Whatever the caller trains on."""
    uses: int = 1
    """Times trained; 1 is the manifest's, later ones are replays."""


@dataclass(frozen=True)
class ReplayBuffer(Generic[P]):
    """First in, first out; at most config.capacity groups."""

    config: ReplayConfig
    groups: tuple[ReplayGroup[P], ...] = field(default=())
    """Oldest first."""

    def offer(self, group: ReplayGroup[P]) -> "ReplayBuffer[P]":
        """Keeps the group if it is worth it; the oldest leave when the buffer is full."""
        if not worth_keeping(self.config, group.rewards):
            return self
        return replace(self, groups=(*self.groups, group)[-self.config.capacity :])

    def fresh(self, version: int) -> "ReplayBuffer[P]":
        """Without the groups that are older than max_replay_staleness for a trainer at `version`."""
        oldest = version - self.config.max_replay_staleness
        return replace(self, groups=tuple(group for group in self.groups if group.version >= oldest))

    def draw(self, num: int, *, version: int, key: int) -> tuple["ReplayBuffer[P]", list[ReplayGroup[P]]]:
        """Up to `num` different fresh groups, uniformly by `key`, with `uses` counted up; and the buffer after it."""
        kept = self.fresh(version)
        drawn = {
            index: replace(kept.groups[index], uses=kept.groups[index].uses + 1)
            for index in _choose(len(kept.groups), num, key)
        }
        groups = tuple(drawn.get(index, group) for index, group in enumerate(kept.groups))
        return replace(kept, groups=groups), list(drawn.values())


def worth_keeping(config: ReplayConfig, rewards: Sequence[float | None]) -> bool:
    """Population standard deviation and mean of the scorable rewards are both above their thresholds."""
    usable = scorable(rewards)
    return (
        len(usable) >= 2 and statistics.pstdev(usable) > config.min_std and statistics.fmean(usable) > config.min_mean
    )


def fill(
    buffer: ReplayBuffer[P], batch: Sequence[ReplayGroup[P]], *, version: int, key: int
) -> tuple[ReplayBuffer[P], list[ReplayGroup[P]]]:
    """The batch with groups without signal replaced by stored ones as far as they go, and the buffer after it.

    The batch's own good groups are stored after the draw, so none is drawn into its own batch.
    """
    silent = [index for index, group in enumerate(batch) if zero_variance(group.rewards)]
    buffer, drawn = buffer.draw(len(silent), version=version, key=key)
    filled = list(batch)
    for index, group in zip(silent, drawn, strict=False):
        filled[index] = group
    for index, group in enumerate(batch):
        if index not in silent:
            buffer = buffer.offer(group)
    return buffer, filled


def _choose(size: int, num: int, key: int) -> list[int]:
    """`num` different indices below `size`, uniformly. Only random(): its sequence is the same in every Python."""
    generator = random.Random(key)
    indices = list(range(size))
    for place in range(min(num, size)):
        other = place + int(generator.random() * (size - place))
        indices[place], indices[other] = indices[other], indices[place]
    return indices[: min(num, size)]

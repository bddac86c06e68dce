"""Which rows of a batch are whose. A pure function of the manifest, so every rank knows it before it has a row.

A row stays with its rank for the whole batch: in the passes before the first optimizer step, in every step, in every
epoch. What is worked on at one time is dealt out by itself: for each optimizer step the rows of groups with signal,
which take a pass with gradient, then the others that count, which are only measured; then those that do not count.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, groupby, pairwise

from flashflow.algorithms.filters import zero_variance
from flashflow.algorithms.settings import ShapingConfig
from flashflow.packing import MicroBatch, deal, plan
from flashflow.records import ManifestRow, Trajectory
from flashflow.trainers.scorable import is_scorable
from flashflow.trainers.shaping import is_trained

Hands = Sequence[tuple[int, ...]]
"""By rank, the places of its rows in the batch."""


@dataclass(frozen=True)
class Share:
    """A batch as one rank sees it: the lengths of all rows, the tokens of its own."""

    lengths: Sequence[int]
    """Tokens of every row of the batch."""
    hands: Hands
    rank: int
    rows: Sequence[Trajectory]
    """This rank's, in the order of `places`."""

    @property
    def places(self) -> tuple[int, ...]:
        return self.hands[self.rank]

    @cached_property
    def own(self) -> dict[int, int]:
        """Place in the batch -> place in `rows`."""
        return {place: index for index, place in enumerate(self.places)}

    def plans(self, rows: Iterable[int], max_tokens: int) -> list[list[MicroBatch]]:
        """Of each rank, to work on those rows."""
        return plan(self.lengths, max_tokens, self.hands, rows)


def whole(rows: Sequence[Trajectory], num_ranks: int, rank: int) -> Share:
    """Every rank works on every row."""
    everything = tuple(range(len(rows)))
    return Share([row.num_tokens for row in rows], [everything] * num_ranks, rank, rows)


def deal_rows(rows: Sequence[ManifestRow], shaping: ShapingConfig, optimizer_steps: int, num_ranks: int) -> Hands:
    silent = groups_without_signal(rows)
    strata: list[list[int]] = []
    for part in split_by_group(rows, optimizer_steps):
        kinds: tuple[list[int], ...] = ([], [], [])
        for place in part:
            row = rows[place]
            kinds[2 if not is_trained(row, shaping) else row.sample.group in silent].append(place)
        strata += kinds
    return deal([row.num_tokens for row in rows], num_ranks, strata)


def split_by_group(rows: Sequence[ManifestRow], num_parts: int) -> list[list[int]]:
    """Places of the rows of each optimizer step: whole groups in the batch's order, as many in each as in the others,
    or one more. Fewer parts where there are fewer groups."""
    groups = [list(members) for _, members in groupby(range(len(rows)), key=lambda place: rows[place].sample.group)]
    cuts = [len(groups) * part // num_parts for part in range(num_parts + 1)]
    parts = [list(chain.from_iterable(groups[start:end])) for start, end in pairwise(cuts)]
    return [part for part in parts if part]


def groups_without_signal(rows: Sequence[ManifestRow]) -> set[int]:
    """By their raw rewards."""
    rewards: dict[int, list[float | None]] = {}
    for row in rows:
        rewards.setdefault(row.sample.group, []).append(row.reward if is_scorable(row) else None)
    return {group for group, each in rewards.items() if zero_variance(each)}

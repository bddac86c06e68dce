"""Lengths in, micro-batches out: which samples are whose, which share a forward pass, and how far they are padded.
Pure; knows no torch.

Samples are padded on the right, never joined end to end: only so do log-probabilities equal the engine's to the last
bit (flashflow/shapes.py).
"""

from collections.abc import Iterable, Sequence

import msgspec

from flashflow.shapes import safe_tokens


class MicroBatch(msgspec.Struct, frozen=True):
    """One forward and backward pass of one rank."""

    rows: tuple[int, ...]
    """Places in the batch, longest sample first. None: no work was left for this rank; the pass keeps the ranks'
    collectives in step and must add nothing."""
    length: int
    """Tokens to which every row is padded, a number of `safe_tokens`; its keys go further (shapes.safe_length)."""

    @property
    def padded_tokens(self) -> int:
        return len(self.rows) * self.length


IDLE = MicroBatch((), safe_tokens(1))


def deal(lengths: Sequence[int], num_ranks: int, strata: Iterable[Iterable[int]]) -> list[tuple[int, ...]]:
    """The places of each rank's samples, every sample in exactly one stratum.

    A stratum is what is worked on at one time. Within each, samples go out longest first to the rank with the fewest
    padded tokens of the stratum so far, then of all, then to the first: no two ranks of a stratum differ by more than
    its longest sample, and as long as they are alike each rank gets one of every `num_ranks` neighbours in length, so
    that passes at one time are alike too.
    """
    hands: list[list[int]] = [[] for _ in range(num_ranks)]
    totals = [0] * num_ranks
    for stratum in strata:
        here = [0] * num_ranks
        for row in _longest_first(lengths, stratum):
            _, _, rank = min(zip(here, totals, range(num_ranks), strict=True))
            hands[rank].append(row)
            here[rank] += safe_tokens(lengths[row])
            totals[rank] += safe_tokens(lengths[row])
    return [tuple(sorted(hand)) for hand in hands]


def plan(
    lengths: Sequence[int], max_tokens: int, hands: Sequence[Iterable[int]], rows: Iterable[int]
) -> list[list[MicroBatch]]:
    """What each rank runs to work on `rows`, of which it packs its own: equally many on each, the idle ones last."""
    chosen = set(rows)
    plans = [pack(lengths, max_tokens, [row for row in hand if row in chosen]) for hand in hands]
    most = max(map(len, plans))
    return [mine + [IDLE] * (most - len(mine)) for mine in plans]


def pack(lengths: Sequence[int], max_tokens: int, rows: Iterable[int] | None = None) -> list[MicroBatch]:
    """Every sample in exactly one micro-batch of at most `max_tokens` padded tokens, or alone where longer itself.

    `rows`: the places to pack; None: all. Samples are sorted by length, longest first (so that memory is short at once
    or never), ties by place; none is padded to more than twice its own safe number. The same lengths give the same
    result.
    """
    micro_batches: list[MicroBatch] = []
    members: list[int] = []
    length = 0
    for row in _longest_first(lengths, range(len(lengths)) if rows is None else rows):
        own = safe_tokens(lengths[row])
        if members and ((len(members) + 1) * length > max_tokens or length > 2 * own):
            micro_batches.append(MicroBatch(tuple(members), length))
            members = []
        if not members:
            length = own
        members.append(row)
    if members:
        micro_batches.append(MicroBatch(tuple(members), length))
    return micro_batches


def _longest_first(lengths: Sequence[int], rows: Iterable[int]) -> list[int]:
    """Ties by place."""
    return sorted(rows, key=lambda row: (-lengths[row], row))

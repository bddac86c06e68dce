"""Lengths in, micro-batches out: which samples share a forward pass, and how far they are padded. Pure; knows no torch.

Samples are padded on the right, never joined end to end: only so do log-probabilities equal the engine's to the last
bit (flashflow/shapes.py).
"""

from collections.abc import Iterable, Sequence

import msgspec

from flashflow.shapes import safe_length


class MicroBatch(msgspec.Struct, frozen=True):
    """One forward and backward pass of one rank."""

    rows: tuple[int, ...]
    """Places in the batch, longest sample first."""
    length: int
    """Tokens to which every row is padded; a safe length."""
    idle: bool = False
    """True: no work was left for this rank; the pass keeps the ranks' collectives in step and must add nothing."""

    @property
    def padded_tokens(self) -> int:
        return len(self.rows) * self.length


def pack(lengths: Sequence[int], max_tokens: int, rows: Iterable[int] | None = None) -> list[MicroBatch]:
    """Every sample in exactly one micro-batch of at most `max_tokens` padded tokens, or alone where longer itself.

    `rows`: the places to pack; None: all. Samples are sorted by length, longest first (so that memory is short at once
    or never), ties by place; none is padded to more than twice its own safe length. The same lengths give the same
    result.
    """
    order = sorted(range(len(lengths)) if rows is None else rows, key=lambda row: (-lengths[row], row))
    micro_batches: list[MicroBatch] = []
    members: list[int] = []
    length = 0
    for row in order:
        own = safe_length(lengths[row])
        if members and ((len(members) + 1) * length > max_tokens or length > 2 * own):
            micro_batches.append(MicroBatch(tuple(members), length))
            members = []
        if not members:
            length = own
        members.append(row)
    if members:
        micro_batches.append(MicroBatch(tuple(members), length))
    return micro_batches


def share(micro_batches: Sequence[MicroBatch], rank: int, num_ranks: int) -> list[MicroBatch]:
    """What one of `num_ranks` ranks runs: equally many on each, neighbours in length at the same time.

    A rank without work of its own in the last round runs the round's first micro-batch again, marked idle.
    """
    mine = []
    for start in range(0, len(micro_batches), num_ranks):
        round_ = micro_batches[start : start + num_ranks]
        mine.append(round_[rank] if rank < len(round_) else MicroBatch(round_[0].rows, round_[0].length, idle=True))
    return mine

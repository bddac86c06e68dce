"""Which groups batch k takes, such that every other one can still be taken in time (contract 2). Pure.

A sample with initiating version v may be in batch k iff (k - 1) - v <= ceil(alpha), for k - 1 is the trainer's version
when k is handed over; so its last batch, its *due*, is v + ceil(alpha) + 1. A group is due with its oldest member.
"""

from collections.abc import Iterable
from typing import Literal, NamedTuple

from flashflow.admission import max_staleness


class Aged(NamedTuple):
    """An outstanding group, in the order in which groups are taken: by due, then id."""

    due: int
    """Last batch that may take it; a lower bound while members are uncommitted."""
    group: int
    complete: bool


class Selection(NamedTuple):
    """The groups of a batch; when there are none, `reason` says why to a person."""

    groups: list[int]
    reason: str = ""


def last_batch(initiating_version: int, alpha: float) -> int:
    """Due of a sample."""
    return initiating_version + max_staleness(alpha) + 1


def too_few(step: int, num_complete: int, batch_groups: int) -> Selection:
    return Selection([], f"batch {step} has {num_complete} of {batch_groups} complete groups")


def num_late(rest: Iterable[Aged], step: int, batch_groups: int) -> int:
    """The fewest of the groups left over after batch `step` that no batch after it can take in time.

    Oldest first, each into the first free place (Moore 1968). 0 is the same as: for every j > step at most (j - step)
    Bg of them are due by j, and none by step (Hall's condition).
    """
    ordered = sorted(rest)
    num_placed = 0
    for aged in ordered:
        num_placed += aged.due >= step + 1 + num_placed // batch_groups
    return len(ordered) - num_placed


def select(
    outstanding: Iterable[Aged],
    *,
    step: int,
    batch_groups: int,
    on_stale: Literal["wait", "drop"],
    ending: bool,
    redundant: int = 0,
) -> Selection:
    """The oldest Bg complete groups; under `wait` only when every other group but `redundant` ones stays in time.

    Where waiting cannot help, because none of the oldest Bg groups is incomplete, the batch goes out all the same.
    `ending`: the data has ended, so the last batch takes what is left, be it fewer than Bg.
    """
    order = [aged for aged in sorted(outstanding) if aged.due >= step or not aged.complete]
    chosen = [aged for aged in order if aged.complete and aged.due >= step][:batch_groups]
    left_over = set(order).difference(chosen)
    if len(chosen) < batch_groups and not (ending and chosen and not left_over):
        return too_few(step, len(chosen), batch_groups)
    awaited = [aged for aged in order[:batch_groups] if not aged.complete]
    if on_stale == "wait" and awaited and num_late(left_over, step, batch_groups) > redundant:
        return Selection([], f"batch {step} waits for group {awaited[0].group}, which is due by batch {awaited[0].due}")
    return Selection([aged.group for aged in chosen])

"""When the next group may start, and how old its tokens may be (contracts 1 and 2). Pure arithmetic.

Letters: V lowest served version, alpha async ratio, Bg groups per batch, R redundant groups, n ordinal of a group from
1, voided ones (filtered, failed, expired, surplus) not counted.
"""

import math
from fractions import Fraction


def max_staleness(alpha: float) -> int:
    """ceil(alpha): batches a sample may be behind the trainer at hand-over."""
    return math.ceil(alpha)


def capacity(version: int, alpha: float, batch_groups: int, redundant: int = 0) -> int:
    """floor((V + 1 + alpha) Bg) + R: group n may start iff n is no more than this.

    alpha is taken as the decimal a person wrote: 0.29 of 100 groups is 29, which binary floats make 28.
    """
    return (version + 1) * batch_groups + math.floor(Fraction(str(alpha)) * batch_groups) + redundant


def opening_version(ordinal: int, alpha: float, batch_groups: int, redundant: int = 0) -> int:
    """The lowest V >= 0 at which `capacity` lets group n in."""
    ahead = capacity(-1, alpha, batch_groups, redundant)
    return max(0, math.ceil((ordinal - ahead) / batch_groups) - 1)


def oldest_useful_version(last_batch: int, alpha: float) -> int:
    """The oldest weights whose tokens a batch after `last_batch` may take; with R = 0 `capacity` sees to it already."""
    return last_batch - max_staleness(alpha)


def planned_batch(ordinal: int, batch_groups: int, redundant: int = 0) -> int:
    """ceil((n - R) / Bg), 1 at least: the batch that takes group n when groups are taken in order and R are late."""
    return max(1, -(-(ordinal - redundant) // batch_groups))


def min_version(ordinal: int, alpha: float, batch_groups: int, redundant: int = 0) -> int:
    """The oldest weights that keep group n consumable in its planned batch; never above the V that admitted it."""
    return max(0, planned_batch(ordinal, batch_groups, redundant) - 1 - max_staleness(alpha))

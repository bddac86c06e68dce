"""When the next group may start, and how old its tokens may be (contracts 1 and 2). Pure arithmetic.

Letters: V lowest served version, alpha async ratio, Bg groups per batch, n ordinal of a group from 1, voided ones
(filtered, failed, expired, surplus) not counted.
"""

import math
from fractions import Fraction


def max_staleness(alpha: float) -> int:
    """ceil(alpha): batches a sample may be behind the trainer at hand-over."""
    return math.ceil(alpha)


def capacity(version: int, alpha: float, batch_groups: int) -> int:
    """floor((V + 1 + alpha) Bg): group n may start iff n is no more than this.

    alpha is taken as the decimal a person wrote: 0.29 of 100 groups is 29, which binary floats make 28.
    """
    return (version + 1) * batch_groups + math.floor(Fraction(str(alpha)) * batch_groups)


def opening_version(ordinal: int, alpha: float, batch_groups: int) -> int:
    """The lowest V >= 0 at which `capacity` lets group n in."""
    ahead = capacity(-1, alpha, batch_groups)
    return max(0, math.ceil((ordinal - ahead) / batch_groups) - 1)


def planned_batch(ordinal: int, batch_groups: int) -> int:
    """ceil(n / Bg): the batch that takes group n when groups are taken in order."""
    return -(-ordinal // batch_groups)


def min_version(ordinal: int, alpha: float, batch_groups: int) -> int:
    """The oldest weights that keep group n consumable in its planned batch; never above the V that admitted it."""
    return max(0, planned_batch(ordinal, batch_groups) - 1 - max_staleness(alpha))

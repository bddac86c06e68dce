"""Draws that depend on who asks and for what, never on what was drawn before: two runs of a config draw the same."""

import hashlib
import math
from collections.abc import Callable
from statistics import NormalDist
from typing import assert_never

from flashflow.config.simulated import (
    Distribution,
    EmpiricalDistribution,
    FixedDistribution,
    GivenDistribution,
    LognormalDistribution,
    NormalDistribution,
)
from flashflow.messages import SamplingKey

Draw = Callable[[SamplingKey], float]
"""A number >= 0 for an attempt's turn."""

_BITS = 2.0**-53


def uniform(what: str, key: SamplingKey) -> float:
    """In (0, 1), by 53 bits of BLAKE2b over `what` is drawn and the key."""
    text = f"{what}/{key.seed}/{key.group}/{key.member}/{key.retry}/{key.turn}".encode()
    bits = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 11
    return (bits + 0.5) * _BITS


def drawer(what: str, distribution: Distribution, group_size: int) -> Draw:
    """Draws of `distribution`; those of two different `what` are independent. Raises OSError, ValueError (a file)."""
    match distribution:
        case FixedDistribution(value=value):
            return lambda key: value
        case GivenDistribution(values=values):
            return lambda key: values[(key.group * group_size + key.member) % len(values)]
        case NormalDistribution(mean=mean, sigma=sigma):
            return lambda key: max(0.0, mean + sigma * _normal(what, key))
        case LognormalDistribution(median=median, sigma=sigma, cap=cap):
            limit = cap if cap is not None else math.inf
            return lambda key: min(limit, median * math.exp(sigma * _normal(what, key)))
        case EmpiricalDistribution(path=path):
            numbers = sorted(float(line) for line in path.read_text(encoding="utf-8").split())
            return lambda key: numbers[int(uniform(what, key) * len(numbers))]
        case _:
            assert_never(distribution)


_STANDARD = NormalDist()


def _normal(what: str, key: SamplingKey) -> float:
    return _STANDARD.inv_cdf(uniform(what, key))

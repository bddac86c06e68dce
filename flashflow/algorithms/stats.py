"""Metrics that merge: over tokens, micro-batches and ranks, in any order. Free of torch."""

import math
from collections.abc import Iterable, Mapping
from typing import NamedTuple


class Stat(NamedTuple):
    """Summary of many values of one metric; `float(stat)` is its mean."""

    sum: float
    count: float  # type: ignore[assignment]  # the field is worth more than tuple.count
    min: float
    max: float

    @property
    def mean(self) -> float:
        return self.sum / self.count if self.count else math.nan

    def __float__(self) -> float:
        return self.mean

    def merge(self, other: "Stat") -> "Stat":
        return Stat(self.sum + other.sum, self.count + other.count, min(self.min, other.min), max(self.max, other.max))


def merge_metrics(parts: Iterable[Mapping[str, Stat]]) -> dict[str, Stat]:
    """Stats of the union of all values; a metric that one part lacks is taken from the others."""
    merged: dict[str, Stat] = {}
    for part in parts:
        for name, stat in part.items():
            merged[name] = merged[name].merge(stat) if name in merged else stat
    return merged


RATIOS = ("r", "w", "rho")


def summarise(metrics: Mapping[str, Stat]) -> dict[str, float]:
    """Plain numbers to log: the mean of each metric under its name; `_mean`, `_min` and `_max` of the ratios.

    `effective_sample_size` is (sum w)^2 / (n sum w^2) in (0, 1], of w, or of rho where there was no prox pass.
    """
    plain = {name: stat.mean for name, stat in metrics.items() if name not in RATIOS and not name.endswith("_squared")}
    for name in RATIOS:
        if name in metrics:
            stat = metrics[name]
            plain |= {f"{name}_mean": stat.mean, f"{name}_min": stat.min, f"{name}_max": stat.max}
    weight = "w" if "w_squared" in metrics else "rho"
    if f"{weight}_squared" in metrics:
        total, squares = metrics[weight], metrics[f"{weight}_squared"]
        plain["effective_sample_size"] = total.sum**2 / (total.count * squares.sum)
    return plain

"""Gathers metrics on the device and brings them to the host in one transfer."""

import torch
from torch import Tensor

from flashflow.algorithms.stats import Stat

NUM_LAGS = 9
"""Lags reported apart: 0 .. 7, and 8 for 8 or more."""


class MetricBoard:
    """Stats of masked-in values, kept as tensors until `collect`."""

    def __init__(self) -> None:
        self._names: list[str] = []
        self._rows: list[Tensor] = []

    def add(self, name: str, values: Tensor, mask: Tensor) -> None:
        """Stat of `values` (any shape, numbers or bools) where `mask` (same shape) holds."""
        self._add_rows([name], values.detach().reshape(1, -1), mask.reshape(1, -1))

    def add_by_lag(self, name: str, values: Tensor, mask: Tensor, lags: Tensor) -> None:
        """A stat for each lag, named `{name}_lag_{lag}`; `lags` in versions."""
        every = torch.arange(NUM_LAGS, device=lags.device).unsqueeze(1)
        chosen = mask.reshape(1, -1) & (lags.reshape(1, -1).clamp(0, NUM_LAGS - 1) == every)
        self._add_rows([f"{name}_lag_{lag}" for lag in range(NUM_LAGS)], values.detach().reshape(1, -1), chosen)

    def _add_rows(self, names: list[str], values: Tensor, chosen: Tensor) -> None:
        values = values.to(torch.float64)
        parts = (
            torch.where(chosen, values, 0.0).sum(1),
            chosen.sum(1).to(torch.float64),
            torch.where(chosen, values, torch.inf).amin(1),
            torch.where(chosen, values, -torch.inf).amax(1),
        )
        self._names += names
        self._rows.append(torch.stack(parts, dim=1))

    def collect(self, flag: Tensor) -> tuple[dict[str, Stat], bool]:
        """All stats that have a value, and whether `flag` holds: the only wait for the device."""
        extra = flag.to(torch.float64).expand(1, 4)
        *rows, last = torch.cat([*self._rows, extra]).tolist()
        stats = {name: Stat(*row) for name, row in zip(self._names, rows, strict=True) if row[1] > 0}
        return stats, last[0] != 0

"""The passes over a batch's micro-batches: one with gradient, which trains, and one without, which only scores.

Every rank runs equally many, each on rows of its own.

Letters: N rows of this rank, B rows of a micro-batch, T padded length.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from flashflow.algorithms.losses import Denominators, Stat
from flashflow.algorithms.stats import merge_metrics
from flashflow.errors import ContractError
from flashflow.packing import MicroBatch
from flashflow.trainers.batch import TokenBatch, token_batch
from flashflow.trainers.objectives import MicroLoss, Objective
from flashflow.trainers.sharding import hold_whole, reshard, total
from flashflow.trainers.share import Share


class StepOutcome(NamedTuple):
    """Of the passes of one optimizer step, all ranks together."""

    losses: dict[str, float]
    """By the names of MicroLoss.parts."""
    metrics: dict[str, Stat]
    plan: list[MicroBatch]
    """Of all ranks, without the idle ones."""


class Passes:
    """This rank's share of the passes over one batch."""

    def __init__(
        self, share: Share, version: int, max_tokens: int, device: torch.device, *, whole_during_step: bool = True
    ) -> None:
        """version: the trainer's at hand-over. max_tokens: of a micro-batch."""
        self.share = share
        self._version, self._max_tokens, self._device = version, max_tokens, device
        self._num_ranks = dist.get_world_size()
        self._whole_during_step = whole_during_step and self._num_ranks > 1

    def train(self, objective: Objective, rows: Iterable[int], denominators: Denominators) -> StepOutcome:
        """Adds the gradient of one optimizer step to the parameters'. Rows that cannot have any are only measured: a
        third of the work.

        rows: places of the step's that count. denominators: the step's, over all ranks.
        """
        # FSDP takes the mean of the ranks' gradients, where the loss wants their sum.
        per_rank = denominators.per_rank(self._num_ranks)
        may_have = set(objective.gradient_rows())
        counted = list(rows)
        plans = {
            True: self._plans([row for row in counted if row in may_have]),
            False: self._plans([row for row in counted if row not in may_have]),
        }
        losses: dict[str, list[float]] = {}
        metrics: dict[str, Stat] = {}
        for trains, each in plans.items():
            left = len(each[self.share.rank])
            for batch in self._batches(each):
                left -= 1
                if trains and self._whole_during_step:
                    for module in objective.modules:
                        hold_whole(module, last=not left)
                with torch.set_grad_enabled(trains):
                    result = self._named(objective, batch, per_rank)
                if trains:
                    result.total.backward()  # type: ignore[no-untyped-call]
                for name, part in result.parts.items():
                    losses.setdefault(name, []).append(part.item())
                metrics = merge_metrics([metrics, result.metrics])
        for module in objective.modules:
            reshard(module)
        sums = {name: math.fsum(parts) / self._num_ranks for name, parts in losses.items()}
        worked = [micro for each in plans.values() for plan in each for micro in plan if micro.rows]
        return self._over_ranks(sums, metrics, worked)

    def score(
        self, compute: Callable[[TokenBatch], torch.Tensor], rows: Iterable[int], *modules: nn.Module
    ) -> torch.Tensor:
        """What `compute` gives for each micro-batch [B, T], which is 0 outside the mask, as [N, longest row]; no
        gradient; 0 for rows not named. modules: the sharded roots that `compute` runs."""
        own = self.share.rows
        whole_NT = torch.zeros(len(own), max((row.num_tokens for row in own), default=1), device=self._device)
        with torch.no_grad():
            for batch in self._batches(self._plans(rows)):
                scores_BT = compute(batch)[: len(batch.rows), : whole_NT.shape[1]]
                whole_NT[list(batch.rows), : scores_BT.shape[1]] = scores_BT.to(whole_NT.dtype)
        for module in modules:
            reshard(module)
        return whole_NT

    def total(self, part: torch.Tensor) -> torch.Tensor:
        """Summed over the ranks."""
        return total(part, self._device)

    def _plans(self, rows: Iterable[int]) -> list[list[MicroBatch]]:
        """Of each rank."""
        return self.share.plans(rows, self._max_tokens)

    def _batches(self, plans: Sequence[Sequence[MicroBatch]]) -> Iterator[TokenBatch]:
        """Of this rank."""
        for micro_batch in plans[self.share.rank]:
            yield token_batch(self.share, micro_batch, self._version, self._device)

    def _named(self, objective: Objective, batch: TokenBatch, denominators: Denominators) -> MicroLoss:
        try:
            return objective(batch, denominators)
        except ContractError as error:
            names = ", ".join(f"{place}: {self.share.rows[row].sample}" for place, row in enumerate(batch.rows))
            raise ContractError(f"{error} (batch {self._version + 1}; the sequences are {names})") from error

    def _over_ranks(self, losses: dict[str, float], metrics: dict[str, Stat], plan: list[MicroBatch]) -> StepOutcome:
        if self._num_ranks == 1:
            return StepOutcome(losses, metrics, plan)
        parts: list[tuple[dict[str, float], dict[str, Stat]] | None] = [None] * self._num_ranks
        dist.all_gather_object(parts, (losses, metrics))
        present = [part for part in parts if part is not None]
        return StepOutcome(added(part[0] for part in present), merge_metrics(part[1] for part in present), plan)


def added(parts: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Sums by name."""
    values: dict[str, list[float]] = {}
    for part in parts:
        for name, value in part.items():
            values.setdefault(name, []).append(value)
    return {name: math.fsum(each) for name, each in values.items()}

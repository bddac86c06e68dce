"""The passes over a batch's micro-batches: one with gradient, which trains, and one without, which only scores.

Letters: N rows of the whole batch, B rows of a micro-batch, T padded length.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from flashflow.algorithms.losses import Denominators, LossResult, Stat, policy_loss
from flashflow.algorithms.settings import LossConfig
from flashflow.algorithms.stats import merge_metrics
from flashflow.errors import ContractError
from flashflow.packing import MicroBatch, pack, share
from flashflow.records import Trajectory
from flashflow.trainers.batch import Consumed, TokenBatch, gradient_rows, token_batch
from flashflow.trainers.logprobs import TokenScorer
from flashflow.trainers.sharding import reshard


class StepOutcome(NamedTuple):
    """Of one optimizer step, all ranks together."""

    loss: float
    metrics: dict[str, Stat]
    plan: list[MicroBatch]


class Passes:
    """This rank's share of the passes over one batch."""

    def __init__(self, rows: Sequence[Trajectory], version: int, max_tokens: int, device: torch.device) -> None:
        """version: the trainer's at hand-over. max_tokens: of a micro-batch."""
        self.rows = rows
        self._version, self._max_tokens, self._device = version, max_tokens, device
        self._rank, self._num_ranks = dist.get_rank(), dist.get_world_size()

    def train(
        self, scorer: TokenScorer, config: LossConfig, consumed: Consumed, reference_NT: torch.Tensor | None
    ) -> StepOutcome:
        """Adds the batch's gradient to the parameters'. Rows that cannot have any are only measured: a third of the
        work."""
        # FSDP takes the mean of the ranks' gradients, where the loss wants their sum.
        denominators = Denominators(consumed.num_tokens, consumed.num_sequences).per_rank(self._num_ranks)
        with_gradient = gradient_rows(config, consumed)
        without = set(consumed.counted_rows).difference(with_gradient)
        plans = {True: self._plan(with_gradient), False: self._plan(without)}
        losses: list[float] = []
        metrics: dict[str, Stat] = {}
        for trains, plan in plans.items():
            for batch in self._batches(plan):
                with torch.set_grad_enabled(trains):
                    result = self._loss(scorer, config, consumed, reference_NT, denominators, batch)
                if trains:
                    result.loss.backward()  # type: ignore[no-untyped-call]
                losses.append(result.loss.item())
                metrics = merge_metrics([metrics, result.metrics])
        reshard(scorer)
        return self._over_ranks(math.fsum(losses) / self._num_ranks, metrics, plans[True] + plans[False])

    def score(self, scorer: TokenScorer, rows: Iterable[int]) -> torch.Tensor:
        """Log-probabilities [N, longest row] at the sampling temperature, no gradient; 0 outside the mask and for rows
        not named."""
        shape = (len(self.rows), max((row.num_tokens for row in self.rows), default=0))
        whole_NT = torch.zeros(shape, device=self._device)
        with torch.no_grad():
            for batch in self._batches(self._plan(rows)):
                logprobs_BT, _ = scorer(batch.tokens_BT, batch.mask_BT)
                length = min(shape[1], logprobs_BT.shape[1])
                # Added, for a row may come again in an idle pass, all masked out.
                whole_NT[list(batch.rows), :length] += logprobs_BT[:, :length]
        reshard(scorer)
        if self._num_ranks > 1:
            dist.all_reduce(whole_NT)
        return whole_NT

    def _plan(self, rows: Iterable[int]) -> list[MicroBatch]:
        """Of all ranks."""
        return pack([row.num_tokens for row in self.rows], self._max_tokens, rows)

    def _batches(self, plan: Sequence[MicroBatch]) -> Iterator[TokenBatch]:
        """Of this rank."""
        for micro_batch in share(plan, self._rank, self._num_ranks):
            yield token_batch(self.rows, micro_batch, self._version, self._device)

    def _loss(
        self, scorer: TokenScorer, config: LossConfig, consumed: Consumed, reference_NT: torch.Tensor | None,
        denominators: Denominators, batch: TokenBatch,
    ) -> LossResult:  # fmt: skip
        logprobs_BT, entropies_BT = scorer(
            batch.tokens_BT, batch.mask_BT, entropy_gradient=config.entropy_coefficient > 0
        )
        try:
            return policy_loss(
                config,
                logprobs=logprobs_BT,
                # One optimizer step a batch: before it, the trainer's own log-probabilities are these.
                prox_logprobs=logprobs_BT.detach(),
                behaviour_logprobs=batch.behaviour_BT,
                advantages=batch.select(consumed.advantages_NT),
                mask=batch.mask_BT,
                ref_logprobs=None if reference_NT is None else batch.select(reference_NT),
                rewards=consumed.rewards_N[list(batch.rows)].to(self._device),
                denominators=denominators,
                entropy=entropies_BT,
                lags=batch.lags_BT,
            )
        except ContractError as error:
            names = ", ".join(f"{place}: {self.rows[row].sample}" for place, row in enumerate(batch.rows))
            raise ContractError(f"{error} (batch {self._version + 1}; the sequences are {names})") from error

    def _over_ranks(self, loss: float, metrics: dict[str, Stat], plan: list[MicroBatch]) -> StepOutcome:
        if self._num_ranks == 1:
            return StepOutcome(loss, metrics, plan)
        parts: list[tuple[float, dict[str, Stat]] | None] = [None] * self._num_ranks
        dist.all_gather_object(parts, (loss, metrics))
        present = [part for part in parts if part is not None]
        return StepOutcome(math.fsum(part[0] for part in present), merge_metrics(part[1] for part in present), plan)

"""The passes over a batch's micro-batches: one with gradient, which trains, and one without, which only scores.

Letters: N rows of the whole batch, B rows of a micro-batch, T padded length.
"""

import math
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist

from flashflow.algorithms.losses import Denominators, LossResult, Stat, policy_loss
from flashflow.algorithms.settings import LossConfig
from flashflow.algorithms.stats import merge_metrics
from flashflow.errors import ContractError
from flashflow.packing import MicroBatch, pack, share
from flashflow.records import Trajectory
from flashflow.trainers.batch import Consumed, TokenBatch, token_batch
from flashflow.trainers.logprobs import TokenScorer
from flashflow.trainers.sharding import reshard


class Passes:
    """This rank's share of the passes over one batch."""

    def __init__(
        self, rows: Sequence[Trajectory], counts: Sequence[bool], version: int, max_tokens: int, device: torch.device
    ) -> None:
        """counts: the rows that are masked in. version: the trainer's at hand-over. max_tokens: of a micro-batch."""
        self.rows = rows
        self.plan: list[MicroBatch] = pack([row.num_tokens for row in rows], max_tokens)
        self._counts, self._version, self._device = counts, version, device
        self._num_ranks = dist.get_world_size()
        self._mine = share(self.plan, dist.get_rank(), self._num_ranks)

    def train(
        self, scorer: TokenScorer, config: LossConfig, consumed: Consumed, reference_NT: torch.Tensor | None
    ) -> tuple[float, dict[str, Stat]]:
        """Adds the batch's gradient to the parameters'; returns loss and metrics of the whole step, all ranks."""
        # FSDP takes the mean of the ranks' gradients, where the loss wants their sum.
        denominators = Denominators(consumed.num_tokens, consumed.num_sequences).per_rank(self._num_ranks)
        losses: list[float] = []
        metrics: dict[str, Stat] = {}
        for batch in self._batches():
            result = self._loss(scorer, config, consumed, reference_NT, denominators, batch)
            result.loss.backward()  # type: ignore[no-untyped-call]
            losses.append(result.loss.item())
            metrics = merge_metrics([metrics, result.metrics])
        return self._over_ranks(math.fsum(losses) / self._num_ranks, metrics)

    def score(self, scorer: TokenScorer) -> torch.Tensor:
        """Log-probabilities [N, longest row] at the sampling temperature, 0 outside the mask; no gradient."""
        shape = (len(self.rows), max((row.num_tokens for row in self.rows), default=0))
        whole_NT = torch.zeros(shape, device=self._device)
        with torch.no_grad():
            for batch in self._batches():
                logprobs_BT, _ = scorer(batch.tokens_BT, batch.mask_BT)
                length = min(shape[1], logprobs_BT.shape[1])
                # Added, for a row may come again in an idle pass, all masked out.
                whole_NT[list(batch.rows), :length] += logprobs_BT[:, :length]
        reshard(scorer)
        if self._num_ranks > 1:
            dist.all_reduce(whole_NT)
        return whole_NT

    def _batches(self) -> Iterator[TokenBatch]:
        for micro_batch in self._mine:
            yield token_batch(self.rows, self._counts, micro_batch, self._version, self._device)

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

    def _over_ranks(self, loss: float, metrics: dict[str, Stat]) -> tuple[float, dict[str, Stat]]:
        if self._num_ranks == 1:
            return loss, metrics
        parts: list[tuple[float, dict[str, Stat]] | None] = [None] * self._num_ranks
        dist.all_gather_object(parts, (loss, metrics))
        present = [part for part in parts if part is not None]
        return math.fsum(part[0] for part in present), merge_metrics(part[1] for part in present)

"""From losses per token to one number.

Shapes: B sequences, T tokens. Order of evaluation of every aggregation: tokens outside the mask become 0; each row is
summed over T; the row is divided by its own number of masked-in tokens (seq_mean_token_mean only); the rows are summed;
the sum is divided once by the denominator of the whole optimizer step.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from flashflow.algorithms.settings import LossConfig


@dataclass(frozen=True)
class Denominators:
    """Normaliser of all samples of one optimizer step, over all ranks and micro-batches.

    With it the losses, and the gradients, of the micro-batches add up to those of the unsplit step.
    """

    tokens: float | Tensor
    """Masked-in tokens, before any correction rejects some."""
    sequences: float | Tensor
    """Sequences with a masked-in token."""

    @classmethod
    def of(cls, mask: Tensor) -> "Denominators":
        """Counts of one batch, mask [B,T], on its device."""
        chosen = mask != 0
        return cls(chosen.sum().double(), chosen.any(1).sum().double())

    def __add__(self, other: "Denominators") -> "Denominators":
        return Denominators(self.tokens + other.tokens, self.sequences + other.sequences)

    def per_rank(self, num_ranks: int) -> "Denominators":
        """Undoes a mean of gradients over data-parallel ranks (FSDP, DDP), which then is a sum."""
        return Denominators(self.tokens / num_ranks, self.sequences / num_ranks)


def aggregate(config: LossConfig, losses: Tensor, mask: Tensor, denominators: Denominators | None = None) -> Tensor:
    """Scalar loss of `losses` [B,T] by config.aggregation. A batch with nothing masked in gives a 0 with zero gradient.

    norm_length defaults to T, the padded length; where batches of one step are padded differently it must be set
    (LossConfig.for_responses).
    """
    counts = denominators if denominators is not None else Denominators.of(mask)
    sums_B = torch.where(mask, losses, 0.0).sum(1)
    if config.aggregation == "token_mean":
        return _divided(sums_B.sum(), counts.tokens)
    if config.aggregation == "seq_mean_token_mean":
        sums_B = sums_B / mask.sum(1).clamp(min=1)
    total = _divided(sums_B.sum(), counts.sequences)
    if config.aggregation == "seq_mean_token_sum_norm":
        return total / (config.norm_length if config.norm_length is not None else mask.shape[1])
    return total


def _divided(total: Tensor, count: float | Tensor) -> Tensor:
    """total / count in total's dtype; a count of 0 (nothing masked in, so total is 0) divides by 1."""
    if isinstance(count, Tensor):
        return total / torch.where(count > 0, count, torch.ones_like(count)).to(total)
    return total / (count if count > 0 else 1.0)

"""Sampling by inverse cumulative distribution at keyed uniforms; every row by itself.

Letters: N rows, V vocabulary.
"""

import torch


def sample(
    logits_NV: torch.Tensor, temperatures_N: torch.Tensor | None, uniforms_N: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """One token per row and its log-probability.

    temperatures_N: float32 [N], 0 = greedy with the log-probability at temperature 1; None: all 1. uniforms_N: float64
    [N] in [0, 1). Token = the first whose cumulative probability exceeds u times their total, probabilities being
    exp(log_softmax(logits / temperature)) in float32, their sums in float64.
    Returns int64 [N] and float32 [N]; the log-probability is NaN where the logits are not finite.
    """
    logits_NV = logits_NV.float()
    if temperatures_N is not None:
        divisors_N1 = torch.where(temperatures_N > 0, temperatures_N, 1.0)[:, None]
        logits_NV = logits_NV / divisors_N1
    logprobs_NV = torch.log_softmax(logits_NV, dim=-1)
    cumulative_NV = logprobs_NV.exp().cumsum(dim=-1, dtype=torch.float64)
    tokens_N1 = _invert(cumulative_NV, uniforms_N[:, None])
    if temperatures_N is not None:
        greedy_N1 = logprobs_NV.argmax(dim=-1, keepdim=True)
        tokens_N1 = torch.where(temperatures_N[:, None] > 0, tokens_N1, greedy_N1)
    return tokens_N1[:, 0], logprobs_NV.gather(1, tokens_N1)[:, 0]


def _invert(cumulative_NV: torch.Tensor, uniforms_N1: torch.Tensor) -> torch.Tensor:
    total_N1 = cumulative_NV[:, -1:]
    below_total_N1 = torch.nextafter(total_N1, torch.zeros_like(total_N1))
    # u * total may round up to total, which no cumulative probability exceeds.
    threshold_N1 = torch.minimum(uniforms_N1 * total_N1, below_total_N1)
    tokens_N1 = torch.searchsorted(cumulative_NV, threshold_N1, right=True)
    # Only rows without a finite total can still point past the end.
    return tokens_N1.clamp_(max=cumulative_NV.shape[1] - 1)

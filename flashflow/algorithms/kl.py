"""KL divergence to the reference model, from samples. Shapes: B sequences, T tokens.

Estimators after Schulman, "Approximating KL divergence" (2020); which of them has the right gradient as a loss:
k2, for samples of pi.
"""

from typing import Literal

import torch
from torch import Tensor

from flashflow.algorithms.ratios import masked

MAX_LOG_RATIO = 10.0
MAX_IMPORTANCE = 2.0


def kl_estimate(kind: Literal["k1", "k2", "k3"], *, logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor) -> Tensor:
    """Estimate per token of KL(pi | ref) [B,T], 0 outside the mask; gradient through logprobs only.

    With d = ref - logp, clamped to +-10: k1 = -d, k2 = d^2/2, k3 = exp(d) - d - 1.
    """
    chosen = mask != 0
    difference = masked(ref_logprobs.detach().to(logprobs), chosen) - masked(logprobs, chosen)
    d = difference.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    if kind == "k1":
        return -d
    if kind == "k2":
        return d.square() / 2
    if kind == "k3":
        return d.exp() - d - 1
    raise ValueError(f"unknown KL estimator {kind!r}: use k1, k2 or k3")


def kl_importance(rho: Tensor) -> Tensor:
    """sg(min(rho, 2)): turns samples of mu into samples of pi, up to the truncation."""
    return rho.detach().clamp(max=MAX_IMPORTANCE)


def kl_penalty(*, behaviour_logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor) -> Tensor:
    """Placement reward: log(mu/ref) per token [B,T], 0 outside the mask, no gradient.

    To be taken off the rewards, times the coefficient: summed per sequence before a group estimator, per token for gae
    and reinforce_pp (advantages.token_advantages does either).
    """
    with torch.no_grad():
        return kl_estimate("k1", logprobs=behaviour_logprobs, ref_logprobs=ref_logprobs, mask=mask)

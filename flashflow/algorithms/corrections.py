"""Weights that correct the mismatch of engine and trainer, and staleness. Shapes: B sequences, T tokens.

All are importance weights w = prox/mu, bounded in one way or another; token/mask with .5 and 5 is IcePop.
"""

import math

import torch
from torch import Tensor

from flashflow.algorithms.ratios import sequence_log_ratio
from flashflow.algorithms.settings import CorrectionConfig


def correction_weights(config: CorrectionConfig, *, log_w: Tensor, mask: Tensor) -> Tensor:
    """Detached factor of each token's loss, [B,T] at token level, else [B,1] broadcast; 0 where rejected.

    log_w [B,T] is prox - behaviour, 0 outside the mask (bool). Levels: token w_t; sequence exp(sum log w); geometric
    exp(mean log w). Kinds: truncate min(w, C); mask w inside its bounds else 0; reject 1 inside else 0; none 1.
    """
    log_w = log_w.detach()
    weights = _kind(config, _level(config, log_w, mask).exp())
    if config.veto > 0:
        vetoed = (mask & (log_w < math.log(config.veto))).any(1, keepdim=True)
        weights = torch.where(vetoed, 0.0, weights)
    return weights


def _level(config: CorrectionConfig, log_w: Tensor, mask: Tensor) -> Tensor:
    if config.level == "token":
        return log_w
    return sequence_log_ratio(log_w, mask, mean=config.level == "geometric")


def _kind(config: CorrectionConfig, weights: Tensor) -> Tensor:
    if config.kind == "none":
        return torch.ones_like(weights)
    lower, upper = config.bounds
    if config.kind == "truncate":
        return weights.clamp(max=upper)
    inside = (weights >= lower) & (weights <= upper)
    return torch.where(inside, weights if config.kind == "mask" else 1.0, 0.0)

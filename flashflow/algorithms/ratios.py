"""The three log-probabilities of a token and their ratios, safe outside the mask.

Shapes: B sequences, T tokens. pi is the current policy, prox the trainer's own policy before the first optimizer step
on the batch, mu (behaviour) what the engine recorded.
"""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from flashflow.algorithms.settings import LossConfig
from flashflow.errors import ContractError

MAX_LOG_RATIO = 20.0


@dataclass(frozen=True)
class Terms:
    """What a surrogate may be built from. Every tensor is [B,T] and 0 (ratios: 1) outside the mask."""

    config: LossConfig
    mask: Tensor
    """Bool."""
    advantages: Tensor
    """A; no gradient."""
    logp: Tensor
    """log pi; has gradient."""
    behaviour: Tensor
    """log mu; no gradient."""
    log_r: Tensor
    """logp - anchor; has gradient. With neither anchor nor prox pass it is log_rho."""
    log_w: Tensor
    """prox - behaviour; no gradient. 0 with anchor behaviour, or without a prox pass."""
    log_rho: Tensor
    """logp - behaviour; has gradient."""
    rewards: Tensor | None
    """[B] raw task rewards."""

    @cached_property
    def r(self) -> Tensor:
        return self.log_r.exp()

    @cached_property
    def w(self) -> Tensor:
        return self.log_w.exp()

    @cached_property
    def rho(self) -> Tensor:
        return self.log_rho.exp()

    def over_sequence(self, log_ratio: Tensor) -> Tensor:
        """exp of the sum over the sequence's tokens, [B,1]."""
        return sequence_log_ratio(log_ratio, self.mask, mean=False).exp()


def sequence_log_ratio(log_ratio: Tensor, mask: Tensor, *, mean: bool) -> Tensor:
    """Sum or mean over masked-in tokens, clamped, [B,1]; `log_ratio` [B,T] is 0 outside the mask."""
    total = log_ratio.sum(1, keepdim=True)
    if mean:
        total = total / mask.sum(1, keepdim=True).clamp(min=1)
    return total.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def masked(values: Tensor, mask: Tensor) -> Tensor:
    """0 outside the mask, whatever stood there; the gradient there is 0 too."""
    return torch.where(mask, values, torch.zeros((), dtype=values.dtype, device=values.device))


def log_ratio(numerator: Tensor, denominator: Tensor) -> Tensor:
    """Difference of masked log-probabilities, clamped so that exp stays finite."""
    return (numerator - denominator).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def make_terms(
    config: LossConfig,
    *,
    logprobs: Tensor,
    prox_logprobs: Tensor | None,
    behaviour_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    rewards: Tensor | None,
) -> Terms:
    """Masks first, then takes ratios, in the dtype and on the device of logprobs.

    Raises ContractError on shapes that do not fit or a missing prox pass.
    """
    chosen = mask != 0
    if advantages.dim() == 1:
        advantages = advantages.unsqueeze(1).expand(logprobs.shape)
    check_shapes(logprobs, prox_logprobs=prox_logprobs, behaviour_logprobs=behaviour_logprobs, mask=mask,
                 advantages=advantages)  # fmt: skip
    if config.needs_prox and prox_logprobs is None:
        raise ContractError(
            f"surrogate {config.surrogate} with anchor {config.anchor} needs prox_logprobs: pass the trainer's own "
            "log-probabilities (logprobs.detach() when a batch gets one optimizer step)"
        )
    logp = masked(logprobs, chosen)
    behaviour = masked(behaviour_logprobs.detach().to(logp), chosen)
    log_rho = log_ratio(logp, behaviour)
    log_r, log_w = log_rho, torch.zeros_like(behaviour)
    if config.anchor == "prox" and prox_logprobs is not None:
        prox = masked(prox_logprobs.detach().to(logp), chosen)
        log_r, log_w = log_ratio(logp, prox), log_ratio(prox, behaviour)
    return Terms(
        config=config, mask=chosen, advantages=masked(advantages.detach().to(logp), chosen),
        logp=logp, behaviour=behaviour,
        log_r=log_r, log_w=log_w, log_rho=log_rho, rewards=None if rewards is None else rewards.detach(),
    )  # fmt: skip


def check_shapes(like: Tensor, **tensors: Tensor | None) -> None:
    """All [B,T] with B, T >= 1. Raises ContractError naming the one that is not."""
    if like.dim() != 2 or like.numel() == 0:
        raise ContractError(f"per-token tensors must be [B,T] with B and T at least 1, got {list(like.shape)}")
    for name, tensor in tensors.items():
        if tensor is not None and tensor.shape != like.shape:
            raise ContractError(f"{name} has shape {list(tensor.shape)}, expected {list(like.shape)}")


def any_nan(mask: Tensor, *tensors: Tensor | None) -> Tensor:
    """Scalar bool on the device: a NaN inside the mask in any of them."""
    flags = [torch.isnan(tensor) & mask for tensor in tensors if tensor is not None]
    return torch.stack([flag.any() for flag in flags]).any()


def raise_for_nan(mask: Tensor, **tensors: Tensor | None) -> None:
    """Raises ContractError naming tensor, sequence and token of the first NaN inside the mask."""
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        where = (torch.isnan(tensor) & mask).nonzero()
        if len(where):
            sequence, token = where[0].tolist()
            raise ContractError(
                f"{name} of sequence {sequence} is NaN at token {token}, inside the mask: the forward pass, the engine "
                "or the reward produced it; mask the sample or find its source"
            )

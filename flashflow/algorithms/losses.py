"""The policy loss and the value loss: surrogate -> correction -> aggregation, then KL and entropy. Pure.

Shapes: B sequences, T tokens. Called once per micro-batch; one transfer from the device, for the metrics.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from flashflow.algorithms.aggregation import Denominators, aggregate
from flashflow.algorithms.corrections import correction_weights
from flashflow.algorithms.kl import kl_estimate, kl_importance
from flashflow.algorithms.metrics import MetricBoard
from flashflow.algorithms.ratios import Terms, any_nan, check_shapes, make_terms, masked, raise_for_nan
from flashflow.algorithms.settings import LossConfig
from flashflow.algorithms.stats import Stat, merge_metrics
from flashflow.algorithms.surrogates import surrogate_loss
from flashflow.errors import ContractError

__all__ = ["Denominators", "LossConfig", "LossResult", "Stat", "policy_loss", "value_loss"]


@dataclass(frozen=True)
class LossResult:
    """Loss of one micro-batch, and its metrics."""

    loss: Tensor
    """Scalar, to be minimised. The losses of the micro-batches of a step add up to the step's."""
    metrics: dict[str, Stat]
    """Merge over micro-batches and ranks with stats.merge_metrics, read with stats.summarise."""

    def merge(self, other: "LossResult") -> "LossResult":
        """Sum of the losses, union of the metrics."""
        return LossResult(self.loss + other.loss, merge_metrics([self.metrics, other.metrics]))


def policy_loss(
    config: LossConfig,
    *,
    logprobs: Tensor,
    prox_logprobs: Tensor | None,
    behaviour_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    ref_logprobs: Tensor | None = None,
    rewards: Tensor | None = None,
    denominators: Denominators | None = None,
    entropy: Tensor | None = None,
    lags: Tensor | None = None,
) -> LossResult:
    """Loss of the policy on one micro-batch.

    Args:
        logprobs: [B,T] of the current policy at the sampling temperature, nats; has gradient.
        prox_logprobs: [B,T] of the trainer before its first step on the batch; None where config.needs_prox is false.
        behaviour_logprobs: [B,T] as recorded by the engine.
        advantages: [B,T], or [B] to be broadcast.
        mask: [B,T], non-zero where the policy sampled the token and it is to be trained.
        ref_logprobs: [B,T] of the reference model; needed when kl_coefficient > 0 in placement loss.
        rewards: [B] raw task rewards; needed by topr and weighted_topr.
        denominators: of the whole optimizer step; None: this batch is the whole step.
        entropy: [B,T] of the policy at each token, nats; needed when entropy_coefficient > 0.
        lags: [B,T] versions between sampling and consumption; adds the mismatch by lag to the metrics.

    loss = scale * aggregate(weight * L) + kl_coefficient * aggregate(KL) - entropy_coefficient * aggregate(entropy).

    Raises:
        ContractError: a NaN inside the mask, a missing tensor, or shapes that do not fit.
    """
    check_shapes(logprobs, ref_logprobs=ref_logprobs, entropy=entropy, lags=lags)
    terms = make_terms(
        config, logprobs=logprobs, prox_logprobs=prox_logprobs, behaviour_logprobs=behaviour_logprobs,
        advantages=advantages, mask=mask, rewards=rewards,
    )  # fmt: skip
    board = MetricBoard()
    loss = config.scale * aggregate(config, _corrected_surrogate(terms, board), terms.mask, denominators)
    loss = loss + _kl_term(terms, ref_logprobs, denominators, board)
    loss = loss - _entropy_term(terms, entropy, denominators, board)
    _ratio_metrics(terms, board, has_prox=prox_logprobs is not None, lags=lags)
    inputs = {
        "logprobs": logprobs,
        "prox_logprobs": prox_logprobs if config.anchor == "prox" else None,
        "behaviour_logprobs": behaviour_logprobs,
        "advantages": advantages if advantages.dim() == 2 else advantages.unsqueeze(1),
        "ref_logprobs": ref_logprobs,
        "rewards": None if rewards is None else rewards.unsqueeze(1),
        "entropy": entropy,
        "log ratio (of two infinities)": terms.log_r + terms.log_w + terms.log_rho,
    }
    metrics, broken = board.collect(any_nan(terms.mask, *inputs.values()))
    if broken:
        raise_for_nan(terms.mask, **inputs)
    return LossResult(loss, metrics)


def _corrected_surrogate(terms: Terms, board: MetricBoard) -> Tensor:
    """Losses per token [B,T], weighted; reports the shares of tokens clipped, rejected and reweighted."""
    losses, cut = surrogate_loss(terms)
    losses = losses.expand(terms.mask.shape)
    if cut is not None:
        board.add("clip_fraction", cut.expand(terms.mask.shape), terms.mask)
    correction = terms.config.correction
    if not correction.active:
        return losses
    weights = correction_weights(correction, log_w=terms.log_w, mask=terms.mask).expand(terms.mask.shape)
    board.add("masked_fraction", weights == 0, terms.mask)
    board.add("correction_weight", weights, terms.mask)
    return weights * losses


def _kl_term(terms: Terms, ref: Tensor | None, denominators: Denominators | None, board: MetricBoard) -> Tensor:
    config = terms.config
    if ref is not None:
        k3 = kl_estimate("k3", logprobs=terms.logp.detach(), ref_logprobs=ref, mask=terms.mask)
        board.add("kl", k3, terms.mask)
    if config.kl_coefficient == 0 or config.kl_placement == "reward":
        return terms.logp.new_zeros(())
    if ref is None:
        raise ContractError(
            f"kl_coefficient = {config.kl_coefficient} needs ref_logprobs: load the reference model, or set it to 0"
        )
    estimate = kl_estimate(config.kl_estimator, logprobs=terms.logp, ref_logprobs=ref, mask=terms.mask)
    if config.kl_importance:
        estimate = kl_importance(terms.rho) * estimate
    return config.kl_coefficient * aggregate(config, estimate, terms.mask, denominators)


def _entropy_term(
    terms: Terms, entropy: Tensor | None, denominators: Denominators | None, board: MetricBoard
) -> Tensor:
    coefficient = terms.config.entropy_coefficient
    if entropy is not None:
        board.add("entropy", entropy, terms.mask)
    if coefficient == 0:
        return terms.logp.new_zeros(())
    if entropy is None:
        raise ContractError(f"entropy_coefficient = {coefficient} needs entropy [B,T]: pass it, or set it to 0")
    return coefficient * aggregate(terms.config, masked(entropy, terms.mask), terms.mask, denominators)


def _ratio_metrics(terms: Terms, board: MetricBoard, *, has_prox: bool, lags: Tensor | None) -> None:
    """r, w, rho; squares for the effective sample size; k3 of the mismatch, overall and by lag."""
    has_w = has_prox and terms.config.anchor == "prox"
    board.add("empty_batch", ~terms.mask.any().reshape(1), torch.ones_like(terms.mask[:1, 0]))
    board.add("rho", terms.rho, terms.mask)
    board.add("rho_squared", terms.rho.square(), terms.mask)
    if has_w or terms.config.anchor == "behaviour":
        board.add("r", terms.r, terms.mask)
        board.add("w", terms.w, terms.mask)
    if has_w:
        board.add("w_squared", terms.w.square(), terms.mask)
    log_mismatch = terms.log_w if has_w else terms.log_rho.detach()
    mismatch = log_mismatch.exp() - log_mismatch - 1
    board.add("mismatch_k3", mismatch, terms.mask)
    if lags is not None:
        board.add_by_lag("mismatch_k3", mismatch, terms.mask, lags)


def value_loss(
    config: LossConfig,
    *,
    values: Tensor,
    old_values: Tensor,
    returns: Tensor,
    mask: Tensor,
    denominators: Denominators | None = None,
) -> LossResult:
    """Half the larger of (v - R)^2 and (clip(v, v_old +- value_clip) - R)^2, aggregated as the policy loss is.

    All [B,T]; `values` has gradient. Raises ContractError on a NaN inside the mask. PPO's common clipped form.
    """
    check_shapes(values, old_values=old_values, returns=returns, mask=mask)
    chosen = mask != 0
    v, old, target = masked(values, chosen), masked(old_values.detach(), chosen), masked(returns.detach(), chosen)
    plain = (v - target).square()
    moved = v - old
    bounded = (old + moved.clamp(-config.value_clip, config.value_clip) - target).square()
    loss = aggregate(config, torch.maximum(plain, bounded) / 2, chosen, denominators)
    board = MetricBoard()
    board.add("value", v, chosen)
    board.add("value_error_squared", plain, chosen)
    # Within the range the two differ by rounding, which is no clipping.
    board.add("value_clip_fraction", (moved.abs() > config.value_clip) & (bounded > plain), chosen)
    metrics, broken = board.collect(any_nan(chosen, values, old_values, returns))
    if broken:
        raise_for_nan(chosen, values=values, old_values=old_values, returns=returns)
    return LossResult(loss, metrics)

"""Which option acts in which algorithm: what does not act is refused by name rather than ignored. Free of torch."""

from flashflow.algorithms.settings import ANCHORED, CLIP_DEFAULTS, AdvantageConfig, LossConfig

ADVANTAGE_OPTIONS = tuple(AdvantageConfig.model_fields)
LOSS_OPTIONS = tuple(name for name in LossConfig.model_fields if name != "scale")
"""`scale` follows from opmd_tau and is no option."""

ALWAYS = frozenset({"estimator", "loss", "aggregation", "kl_coefficient", "entropy_coefficient", "correction"})
"""Refusals of the correction are LossConfig.correction_problem's."""

OF_ESTIMATOR: dict[str, frozenset[str]] = {
    "gae": frozenset({"gamma", "lam", "value_clip"}),
    "reinforce_pp": frozenset({"gamma"}),
    "opmd": frozenset({"opmd_tau", "opmd_baseline"}),
}

OF_SURROGATE: dict[str, frozenset[str]] = {
    "clip": frozenset({"dual_clip"}),
    "decoupled": frozenset({"dual_clip", "w_bound"}),
    "tis": frozenset({"rho_low", "rho_high"}),
    "topr": frozenset({"rho_low", "rho_high", "level"}),
    "weighted_topr": frozenset({"rho_low", "rho_high", "level", "weight_positive", "weight_negative"}),
    "kimi": frozenset({"kimi_tau"}),
    "dppo_tv": frozenset({"tv_bound"}),
}

_OWN_LOSS = frozenset(LOSS_OPTIONS) - {
    "surrogate", "norm_length", "kl_estimator", "kl_placement", "kl_importance", "value_clip",
}  # fmt: skip
"""A loss of one's own receives the whole LossConfig and may read any option that shapes a surrogate."""


def used_options(advantage: AdvantageConfig, loss: LossConfig) -> frozenset[str]:
    """Names of the options that change the advantages, the loss or its metrics in this algorithm."""
    return ALWAYS | OF_ESTIMATOR.get(advantage.estimator, frozenset()) | _of_loss(loss) | _of_regularisers(loss)


def _of_loss(loss: LossConfig) -> frozenset[str]:
    norm = frozenset({"norm_length"}) if loss.aggregation == "seq_mean_token_sum_norm" else frozenset()
    if loss.loss is not None:
        return norm | _OWN_LOSS
    used = norm | {"surrogate"} | OF_SURROGATE.get(loss.surrogate, frozenset())
    if loss.surrogate in CLIP_DEFAULTS:
        used |= {"clip_low", "clip_high"}
    return used | {"anchor"} if loss.surrogate in ANCHORED else used


def _of_regularisers(loss: LossConfig) -> frozenset[str]:
    if loss.kl_coefficient == 0:
        return frozenset()
    placed = frozenset({"kl_placement"})
    return placed | {"kl_estimator", "kl_importance"} if loss.kl_placement == "loss" else placed


def why_unused(name: str, advantage: AdvantageConfig, loss: LossConfig) -> str:
    """The remedy that goes with the refusal of an option."""
    if name == "norm_length":
        return f"aggregation {loss.aggregation} has no constant length: use seq_mean_token_sum_norm, or remove it"
    if name in ("kl_estimator", "kl_placement", "kl_importance") and loss.kl_coefficient == 0:
        return "kl_coefficient is 0, so there is no KL term: set kl_coefficient, or remove it"
    if name in ("kl_estimator", "kl_importance"):
        return "kl_placement reward takes the log-ratio as it is: use kl_placement loss, or remove it"
    if name == "surrogate":
        return f"loss = {loss.loss} replaces the surrogate: remove one"
    users = [key for key, names in (OF_ESTIMATOR | OF_SURROGATE).items() if name in names]
    if name in ("clip_low", "clip_high"):
        users = list(CLIP_DEFAULTS)
    if name == "anchor":
        users = sorted(ANCHORED)
    return (
        f"estimator {advantage.estimator} with surrogate {loss.surrogate} does not use it, "
        f"only {', '.join(users)} would: remove it"
    )

"""Settings of the algorithms. Free of torch, so that a config loads fast; the functions are beside it."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, NonNegativeFloat, PositiveFloat

Estimator = Literal["grpo", "dr_grpo", "rloo", "reinforce_pp", "reinforce_pp_baseline", "gae", "opmd"]
Surrogate = Literal[
    "clip", "decoupled", "tis", "topr", "weighted_topr", "cispo", "gspo", "gspo_token", "reinforce", "kimi", "dppo_tv"
]
Aggregation = Literal["token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "seq_mean_token_sum_norm"]
GROUP_BASELINES = frozenset({"grpo", "dr_grpo", "rloo", "reinforce_pp_baseline", "opmd"})
SIGNAL_TOLERANCE = 1e-6
"""A group whose rewards span no more than this has no signal."""


class Settings(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class CorrectionConfig(Settings):
    """Correction of the engine-trainer and staleness mismatch: multiplies a surrogate that uses r."""

    kind: Literal["none", "truncate", "mask", "reject"] = "none"
    level: Literal["token", "sequence", "geometric"] = "token"
    lower: NonNegativeFloat | None = None
    """Lower bound of mask and reject; default .5 (token), .999 (geometric)."""
    upper: PositiveFloat | None = None
    """Cap of truncate (default 2.0); upper bound of mask and reject; default 2 (token), 1.001 (geometric)."""
    veto: NonNegativeFloat = 0.0
    """A token with w below it zeroes its sequence; 0 is off."""


class AdvantageConfig(Settings):
    """How rewards become advantages (ALGORITHMS: `estimator`)."""

    estimator: Estimator = "grpo"
    gamma: float = Field(1.0, ge=0, le=1)
    """gae, reinforce_pp."""
    lam: float = Field(0.95, ge=0, le=1)
    """gae."""
    opmd_tau: PositiveFloat = 1.0
    opmd_baseline: Literal["mean", "logmeanexp"] = "mean"


class LossConfig(Settings):
    """How advantages become a loss. None means: the surrogate's own default."""

    surrogate: Surrogate = "clip"
    anchor: Literal["prox", "behaviour"] = "prox"
    aggregation: Aggregation = "seq_mean_token_mean"
    norm_length: PositiveFloat | None = None
    """Constant C of seq_mean_token_sum_norm; default the maximum response length."""
    clip_low: NonNegativeFloat | None = None
    clip_high: NonNegativeFloat | None = None
    dual_clip: float | None = Field(None, gt=1)
    w_bound: PositiveFloat = 5.0
    """decoupled: truncation of w."""
    rho_low: NonNegativeFloat = 0.0
    rho_high: PositiveFloat = 1.0
    """tis, topr, weighted_topr: clip of rho."""
    level: Literal["token", "sequence"] = "sequence"
    """topr: rho of the trajectory or of the token."""
    weight_positive: NonNegativeFloat = 1.0
    weight_negative: NonNegativeFloat = 1.0
    kimi_tau: NonNegativeFloat = 0.1
    tv_bound: PositiveFloat = 0.2
    """dppo_tv: d."""
    scale: PositiveFloat = 1.0
    """opmd: 1/(1+tau)."""
    kl_coefficient: NonNegativeFloat = 0.0
    kl_estimator: Literal["k1", "k2", "k3"] = "k2"
    kl_placement: Literal["loss", "reward"] = "loss"
    entropy_coefficient: NonNegativeFloat = 0.0
    correction: CorrectionConfig = CorrectionConfig()

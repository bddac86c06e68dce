"""Settings of the algorithms. Free of torch, so that a config loads fast; the functions are beside it."""

from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, NonNegativeFloat, PositiveFloat, field_validator, model_validator

Estimator = Literal["grpo", "dr_grpo", "rloo", "reinforce_pp", "reinforce_pp_baseline", "gae", "opmd"]
Surrogate = Literal[
    "clip", "decoupled", "tis", "topr", "weighted_topr", "cispo", "gspo", "gspo_token", "reinforce", "kimi", "dppo_tv"
]
Aggregation = Literal["token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "seq_mean_token_sum_norm"]
GROUP_BASELINES = frozenset({"grpo", "dr_grpo", "rloo", "reinforce_pp_baseline", "opmd"})
SIGNAL_TOLERANCE = 1e-6
"""A group whose rewards span no more than this has no signal."""

ANCHORED = frozenset({"clip", "cispo", "gspo", "gspo_token"})
"""Surrogates built on r, whose anchor may be chosen. (decoupled uses r too, but needs prox apart from behaviour.)"""
OWN_RHO = frozenset({"tis", "topr", "weighted_topr", "dppo_tv"})
"""Surrogates that weight by rho themselves and need no prox pass."""
SELF_CORRECTING = OWN_RHO | {"decoupled"}
"""Surrogates on which a correction would weight twice."""
CLIP_DEFAULTS: dict[str, tuple[float | None, float | None]] = {
    "clip": (0.2, 0.2),
    "decoupled": (0.2, 0.2),
    "cispo": (None, 0.2),
    "gspo": (3e-4, 4e-4),
    "gspo_token": (3e-4, 4e-4),
}
"""(el, eh) of each surrogate that clips; None: no bound on that side."""


class Settings(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)


class CorrectionConfig(Settings):
    """Correction of the engine-trainer and staleness mismatch: multiplies the surrogate's loss per token."""

    kind: Literal["none", "truncate", "mask", "reject"] = "none"
    level: Literal["token", "sequence", "geometric"] = "token"
    lower: NonNegativeFloat | None = None
    """Lower bound of mask and reject; default .5 (token), .999 (geometric); to be set at sequence level."""
    upper: PositiveFloat | None = None
    """Cap of truncate (default 2.0); upper bound of mask and reject; default 2 (token), 1.001 (geometric)."""
    veto: NonNegativeFloat = 0.0
    """A token with w below it (1e-4 is usual) zeroes its sequence; 0 is off. Works with every kind, also none."""

    @model_validator(mode="after")
    def _bounds_fit_the_kind(self) -> Self:
        if self.kind == "none" and (self.lower is not None or self.upper is not None or self.level != "token"):
            raise ValueError(
                "level, lower and upper have no effect with kind none: set kind to truncate, mask or reject"
            )
        if self.kind == "truncate" and self.lower is not None:
            raise ValueError(
                f"lower = {self.lower} has no effect with kind truncate: use mask or reject, or leave it out"
            )
        windowed = self.kind in ("mask", "reject")
        if windowed and self.level == "sequence" and (self.lower is None or self.upper is None):
            raise ValueError(
                f"kind {self.kind} at level sequence needs lower and upper: the spread of a sequence's weight grows "
                "with its length, so no default fits"
            )
        if windowed and self.bounds[0] >= self.bounds[1]:
            raise ValueError(f"lower = {self.bounds[0]} must be below upper = {self.bounds[1]}")
        return self

    @property
    def active(self) -> bool:
        return self.kind != "none" or self.veto > 0

    @property
    def bounds(self) -> tuple[float, float]:
        """(lower, upper) with the defaults of kind and level filled in; lower is 0 for truncate."""
        if self.kind == "truncate":
            return 0.0, self.upper if self.upper is not None else 2.0
        lower, upper = (0.999, 1.001) if self.level == "geometric" else (0.5, 2.0)
        return self.lower if self.lower is not None else lower, self.upper if self.upper is not None else upper


class AdvantageConfig(Settings):
    """How rewards become advantages (ALGORITHMS: `estimator`)."""

    estimator: Estimator = "grpo"
    gamma: float = Field(1.0, ge=0, le=1)
    """gae, reinforce_pp: discount per sampled token."""
    lam: float = Field(0.95, ge=0, le=1)
    """gae."""
    opmd_tau: PositiveFloat = 1.0
    """opmd: temperature of the baseline; also scales the loss by 1/(1 + tau)."""
    opmd_baseline: Literal["mean", "logmeanexp"] = "mean"


class LossConfig(Settings):
    """How advantages become a loss. None means: the surrogate's own default."""

    surrogate: Surrogate = "clip"
    loss: str | None = Field(None, pattern=r"^[^:]+:[A-Za-z_]\w*$")
    """`module:function` or `file.py:function` of a surrogate of one's own, instead of `surrogate`: takes
    algorithms.ratios.Terms, returns losses per token."""
    anchor: Literal["prox", "behaviour"] = "prox"
    aggregation: Aggregation = "seq_mean_token_mean"
    norm_length: PositiveFloat | None = None
    """Constant C of seq_mean_token_sum_norm; default the maximum response length (see `for_responses`)."""
    clip_low: NonNegativeFloat | None = None
    clip_high: NonNegativeFloat | None = None
    dual_clip: float | None = Field(None, gt=1)
    """clip, decoupled: c, usually 3.0; None is off."""
    w_bound: PositiveFloat = 5.0
    """decoupled: truncation of w."""
    rho_low: NonNegativeFloat = 0.0
    rho_high: PositiveFloat = 1.0
    """tis, topr, weighted_topr: clip of rho."""
    level: Literal["token", "sequence"] = "sequence"
    """topr, weighted_topr: rho of the trajectory or of the token."""
    weight_positive: NonNegativeFloat = 1.0
    weight_negative: NonNegativeFloat = 1.0
    """weighted_topr: factors of the samples with positive reward and of the rest."""
    kimi_tau: NonNegativeFloat = 0.1
    tv_bound: PositiveFloat = 0.2
    """dppo_tv: d."""
    scale: PositiveFloat = 1.0
    """opmd: 1/(1+tau), which `presets.resolve` derives."""
    kl_coefficient: NonNegativeFloat = 0.0
    kl_estimator: Literal["k1", "k2", "k3"] = "k2"
    kl_placement: Literal["loss", "reward"] = "loss"
    kl_importance: bool = False
    """Placement loss: weight each token by sg(min(rho, 2)); `presets.resolve` turns it on at alpha > 0."""
    entropy_coefficient: NonNegativeFloat = 0.0
    value_clip: PositiveFloat = 0.2
    """gae: range the critic's values may move from the old ones."""
    correction: CorrectionConfig = CorrectionConfig()

    @field_validator("correction", mode="before")
    @classmethod
    def _kind_alone(cls, value: object) -> object:
        """`correction: none` is short for `correction: {kind: none}`."""
        return {"kind": value} if isinstance(value, str) else value

    @model_validator(mode="after")
    def _options_fit_the_surrogate(self) -> Self:
        if self.rho_low >= self.rho_high:
            raise ValueError(f"rho_low = {self.rho_low} must be below rho_high = {self.rho_high}")
        if self.anchor == "behaviour" and self.loss is None and self.surrogate not in ANCHORED:
            raise ValueError(
                f"anchor behaviour has no effect: surrogate {self.surrogate} does not use it, only "
                f"{', '.join(sorted(ANCHORED))} would: remove it"
            )
        problem = self.correction_problem
        if problem:
            raise ValueError(problem)
        return self

    @property
    def correction_problem(self) -> str:
        """Why the correction may not be combined with the rest; empty when it may."""
        if not self.correction.active:
            return ""
        if self.loss is None and self.surrogate in SELF_CORRECTING:
            return f"surrogate {self.surrogate} weights by the ratio itself, a correction would weight twice: remove it"
        if self.anchor == "behaviour":
            return "anchor behaviour puts the whole ratio into r, so w is 1 and nothing is left to correct: remove one"
        return ""

    @property
    def clip_bounds(self) -> tuple[float | None, float | None]:
        """(el, eh): what is set, else the surrogate's default; None is no bound."""
        low, high = CLIP_DEFAULTS.get(self.surrogate, (None, None))
        return (
            self.clip_low if self.clip_low is not None else low,
            self.clip_high if self.clip_high is not None else high,
        )

    @property
    def needs_prox(self) -> bool:
        """False: policy_loss takes prox_logprobs=None, and the trainer may save the pass that computes them."""
        return self.anchor == "prox" and (self.loss is not None or self.surrogate not in OWN_RHO)

    @property
    def needs_reference(self) -> bool:
        return self.kl_coefficient > 0

    @property
    def handles_off_policy(self) -> bool:
        """Behaviour log-probabilities change the gradient, so stale samples are not taken for fresh ones."""
        if self.correction.kind != "none":
            return True
        if self.loss is not None:
            return self.anchor == "behaviour"
        if self.surrogate == "weighted_topr":
            return self.weight_negative > 0
        return self.surrogate in SELF_CORRECTING or (self.surrogate in ANCHORED and self.anchor == "behaviour")

    def for_responses(self, max_response_tokens: int) -> "LossConfig":
        """This config with norm_length filled in where the aggregation needs it and it was left to its default."""
        if self.aggregation != "seq_mean_token_sum_norm" or self.norm_length is not None:
            return self
        return self.model_copy(update={"norm_length": float(max_response_tokens)})


class FilterConfig(Settings):
    """Which complete groups are not trained but replaced by another, by the raw task rewards of their members."""

    dynamic: bool = False
    """Dynamic sampling (DAPO 2503.14476 eq. 11): a group without signal is replaced."""
    mean_lower: float | None = None
    """A group is replaced unless its mean reward is above; None: no bound."""
    mean_upper: float | None = None
    """A group is replaced unless its mean reward is below; None: no bound."""
    max_filtered_fraction: float = Field(0.9, ge=0, lt=1)
    """Share past which the run stops: replaced groups since the last batch, of these and the complete ones that wait,
    which count as a batch and as 16 at least."""

    @property
    def active(self) -> bool:
        return bool(self.names)

    @property
    def names(self) -> list[str]:
        """Of the fields that filter, with their values, as the config has them."""
        fields = {"dynamic": self.dynamic or None, "mean_lower": self.mean_lower, "mean_upper": self.mean_upper}
        return [f"filters.{name} {str(value).lower()}" for name, value in fields.items() if value is not None]


NO_FILTERS = FilterConfig()


class ShapingConfig(Settings):
    """What becomes of long responses, in the advantage alone; lengths in sampled tokens of all turns."""

    budget: int | None = Field(None, ge=1)
    """L of the overlong penalty (see rewards.overlong_penalty); None: no penalty."""
    cache: int = Field(1, ge=1)
    """c of the overlong penalty."""
    mask_truncated: bool = False
    """Truncated samples leave the loss's numerator and denominator; their reward stays in the group's baseline."""


NO_SHAPING = ShapingConfig()


class ReplayConfig(Settings):
    """Replay of groups with signal in place of groups without."""

    capacity: int = Field(256, ge=1)
    """Groups kept; first in, first out."""
    min_std: NonNegativeFloat = 0.1
    """Kept iff the population standard deviation of the raw rewards is above it."""
    min_mean: float = 0.5
    """Kept iff the mean of the raw rewards is above it; for rewards in [0, 1]."""
    max_replay_staleness: int = Field(4, ge=1)
    """Versions a replayed group may be behind the trainer, counted from its oldest token."""

"""The algorithms by name. A preset is data: the settings of its advantage and its loss, and where they come from.

Each docstring cites paper and equation, and says where the paper is silent and what is chosen here. Free of torch.
"""

from collections.abc import Callable

from flashflow.algorithms.settings import AdvantageConfig, LossConfig

Algorithm = tuple[AdvantageConfig, LossConfig]

DR_GRPO = AdvantageConfig(estimator="dr_grpo")
GRPO = AdvantageConfig(estimator="grpo")
GAE = AdvantageConfig(estimator="gae")

PRESETS: dict[str, Algorithm] = {}
"""Name -> (AdvantageConfig, LossConfig)."""


def preset(make: Callable[[], Algorithm]) -> Callable[[], Algorithm]:
    """Registers a preset under its function's name."""
    PRESETS[make.__name__] = make()
    return make


@preset
def grpo() -> Algorithm:
    """DeepSeekMath (2402.03300) eq. 3; its KL is k3 at 0.04 in the loss (eq. 4), off here."""
    return GRPO, LossConfig(surrogate="clip")


@preset
def dr_grpo() -> Algorithm:
    """Understanding R1-Zero-like training (2503.20783): neither the length nor the deviation of a group divides. The
    paper leaves the constant that does to the user: ours is the longest answer.
    """
    return DR_GRPO, LossConfig(surrogate="clip", aggregation="seq_mean_token_sum_norm")


@preset
def dapo() -> Algorithm:
    """DAPO (2503.14476) eq. 8; with it come dynamic sampling (eq. 11) and the overlong penalty (eq. 13), see below."""
    return GRPO, LossConfig(surrogate="clip", clip_high=0.28, aggregation="token_mean")


@preset
def gspo() -> Algorithm:
    """GSPO (2507.18071) eq. 5 and 7."""
    return GRPO, LossConfig(surrogate="gspo")


@preset
def cispo() -> Algorithm:
    """MiniMax-M1 (2506.13585) eq. 4 and 5. It gives no number for the upper bound; ours is 0.2."""
    return GRPO, LossConfig(surrogate="cispo", aggregation="token_mean")


@preset
def ppo() -> Algorithm:
    """PPO (1707.06347) eq. 7 with GAE (1506.02438) eq. 16. Clipped values and the coefficient 0.1 of a head's loss
    are not the papers' but common for language models.
    """
    return GAE, LossConfig(surrogate="clip", aggregation="token_mean")


@preset
def decoupled_ppo() -> Algorithm:
    """AReaL (2505.24298) after Batch size-invariance for policy optimization (2110.00641); `estimator: grpo` drops
    the critic. Neither bounds w; ours is 5.
    """
    return GAE, LossConfig(surrogate="decoupled", aggregation="token_mean")


@preset
def rloo() -> Algorithm:
    """Back to basics (2402.14740); its KL is k1 in the reward at 0.03, off here."""
    return AdvantageConfig(estimator="rloo"), LossConfig(surrogate="reinforce", aggregation="seq_mean_token_sum")


@preset
def reinforce_pp() -> Algorithm:
    """REINFORCE++ (2501.03262); its KL is k1 in the reward at 0.001, off here."""
    return AdvantageConfig(estimator="reinforce_pp"), LossConfig(surrogate="clip")


@preset
def tis() -> Algorithm:
    """ROLL Flash (2510.11345), truncated importance sampling; without numbers: 0 and 1 are its code's."""
    return DR_GRPO, LossConfig(surrogate="tis", aggregation="token_mean")


@preset
def topr() -> Algorithm:
    """Tapered off-policy REINFORCE (2503.14286), with the taper on the negative part only."""
    return DR_GRPO, LossConfig(surrogate="topr", aggregation="token_mean")


@preset
def weighted_topr() -> Algorithm:
    """ROLL Flash's TOPR with a weight on each part."""
    return DR_GRPO, LossConfig(surrogate="weighted_topr", aggregation="token_mean")


@preset
def kimi() -> Algorithm:
    """Kimi k1.5 (2501.12599) section 2.3.2: the gradient of its squared relative-entropy objective. It gives no tau;
    ours is 0.1.
    """
    return DR_GRPO, LossConfig(surrogate="kimi", aggregation="token_mean")


@preset
def opmd() -> Algorithm:
    """Trinity-RFT (2505.17826): R - mean R is dr_grpo's advantage; the loss is scaled by 1/(1 + tau), tau 1."""
    return AdvantageConfig(estimator="opmd"), LossConfig(surrogate="reinforce", aggregation="token_mean", scale=0.5)


@preset
def dppo() -> Algorithm:
    """Rethinking the trust region in LLM RL (2602.04879): DPPO, binary total variation."""
    return DR_GRPO, LossConfig(surrogate="dppo_tv", aggregation="token_mean")

"""Which groups are worth training on. Free of torch, as the buffer is; rewards are raw task rewards.

A reward that is None, NaN or infinite is not scorable and takes no part.
"""

import math
from collections.abc import Sequence

from flashflow.algorithms.settings import SIGNAL_TOLERANCE
from flashflow.errors import BudgetError


def scorable(rewards: Sequence[float | None]) -> list[float]:
    """The usable rewards of a group."""
    return [reward for reward in rewards if reward is not None and math.isfinite(reward)]


def zero_variance(rewards: Sequence[float | None]) -> bool:
    """The group has no signal: fewer than two scorable members, or max - min <= SIGNAL_TOLERANCE."""
    usable = scorable(rewards)
    return len(usable) < 2 or max(usable) - min(usable) <= SIGNAL_TOLERANCE


def within_mean(rewards: Sequence[float | None], lower: float, upper: float) -> bool:
    """Mean filter: lower < mean < upper over scorable members; false without any."""
    usable = scorable(rewards)
    return bool(usable) and lower < math.fsum(usable) / len(usable) < upper


def select_groups(
    groups: Sequence[Sequence[float | None]],
    *,
    dynamic: bool = True,
    lower: float = -math.inf,
    upper: float = math.inf,
) -> list[int]:
    """Indices of the groups to keep, in order: with signal (`dynamic`, DAPO 2503.14476 eq. 11), and mean within bounds.

    groups: rewards of each group's members.
    """
    bounded = lower > -math.inf or upper < math.inf
    return [
        index
        for index, rewards in enumerate(groups)
        if not (dynamic and zero_variance(rewards)) and not (bounded and not within_mean(rewards, lower, upper))
    ]


def check_filtered_fraction(*, num_filtered: int, num_seen: int, max_fraction: float, reward_name: str) -> None:
    """Raises BudgetError when more than `max_fraction` of the groups seen were filtered."""
    if num_seen and num_filtered > max_fraction * num_seen:
        raise BudgetError(
            f"{num_filtered} of {num_seen} groups were filtered, more than max_filtered_fraction = {max_fraction}: "
            f"reward {reward_name} tells too few attempts apart; make the tasks fit the model, or raise the fraction"
        )


def check_failed_fraction(*, num_failed: int, num_samples: int, max_fraction: float) -> None:
    """Raises BudgetError when more than `max_fraction` of a batch's samples failed."""
    if num_samples and num_failed > max_fraction * num_samples:
        raise BudgetError(
            f"{num_failed} of {num_samples} samples failed, more than max_failed_fraction = {max_fraction}: "
            "see the environment's tracebacks in the logs, or raise rollout.max_failed_fraction"
        )

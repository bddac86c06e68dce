"""Which groups are worth training on. Free of torch, as the buffer is; rewards are raw task rewards.

A reward that is None, NaN or infinite is not scorable and takes no part.
"""

import math
from collections.abc import Sequence

from flashflow.algorithms.settings import SIGNAL_TOLERANCE, FilterConfig
from flashflow.errors import BudgetError

FEWEST_KEPT = 16
"""Kept groups that a share of lost ones is measured against at least: of a small batch chance alone may cost many."""


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


def keeps(config: FilterConfig, rewards: Sequence[float | None]) -> bool:
    """Whether a group with these rewards is trained."""
    lower = config.mean_lower if config.mean_lower is not None else -math.inf
    upper = config.mean_upper if config.mean_upper is not None else math.inf
    return bool(select_groups([rewards], dynamic=config.dynamic, lower=lower, upper=upper))


def too_many(
    *, num_lost: int, num_kept: int, batch_groups: int, max_fraction: float, fewest: int = FEWEST_KEPT
) -> bool:
    """More than `max_fraction` of the groups were lost.

    num_lost: since the last batch. num_kept: complete groups that wait for a batch; taken for a batch and for `fewest`
    at least, so that few groups decide nothing.
    """
    return num_lost > max_fraction * (num_lost + max(num_kept, batch_groups, fewest))


def check_filtered_fraction(
    config: FilterConfig, *, num_filtered: int, num_kept: int, batch_groups: int, reward_name: str
) -> None:
    """Raises BudgetError when `too_many` groups were filtered."""
    fraction = config.max_filtered_fraction
    if too_many(num_lost=num_filtered, num_kept=num_kept, batch_groups=batch_groups, max_fraction=fraction):
        raise BudgetError(
            f"since the last batch the filters dropped {num_filtered} groups of {num_filtered + num_kept}, by "
            f"{' and '.join(config.names)}, more than filters.max_filtered_fraction = {fraction} of them and of a "
            f"batch of {batch_groups} (or {FEWEST_KEPT}) to come: reward {reward_name} tells too few attempts apart; "
            "make the tasks fit the model, or raise the fraction"
        )


def check_failed_fraction(*, num_failed: int, num_kept: int, batch_groups: int, max_fraction: float) -> None:
    """Raises BudgetError when `too_many` groups were dropped because a member failed."""
    if too_many(num_lost=num_failed, num_kept=num_kept, batch_groups=batch_groups, max_fraction=max_fraction):
        raise BudgetError(
            f"since the last batch failures cost {num_failed} groups of {num_failed + num_kept}, more than "
            f"rollout.max_failed_fraction = {max_fraction} of them and of a batch of {batch_groups} (or "
            f"{FEWEST_KEPT}) to come: see the environment's tracebacks in the logs, or raise the fraction"
        )


def check_whole_losses(
    *, num_hopeless: int, num_expired: int, num_kept: int, batch_groups: int, max_fraction: float
) -> None:
    """Raises BudgetError when `too_many` groups were lost whole: without any reward, or without a quorum in time.

    That takes every member, so few of them are enough to decide.
    """
    num_lost = num_hopeless + num_expired
    if too_many(num_lost=num_lost, num_kept=num_kept, batch_groups=batch_groups, max_fraction=max_fraction, fewest=1):
        raise BudgetError(
            f"since the last batch {num_hopeless} groups ended without a reward of any member, and {num_expired} "
            f"reached rollout.straggler_deadline_s without a quorum, of {num_lost + num_kept}, more than "
            f"rollout.max_failed_fraction = {max_fraction} of them and of a batch of {batch_groups} to come: see the "
            "environment's tracebacks in the logs, or raise the deadlines or the fraction"
        )

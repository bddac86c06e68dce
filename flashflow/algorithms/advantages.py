"""From rewards to advantages. Pure; statistics are over the whole consumed batch, so call it before splitting.

Shapes: N samples of a batch (B when padded with T tokens), K of them whose tokens are here, G members of a group.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from flashflow.algorithms.ratios import masked
from flashflow.algorithms.settings import GROUP_BASELINES, SIGNAL_TOLERANCE, AdvantageConfig
from flashflow.errors import ContractError

__all__ = [
    "AdvantageConfig",
    "TokenAdvantages",
    "gae",
    "group_advantages",
    "reinforce_returns",
    "token_advantages",
    "whiten",
]

STD_EPSILON = 1e-6
VARIANCE_EPSILON = 1e-8

Total = Callable[[Tensor], Tensor]
"""The sum of a tensor over the ranks that hold parts of the batch; what all of it is on one rank."""


def _alone(part: Tensor) -> Tensor:
    return part


def group_advantages(
    config: AdvantageConfig,
    *,
    rewards: Tensor | Sequence[float | None],
    group_ids: Tensor | Sequence[int],
    scorable: Tensor | Sequence[bool] | None = None,
) -> Tensor:
    """Advantage of each sample against its group, [N], in the dtype of `rewards`.

    Args:
        rewards: [N]; None, NaN and infinities are not scorable. A sequence gives float64.
        group_ids: [N] any integers; equal ones are members of one group, in any order.
        scorable: [N] false where there is no usable reward whatever `rewards` holds.

    grpo: (R - mean)/(std + 1e-6) with the sample deviation (2402.03300, section 4.1.2). dr_grpo: R - mean (2503.20783).
    rloo: R - mean of the other members = n/(n-1) (R - mean) (2402.14740). reinforce_pp_baseline: whiten(R - mean) over
    the scorable members of the batch (2501.03262). opmd: R - b, b the mean, or tau log mean exp(R/tau) (2505.17826).

    A sample that is not scorable, a group with fewer than two scorable members, and a group whose rewards span no more
    than SIGNAL_TOLERANCE get exactly 0. Raises ContractError for gae and reinforce_pp, which work on tokens.
    """
    if config.estimator not in GROUP_BASELINES:
        raise ContractError(f"estimator {config.estimator} has no group baseline: use token_advantages")
    R, usable = _rewards(rewards, scorable)
    groups = _Groups(R, usable, torch.as_tensor(group_ids, device=R.device))
    centred = torch.where(usable, R - groups.mean_N, 0.0)
    advantages = _scaled(config, R, centred, groups)
    if config.estimator == "reinforce_pp_baseline":
        advantages = whiten(advantages, usable)
    advantages = torch.where(groups.has_signal_N & usable, advantages, 0.0)
    return advantages.to(rewards.dtype) if isinstance(rewards, Tensor) else advantages


class _Groups:
    """Statistics of each sample's group over its scorable members, spread back to [N]."""

    def __init__(self, R: Tensor, usable: Tensor, group_ids: Tensor) -> None:
        ids, self.index_N = torch.unique(group_ids, return_inverse=True)
        self.num = len(ids)
        self.usable = usable
        self.count_N = self.spread(self.sum(torch.ones_like(R)))
        self.mean_N = self.spread(self.sum(R)) / self.count_N.clamp(min=1)
        self.max_N = self._extreme(R, "amax")
        span_N = self.max_N - self._extreme(R, "amin")
        self.has_signal_N = (self.count_N >= 2) & (span_N > SIGNAL_TOLERANCE)

    def sum(self, values: Tensor) -> Tensor:
        """[number of groups] sums over scorable members."""
        return values.new_zeros(self.num).index_add(0, self.index_N, torch.where(self.usable, values, 0.0))

    def spread(self, per_group: Tensor) -> Tensor:
        return per_group[self.index_N]

    def _extreme(self, R: Tensor, which: str) -> Tensor:
        filler = -torch.inf if which == "amax" else torch.inf
        start = torch.full((self.num,), filler, dtype=R.dtype, device=R.device)
        return self.spread(start.scatter_reduce(0, self.index_N, torch.where(self.usable, R, filler), which))


def _scaled(config: AdvantageConfig, R: Tensor, centred: Tensor, groups: _Groups) -> Tensor:
    if config.estimator == "grpo":
        variance_N = groups.spread(groups.sum(centred.square())) / (groups.count_N - 1).clamp(min=1)
        return centred / (variance_N.sqrt() + STD_EPSILON)
    if config.estimator == "rloo":
        return centred * groups.count_N / (groups.count_N - 1).clamp(min=1)
    if config.estimator == "opmd" and config.opmd_baseline == "logmeanexp":
        # The largest reward is taken out first: exp(R/tau) overflows for a small tau.
        peak, tau = groups.max_N, config.opmd_tau
        mean_exp_N = groups.spread(groups.sum(((R - peak) / tau).exp())) / groups.count_N.clamp(min=1)
        return R - (peak + tau * mean_exp_N.log())
    return centred


def _rewards(
    rewards: Tensor | Sequence[float | None], scorable: Tensor | Sequence[bool] | None
) -> tuple[Tensor, Tensor]:
    """Rewards [N] in float64 with 0 where there is none, and where there is one."""
    if not isinstance(rewards, Tensor):
        rewards = torch.tensor(
            [torch.nan if reward is None else float(reward) for reward in rewards], dtype=torch.float64
        )
    usable = rewards.isfinite()
    if scorable is not None:
        usable = usable & torch.as_tensor(scorable, device=rewards.device).bool()
    return torch.where(usable, rewards.detach().double(), 0.0), usable


def whiten(x: Tensor, mask: Tensor, total: Total = _alone) -> Tensor:
    """(x - mean)/sqrt(var + 1e-8) over masked-in values, any shape; Bessel; 0 outside the mask and for n < 2."""
    chosen = mask != 0
    n = total(chosen.sum())
    mean = total(masked(x, chosen).sum()) / n.clamp(min=1)
    centred = torch.where(chosen, x - mean, 0.0)
    variance = total(centred.square().sum()) / (n - 1).clamp(min=1)
    return torch.where(n < 2, 0.0, centred / (variance + VARIANCE_EPSILON).sqrt())


def gae(*, rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation (1506.02438, eq. 16) over masked-in tokens only: (advantages, returns) [B,T].

    Observation tokens are skipped: deleting them changes nothing, and a reward on one does not count, so a terminal
    reward belongs on the last masked-in token. Bootstraps 0 at the end and at truncation. Outside the mask both are 0.
    """
    chosen = mask != 0
    r, v = masked(rewards.detach(), chosen), masked(values.detach(), chosen)
    advantages = torch.zeros_like(v)
    carried, next_value = torch.zeros_like(v[:, 0]), torch.zeros_like(v[:, 0])
    for t in reversed(range(v.shape[1])):
        here = chosen[:, t]
        delta = r[:, t] + gamma * next_value - v[:, t]
        carried = torch.where(here, delta + gamma * lam * carried, carried)
        next_value = torch.where(here, v[:, t], next_value)
        advantages[:, t] = torch.where(here, carried, 0.0)
    return advantages, advantages + v


def reinforce_returns(*, rewards: Tensor, mask: Tensor, gamma: float) -> Tensor:
    """Discounted sum of rewards from each masked-in token on, [B,T]; 0 outside the mask. Skips as gae does."""
    chosen = mask != 0
    r = masked(rewards.detach(), chosen)
    returns, carried = torch.zeros_like(r), torch.zeros_like(r[:, 0])
    for t in reversed(range(r.shape[1])):
        carried = torch.where(chosen[:, t], r[:, t] + gamma * carried, carried)
        returns[:, t] = torch.where(chosen[:, t], carried, 0.0)
    return returns


class TokenAdvantages(NamedTuple):
    """Of the samples whose tokens are here, K of N."""

    advantages: Tensor
    """[K,T], 0 outside the mask and for samples that are not scorable."""
    returns: Tensor | None
    """[K,T] targets of the critic; gae only."""
    mask: Tensor
    """[K,T] bool: `mask` without the samples that are not scorable. Train on this one."""


def token_advantages(
    config: AdvantageConfig,
    *,
    rewards: Tensor | Sequence[float | None],
    group_ids: Tensor | Sequence[int],
    mask: Tensor,
    scorable: Tensor | Sequence[bool] | None = None,
    values: Tensor | None = None,
    penalty: Tensor | None = None,
    places: Sequence[int] | None = None,
    total: Total = _alone,
) -> TokenAdvantages:
    """Advantages per token by any estimator; the one entry a trainer needs.

    One of several ranks that each hold the tokens of K of the N samples gets those of its own; the statistics are of
    the whole batch.

    Args:
        rewards, group_ids, scorable: [N], as in group_advantages; rewards with the overlong penalty, if any.
        mask: [K,T]. values: [K,T] of the critic, for gae.
        penalty: [K,T] to be taken off the rewards: kl_coefficient * kl_penalty(...). Summed per sequence before a group
            baseline, per token otherwise.
        places: [K] of the rows of mask among the N samples; None: it has them all. total: sums over the ranks; all of
            them call this at the same time.
    """
    R, usable = _rewards(rewards, scorable)
    R, usable = R.to(mask.device), usable.to(mask.device)
    here = torch.as_tensor(range(len(R)) if places is None else places, dtype=torch.int64, device=mask.device)
    chosen = (mask != 0) & usable[here].unsqueeze(1)
    cost = (
        torch.zeros(mask.shape, dtype=R.dtype, device=R.device) if penalty is None else masked(penalty.double(), chosen)
    )
    if config.estimator in GROUP_BASELINES:
        if penalty is not None:
            R = R - total(torch.zeros_like(R).index_copy(0, here, cost.sum(1)))
        advantages = group_advantages(config, rewards=R, group_ids=group_ids, scorable=usable)[here]
        return TokenAdvantages(masked(advantages.unsqueeze(1).expand(mask.shape), chosen), None, chosen)
    token_rewards = _on_last_token(R[here], chosen) - cost
    if config.estimator == "reinforce_pp":
        returns = reinforce_returns(rewards=token_rewards, mask=chosen, gamma=config.gamma)
        return TokenAdvantages(whiten(returns, chosen, total), None, chosen)
    if values is None:
        raise ContractError("estimator gae needs values [K,T] of a critic: pass them, or choose another estimator")
    advantages, returns = gae(
        rewards=token_rewards, values=values.double(), mask=chosen, gamma=config.gamma, lam=config.lam
    )
    return TokenAdvantages(advantages, returns, chosen)


def _on_last_token(R: Tensor, chosen: Tensor) -> Tensor:
    """[N,T] the reward on the last masked-in token, 0 elsewhere."""
    after = chosen.flip(1).cumsum(1).flip(1)
    return torch.where(chosen & (after == 1), R.unsqueeze(1), 0.0)

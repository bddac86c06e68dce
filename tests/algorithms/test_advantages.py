"""Every estimator against values by hand and plain-Python loops."""

import math
import random
import statistics

import pytest
import torch
from algorithm_cases import tensor

from flashflow.algorithms.advantages import (
    AdvantageConfig,
    gae,
    group_advantages,
    reinforce_returns,
    token_advantages,
    whiten,
)
from flashflow.algorithms.settings import GROUP_BASELINES
from flashflow.errors import ContractError

NAN = math.nan


def advantages(estimator, rewards, group_ids=None, scorable=None, **options):
    config = AdvantageConfig(estimator=estimator, **options)
    ids = [0] * len(rewards) if group_ids is None else group_ids
    return group_advantages(config, rewards=rewards, group_ids=ids, scorable=scorable).tolist()


def test_members_without_a_reward_leave_the_baseline_and_get_zero():
    for rewards in ([1, None, 0, None], [1, NAN, 0, math.inf]):
        assert advantages("dr_grpo", rewards) == [0.5, 0, -0.5, 0]
    assert advantages("dr_grpo", [1.0, 7.0, 0.0, 7.0], scorable=[True, False, True, False]) == [0.5, 0, -0.5, 0]


def test_rloo_compares_with_the_other_members():
    assert advantages("rloo", [0] + [0.95] * 7)[0] == pytest.approx(-0.95, rel=1e-14)
    assert advantages("rloo", [1, 0, 0.5, None]) == pytest.approx([0.75, -0.75, 0, 0])


def test_grpo_divides_by_the_sample_deviation():
    assert advantages("grpo", [1, 0]) == pytest.approx([0.5 / (math.sqrt(0.5) + 1e-6), -0.5 / (math.sqrt(0.5) + 1e-6)])


def test_opmd_by_hand():
    assert advantages("opmd", [1, 0]) == [0.5, -0.5]
    soft = 2 * math.log((math.exp(0.5) + 1) / 2)
    options = {"opmd_baseline": "logmeanexp", "opmd_tau": 2.0}
    assert advantages("opmd", [1, 0], **options) == pytest.approx([1 - soft, -soft], rel=1e-12)
    assert advantages("opmd", [1e4, 0, None], opmd_baseline="logmeanexp", opmd_tau=0.1)[0] == pytest.approx(
        0.1 * math.log(2)
    )


def expected(estimator: str, rewards: list, ids: list) -> list[float]:
    """The formulas once more, one member at a time."""
    raw = []
    for reward, group in zip(rewards, ids, strict=True):
        members = [r for r, g in zip(rewards, ids, strict=True) if g == group and r is not None]
        if reward is None or len(members) < 2:
            raw.append(0.0)
            continue
        mean = sum(members) / len(members)
        raw.append({
            "grpo": (reward - mean) / (statistics.stdev(members) + 1e-6),
            "dr_grpo": reward - mean,
            "rloo": reward - (sum(members) - reward) / (len(members) - 1),
            "reinforce_pp_baseline": reward - mean,
            "opmd": reward - mean,
        }[estimator])  # fmt: skip
    if estimator != "reinforce_pp_baseline":
        return raw
    usable = [a for a, r in zip(raw, rewards, strict=True) if r is not None]
    mean, deviation = statistics.mean(usable), math.sqrt(statistics.variance(usable) + 1e-8)
    return [0.0 if r is None else (a - mean) / deviation for a, r in zip(raw, rewards, strict=True)]


@pytest.mark.parametrize("estimator", sorted(GROUP_BASELINES))
def test_an_estimator_is_its_formula_on_mixed_groups_in_any_order(estimator):
    generator = random.Random(1)
    ids = [9, 4, 9, -2, 4, 9, -2, 4, 9, -2, 4, 4]
    rewards = [None if generator.random() < 0.2 else generator.gauss(0, 1) for _ in ids]
    assert None in rewards
    assert advantages(estimator, rewards, ids) == pytest.approx(expected(estimator, rewards, ids), rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("estimator", sorted(GROUP_BASELINES))
def test_a_group_without_signal_gets_exactly_zero(estimator):
    rewards = [0.1, 0.1 + 9e-7, 0.1, 1.0, 0.0, 0.3, None, 0.7]
    found = advantages(estimator, rewards, [0, 0, 0, 1, 1, 2, 2, 3], opmd_baseline="logmeanexp")
    assert found[:3] == [0, 0, 0]
    assert found[5:] == [0, 0, 0]
    assert found[3] > 0 > found[4]
    assert advantages(estimator, [0.1, 0.1 + 2e-6])[1] > 0


def test_the_dtype_of_the_rewards_is_kept_and_statistics_are_exact():
    rewards = torch.tensor([1e4 + 1, 1e4], dtype=torch.float32)
    found = group_advantages(AdvantageConfig(estimator="dr_grpo"), rewards=rewards, group_ids=torch.tensor([3, 3]))
    assert found.dtype == torch.float32
    assert found.tolist() == [0.5, -0.5]


@pytest.mark.parametrize("estimator", ["gae", "reinforce_pp"])
def test_an_estimator_of_tokens_is_refused_for_groups(estimator):
    with pytest.raises(ContractError, match="use token_advantages"):
        advantages(estimator, [1, 0])


def test_whiten_is_bessels_and_zero_outside():
    x, mask = tensor([[1.0, NAN, 3.0], [8.0, math.inf, 0.0]]), tensor([[1, 0, 1], [1, 0, 0]])
    scale = math.sqrt(13 + 1e-8)
    torch.testing.assert_close(whiten(x, mask), tensor([[-3 / scale, 0, -1 / scale], [4 / scale, 0, 0]]))
    assert whiten(tensor([5.0, 1.0]), tensor([1, 0])).tolist() == [0, 0]
    assert whiten(tensor([5.0]), tensor([0])).tolist() == [0]
    assert whiten(tensor([2.0, 2.0]), tensor([1, 1])).tolist() == [0, 0]


def loop_gae(rewards, values, gamma, lam):
    """One sequence without observations, straight from the definition: sums of discounted deltas."""
    n = len(rewards)
    deltas = [rewards[t] + gamma * (values[t + 1] if t + 1 < n else 0.0) - values[t] for t in range(n)]
    return [sum((gamma * lam) ** (k - t) * deltas[k] for k in range(t, n)) for t in range(n)]


MASK = [[0, 1, 1, 0, 0, 1, 1], [1, 0, 1, 1, 1, 1, 0], [0, 0, 0, 0, 0, 0, 0]]


def random_rows(seed):
    return torch.randn(3, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 0.95), (0.9, 0.5), (0.99, 1.0), (1.0, 0.0)])
def test_gae_is_its_formula_as_if_observations_were_deleted(gamma, lam):
    rewards, values = random_rows(0), random_rows(1)
    mask = torch.tensor(MASK)
    rewards[mask == 0], values[mask == 0] = NAN, math.inf
    found, returns = gae(rewards=rewards, values=values, mask=mask, gamma=gamma, lam=lam)
    for b in range(3):
        kept = mask[b] == 1
        wanted = loop_gae(rewards[b][kept].tolist(), values[b][kept].tolist(), gamma, lam)
        assert found[b][kept].tolist() == pytest.approx(wanted, rel=1e-12)
        assert returns[b][kept].tolist() == pytest.approx((tensor(wanted) + values[b][kept]).tolist())
    assert not found[mask == 0].any()
    assert not returns[mask == 0].any()


def test_gae_by_hand():
    found, returns = gae(
        rewards=tensor([[0.0, 1.0]]), values=tensor([[0.5, 0.25]]), mask=tensor([[1, 1]]), gamma=1.0, lam=0.5
    )
    assert found.tolist() == [[-0.25 + 0.5 * 0.75, 0.75]]
    assert returns.tolist() == [[0.625, 1.0]]


def test_reinforce_returns_skip_observations():
    found = reinforce_returns(rewards=tensor([[1.0, NAN, 2.0, 4.0, 9.0]]), mask=tensor([[1, 0, 1, 1, 0]]), gamma=0.5)
    assert found.tolist() == [[1 + 0.5 * 2 + 0.25 * 4, 0, 4, 4, 0]]


def test_token_advantages_broadcast_a_group_estimator_and_leave_out_what_is_not_scorable():
    mask = tensor([[1, 0, 1], [1, 1, 1], [0, 1, 1]])
    found = token_advantages(
        AdvantageConfig(estimator="dr_grpo"), rewards=[1.0, None, 0.0], group_ids=[5, 5, 5], mask=mask
    )
    assert found.advantages.tolist() == [[0.5, 0, 0.5], [0, 0, 0], [0, -0.5, -0.5]]
    assert found.mask.tolist() == [[True, False, True], [False] * 3, [False, True, True]]
    assert found.returns is None


def test_a_penalty_is_summed_before_a_group_baseline():
    penalty = tensor([[0.1, NAN, 0.3], [0.2, 0.0, 0.0]])
    found = token_advantages(
        AdvantageConfig(estimator="dr_grpo"), rewards=[1.0, 0.0], group_ids=[0, 0], mask=tensor([[1, 0, 1], [1, 1, 1]]),
        penalty=penalty,
    )  # fmt: skip
    # 1 - .4 and 0 - .2: mean .2.
    torch.testing.assert_close(found.advantages, tensor([[0.4, 0, 0.4], [-0.4, -0.4, -0.4]]))


def test_a_penalty_is_taken_per_token_by_reinforce_pp_and_gae():
    rewards, ids, mask = [1.0, 0.0, None], [0, 0, 1], tensor([[1, 0, 1], [1, 1, 0], [1, 1, 1]])
    penalty = tensor([[0.1, NAN, 0.3], [0.2, 0.0, NAN], [5.0, 5.0, 5.0]])
    per_token = tensor([[-0.1, 0, 0.7], [-0.2, 0, 0], [0, 0, 0]])
    scored = tensor([[1, 0, 1], [1, 1, 0], [0, 0, 0]])
    config = AdvantageConfig(estimator="reinforce_pp", gamma=0.5)
    found = token_advantages(config, rewards=rewards, group_ids=ids, mask=mask, penalty=penalty)
    returns = tensor([[0.25, 0, 0.7], [-0.2, 0, 0], [0, 0, 0]])
    torch.testing.assert_close(found.advantages, whiten(returns, scored))
    values = random_rows(2)[:, :3]
    config = AdvantageConfig(estimator="gae", gamma=0.9, lam=0.8)
    found = token_advantages(config, rewards=rewards, group_ids=ids, mask=mask, penalty=penalty, values=values)
    wanted = gae(rewards=per_token, values=values, mask=scored, gamma=0.9, lam=0.8)
    torch.testing.assert_close(found.advantages, wanted[0])
    torch.testing.assert_close(found.returns, wanted[1])


def test_gae_without_a_critic_is_refused():
    with pytest.raises(ContractError, match="needs values"):
        token_advantages(AdvantageConfig(estimator="gae"), rewards=[1.0], group_ids=[0], mask=tensor([[1]]))

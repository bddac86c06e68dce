"""Filters, the overlong penalty and the replay buffer."""

import collections
import math

import pytest

from flashflow.algorithms.filters import (
    check_failed_fraction,
    check_filtered_fraction,
    keeps,
    select_groups,
    too_many,
    within_mean,
    zero_variance,
)
from flashflow.algorithms.replay import ReplayBuffer, ReplayGroup, fill, worth_keeping
from flashflow.algorithms.rewards import overlong_penalty
from flashflow.algorithms.settings import FilterConfig, ReplayConfig
from flashflow.errors import BudgetError, ConfigError


@pytest.mark.parametrize(
    ("rewards", "silent"),
    [
        ([1, 0], False),
        ([1, 1, 1], True),
        ([0.5, 0.5 + 9e-7], True),
        ([0.5, 0.5 + 2e-6], False),
        ([1, None, math.nan], True),
        ([1, None, 0], False),
        ([], True),
    ],
)
def test_a_group_has_signal_iff_its_scorable_rewards_differ(rewards, silent):
    assert zero_variance(rewards) is silent


def test_dynamic_sampling_and_the_mean_filter_keep_groups_in_order():
    groups = [[0, 1], [1, 1], [0, 0, 1, 0], [1, 1, 1, 0], [None, None]]
    assert select_groups(groups) == [0, 2, 3]
    assert select_groups(groups, lower=0.25, upper=0.8) == [0, 3]
    assert select_groups(groups, dynamic=False, lower=0.5) == [1, 3]
    assert select_groups(groups, dynamic=False) == [0, 1, 2, 3, 4]


def test_the_bounds_of_the_mean_filter_are_exclusive():
    assert not within_mean([0.5, 0.5], 0.5, 1)
    assert not within_mean([1, 1], 0, 1)
    assert within_mean([1, 0, None], 0.4, 0.6)


@pytest.mark.parametrize(
    ("num_lost", "num_kept", "batch_groups", "max_fraction", "stops"),
    [
        # A batch of 20 may cost 20 x 0.75 / 0.25 = 60 lost groups, however few are kept.
        (60, 0, 20, 0.75, False),
        (61, 0, 20, 0.75, True),
        (61, 20, 20, 0.75, True),
        # Of 40 groups kept, 120 make three quarters of all.
        (120, 40, 20, 0.75, False),
        (121, 40, 20, 0.75, True),
        # A batch of one counts as 16.
        (48, 0, 1, 0.75, False),
        (49, 0, 1, 0.75, True),
        (1, 0, 1, 0.0, True),
        (0, 0, 1, 0.0, False),
    ],
)
def test_lost_groups_are_too_many_past_their_share_of_at_least_a_batch(
    num_lost, num_kept, batch_groups, max_fraction, stops
):
    found = too_many(num_lost=num_lost, num_kept=num_kept, batch_groups=batch_groups, max_fraction=max_fraction)
    assert found is stops


def test_too_many_filtered_groups_name_the_filters_the_share_and_the_reward_function():
    filters = FilterConfig(dynamic=True, mean_lower=0.0, max_filtered_fraction=0.9)
    check_filtered_fraction(filters, num_filtered=180, num_kept=0, batch_groups=20, reward_name="exact")
    names = r"by filters\.dynamic true and filters\.mean_lower 0\.0"
    match = rf"181 groups of 183, {names}, .*max_filtered_fraction = 0\.9 .* 20 .*: reward exact"
    with pytest.raises(BudgetError, match=match):
        check_filtered_fraction(filters, num_filtered=181, num_kept=2, batch_groups=20, reward_name="exact")


def test_too_many_failures_stop_the_run():
    check_failed_fraction(num_failed=20, num_kept=0, batch_groups=20, max_fraction=0.5)
    with pytest.raises(BudgetError, match=r"failures cost 21 groups of 21, more than .*max_failed_fraction = 0\.5"):
        check_failed_fraction(num_failed=21, num_kept=0, batch_groups=20, max_fraction=0.5)


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({}, [True, True, True]),
        ({"dynamic": True}, [True, False, True]),
        ({"mean_upper": 0.9}, [True, False, True]),
        ({"mean_lower": 0.5}, [False, True, True]),
        ({"dynamic": True, "mean_lower": 0.5}, [False, False, True]),
    ],
)
def test_a_group_is_kept_iff_every_filter_keeps_it(options, kept):
    groups = [[0, 1], [1, 1], [1, 1, 0, None]]
    assert [keeps(FilterConfig(**options), rewards) for rewards in groups] == kept


@pytest.mark.parametrize(
    ("num_tokens", "penalty"), [(0, 0), (16384, 0), (16385, -1 / 4096), (18432, -0.5), (20480, -1), (30000, -1)]
)
def test_the_overlong_penalty_is_dapos(num_tokens, penalty):
    assert overlong_penalty(num_tokens, budget=20480, cache=4096) == penalty


def test_a_cache_larger_than_the_budget_is_refused():
    with pytest.raises(ConfigError, match="overlong cache = 11"):
        overlong_penalty(1, budget=10, cache=11)


def group(number: int, *rewards: float | None, version: int = 0) -> ReplayGroup[str]:
    return ReplayGroup(group=number, version=version, rewards=rewards, payload=f"payload {number}")


def filled(count: int, **options: int) -> ReplayBuffer[str]:
    buffer: ReplayBuffer[str] = ReplayBuffer(ReplayConfig(**options))
    for number in range(count):
        buffer = buffer.offer(group(number, 1, 1, 0))
    return buffer


@pytest.mark.parametrize(
    ("rewards", "kept"),
    [
        ([1, 1, 0], True),
        ([1, 0], False),
        ([0.6, 0.6, 0.7], False),
        ([1, None, 0.7], True),
        ([1, None], False),
        ([1, 0.8, 0.8, 1], False),
        ([1, 0.79], True),
    ],
)
def test_a_group_is_kept_iff_its_population_deviation_and_mean_are_high(rewards, kept):
    assert worth_keeping(ReplayConfig(), rewards) is kept


def test_thresholds_are_settings():
    assert worth_keeping(ReplayConfig(min_mean=-1), [0, -0.5])
    assert not worth_keeping(ReplayConfig(min_std=0.6), [1, 1, 0])


def test_the_oldest_leave_a_full_buffer():
    assert [g.group for g in filled(7, capacity=3).groups] == [4, 5, 6]
    assert len(filled(300).groups) == 256


def test_groups_past_the_staleness_bound_are_never_drawn():
    buffer: ReplayBuffer[str] = ReplayBuffer(ReplayConfig(max_replay_staleness=2))
    for version in range(5):
        buffer = buffer.offer(group(version, 1, 1, 0, version=version))
    left, drawn = buffer.draw(10, version=4, key=0)
    assert sorted(g.version for g in drawn) == [2, 3, 4]
    assert [g.version for g in left.groups] == [2, 3, 4]


def test_a_draw_is_a_function_of_the_key_without_repetition_and_uniform():
    buffer = filled(6)
    counts: collections.Counter[int] = collections.Counter()
    for key in range(3000):
        _, drawn = buffer.draw(2, version=0, key=key)
        assert len({g.group for g in drawn}) == 2
        assert drawn == buffer.draw(2, version=0, key=key)[1]
        counts.update(g.group for g in drawn)
    # 6000 draws of 6: each 1000, deviation sqrt(3000 * 1/3 * 2/3) = 26.
    assert all(abs(counts[number] - 1000) < 130 for number in range(6))


def test_a_drawn_group_keeps_its_payload_and_version_and_counts_its_uses():
    buffer = filled(1)
    buffer, (first,) = buffer.draw(1, version=0, key=1)
    _, (second,) = buffer.draw(1, version=1, key=2)
    assert (first.payload, first.version, first.uses) == ("payload 0", 0, 2)
    assert second.uses == 3


def test_groups_without_signal_are_replaced_and_the_batch_is_stored_after_the_draw():
    stored = group(1, 1, 1, 0)
    buffer = ReplayBuffer[str](ReplayConfig()).offer(stored)
    batch = [group(10, 1, 1), group(11, 1, 1, 0), group(12, 0, 0)]
    after, trained = fill(buffer, batch, version=1, key=5)
    assert [g.group for g in trained] == [1, 11, 12]
    assert [g.group for g in after.groups] == [1, 11]
    assert buffer.groups == (stored,)


def test_a_group_without_signal_is_not_stored_whatever_the_thresholds():
    config = ReplayConfig(min_std=0, min_mean=-1)
    after, _ = fill(ReplayBuffer[str](config), [group(1, 1, 1 + 5e-7), group(2, 0, 1)], version=0, key=0)
    assert [g.group for g in after.groups] == [2]

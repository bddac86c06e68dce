"""Draws: right in distribution, equal for equal keys, independent for others."""

import statistics

import pytest

from flashflow.config.simulated import (
    EmpiricalDistribution,
    FixedDistribution,
    GivenDistribution,
    LognormalDistribution,
    NormalDistribution,
)
from flashflow.messages import SamplingKey
from flashflow.simulate.distributions import drawer

KEYS = [SamplingKey(1, group, member, 0, 0) for group in range(500) for member in range(8)]


def draws(distribution, what="x"):
    draw = drawer(what, distribution, group_size=8)
    return [draw(key) for key in KEYS]


def test_a_normal_is_floored_at_0():
    found = draws(NormalDistribution(mean=10, sigma=3))
    assert statistics.mean(found) == pytest.approx(10, abs=0.2)
    assert statistics.stdev(found) == pytest.approx(3, abs=0.15)
    assert min(draws(NormalDistribution(mean=0, sigma=1))) == 0


def test_a_lognormal_has_its_median_and_its_cap():
    found = draws(LognormalDistribution(median=100, sigma=1.0, cap=2000))
    assert statistics.median(found) == pytest.approx(100, rel=0.05)
    assert max(found) == 2000
    assert statistics.mean(draws(LognormalDistribution(median=100, sigma=0.5))) == pytest.approx(113.3, rel=0.03)


def test_given_values_go_to_attempts_in_order():
    assert draws(GivenDistribution(values=[1, 2, 3]))[:7] == [1, 2, 3, 1, 2, 3, 1]
    assert set(draws(FixedDistribution(value=4))) == {4}


def test_an_empirical_draws_the_lines_of_its_file(tmp_path):
    (tmp_path / "lengths").write_text("5\n7\n7\n")
    found = draws(EmpiricalDistribution(path=tmp_path / "lengths"))
    assert found.count(5) / len(found) == pytest.approx(1 / 3, abs=0.03)
    assert set(found) == {5, 7}


def test_draws_repeat_for_the_same_name_and_differ_for_another():
    distribution = LognormalDistribution(median=1, sigma=1.0)
    assert draws(distribution) == draws(distribution)
    assert statistics.correlation(draws(distribution), draws(distribution, "y")) == pytest.approx(0, abs=0.05)

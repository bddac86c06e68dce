import itertools
import statistics

import pytest

from flashflow.evaluation.estimators import pass_at_k, standard_error


@pytest.mark.parametrize(
    ("num_samples", "num_solved", "k", "value"),
    [
        (4, 1, 1, 0.25),
        (4, 1, 2, 0.5),  # 1 - C(3,2)/C(4,2) = 1 - 3/6
        (5, 2, 3, 0.9),  # 1 - C(3,3)/C(5,3) = 1 - 1/10
        (10, 3, 5, 1 - 21 / 252),  # C(7,5) = 21, C(10,5) = 252
        (4, 0, 4, 0.0),
        (4, 3, 2, 1.0),  # no two of four samples miss the three that solve it
        (1, 1, 1, 1.0),
    ],
)
def test_pass_at_k_equals_values_by_hand(num_samples, num_solved, k, value):
    assert pass_at_k(num_samples, num_solved, k) == pytest.approx(value, abs=1e-15)


def test_pass_at_k_is_the_share_of_subsets_with_a_solution():
    for n in range(1, 8):
        for c in range(n + 1):
            for k in range(1, n + 1):
                subsets = list(itertools.combinations([True] * c + [False] * (n - c), k))
                assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, subsets)) / len(subsets))


def test_pass_at_k_of_many_samples_neither_overflows_nor_loses_the_small_difference():
    assert pass_at_k(10_000, 1, 5_000) == pytest.approx(0.5, abs=1e-12)
    assert pass_at_k(10_000, 1, 1) == pytest.approx(1e-4, rel=1e-10)


@pytest.mark.parametrize(("n", "c", "k"), [(4, 1, 0), (4, 1, 5), (4, 5, 1), (4, -1, 1)])
def test_pass_at_k_of_the_impossible_is_an_error(n, c, k):
    with pytest.raises(ValueError, match="means nothing"):
        pass_at_k(n, c, k)


def test_the_standard_error_is_the_deviation_over_the_root_of_the_count():
    assert standard_error([0.0, 1.0]) == pytest.approx(0.5)  # sqrt(1/2) / sqrt(2)
    assert standard_error([1.0, 2.0, 3.0, 4.0]) == pytest.approx((5 / 3 / 4) ** 0.5)
    values = [0.1, 0.7, 0.4, 0.4, 0.9]
    assert standard_error(values) == pytest.approx(statistics.stdev(values) / 5**0.5)


@pytest.mark.parametrize("values", [[], [1.0]])
def test_fewer_than_two_values_have_no_standard_error(values):
    assert standard_error(values) is None

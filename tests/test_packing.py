"""Lengths to micro-batches."""

from hypothesis import given
from hypothesis import strategies as st

from flashflow.packing import IDLE, MicroBatch, deal, pack, plan
from flashflow.shapes import safe_tokens

lengths_and_budgets = st.tuples(st.lists(st.integers(1, 3000), max_size=60), st.integers(1, 6000))


def test_a_table_by_hand() -> None:
    # Safe numbers: 50 -> 64, 30 -> 32, 29 -> 32, 100 -> 112, 9 -> 16.
    assert pack([50, 30, 100, 29, 9], max_tokens=200) == [
        MicroBatch((2,), 112),  # two rows of 112 are too many
        MicroBatch((0, 1, 3), 64),  # 192 tokens
        MicroBatch((4,), 16),  # 64 would be more than twice 16
    ]


def test_a_sample_longer_than_the_budget_goes_alone() -> None:
    assert pack([600, 8, 8], max_tokens=32) == [MicroBatch((0,), 608), MicroBatch((1, 2), 16)]


def test_only_the_rows_named_are_packed() -> None:
    assert pack([10, 20, 30], 100, rows=[2, 0]) == [MicroBatch((2, 0), 32)]


def test_nothing_gives_nothing() -> None:
    assert pack([], 100) == []
    assert deal([], 2, []) == [(), ()]
    assert plan([], 100, [(), ()], []) == [[], []]


@given(lengths_and_budgets)
def test_every_sample_is_in_exactly_one_micro_batch(case: tuple[list[int], int]) -> None:
    lengths, budget = case
    assert sorted(row for micro in pack(lengths, budget) for row in micro.rows) == list(range(len(lengths)))


@given(lengths_and_budgets)
def test_the_budget_holds_but_for_a_single_sample_and_padding_at_most_doubles(case: tuple[list[int], int]) -> None:
    lengths, budget = case
    for micro in pack(lengths, budget):
        assert micro.padded_tokens <= budget or len(micro.rows) == 1
        assert micro.length == safe_tokens(max(lengths[row] for row in micro.rows))
        assert all(lengths[row] <= micro.length <= 2 * safe_tokens(lengths[row]) for row in micro.rows)


def test_rows_are_dealt_longest_first_to_the_rank_with_the_least_to_do() -> None:
    # Safe numbers 64, 32, 32, 16 of the first stratum: 64 to rank 0, both 32 to rank 1, 16 to either: rank 0.
    # Of the second each rank takes one, rank 1 first, for it has less in all.
    assert deal([50, 30, 20, 9, 40, 40], 2, [[0, 1, 2, 3], [4, 5]]) == [(0, 3, 5), (1, 2, 4)]


@st.composite
def batches(draw: st.DrawFn) -> tuple[list[int], int, int, list[list[int]]]:
    """(lengths, budget, ranks, strata)."""
    lengths, budget = draw(lengths_and_budgets)
    kinds = draw(st.lists(st.integers(0, 3), min_size=len(lengths), max_size=len(lengths)))
    strata = [[row for row, its in enumerate(kinds) if its == kind] for kind in range(4)]
    return lengths, budget, draw(st.integers(1, 5)), strata


@given(batches())
def test_every_sample_has_one_rank_and_the_work_of_a_stratum_differs_by_at_most_one_sample(
    case: tuple[list[int], int, int, list[list[int]]],
) -> None:
    lengths, _, num_ranks, strata = case
    hands = deal(lengths, num_ranks, strata)
    assert sorted(row for hand in hands for row in hand) == list(range(len(lengths)))
    for stratum in strata:
        costs = [sum(safe_tokens(lengths[row]) for row in set(stratum) & set(hand)) for hand in hands]
        longest = max((safe_tokens(lengths[row]) for row in stratum), default=0)
        assert max(costs) - min(costs) <= longest


@given(batches())
def test_ranks_run_equally_many_on_rows_of_their_own_and_each_row_counts_once(
    case: tuple[list[int], int, int, list[list[int]]],
) -> None:
    lengths, budget, num_ranks, strata = case
    hands = deal(lengths, num_ranks, strata)
    for stratum in strata:
        plans = plan(lengths, budget, hands, stratum)
        assert len({len(mine) for mine in plans}) == 1
        assert sorted(row for mine in plans for micro in mine for row in micro.rows) == stratum
        for hand, mine in zip(hands, plans, strict=True):
            assert {row for micro in mine for row in micro.rows} <= set(hand)
            assert IDLE not in mine[: sum(micro != IDLE for micro in mine)]
        if num_ranks == 1:
            assert plans[0] == pack(lengths, budget, stratum)

"""Lengths to micro-batches."""

from hypothesis import given
from hypothesis import strategies as st

from flashflow.packing import MicroBatch, pack, share
from flashflow.shapes import safe_length

lengths_and_budgets = st.tuples(st.lists(st.integers(1, 3000), max_size=60), st.integers(1, 6000))


def test_a_table_by_hand() -> None:
    # Safe lengths: 50 -> 64, 30 -> 32, 29 -> 32, 100 -> 112, 9 -> 16.
    assert pack([50, 30, 100, 29, 9], max_tokens=200) == [
        MicroBatch((2,), 112),  # two rows of 112 are too many
        MicroBatch((0, 1, 3), 64),  # 192 tokens
        MicroBatch((4,), 16),  # 64 would be more than twice 16
    ]


def test_a_sample_longer_than_the_budget_goes_alone() -> None:
    assert pack([600, 8, 8], max_tokens=32) == [MicroBatch((0,), 640), MicroBatch((1, 2), 16)]


def test_only_the_rows_named_are_packed() -> None:
    assert pack([10, 20, 30], 100, rows=[2, 0]) == [MicroBatch((2, 0), 32)]


def test_nothing_gives_nothing() -> None:
    assert pack([], 100) == []
    assert share([], 0, 4) == []


@given(lengths_and_budgets)
def test_every_sample_is_in_exactly_one_micro_batch(case: tuple[list[int], int]) -> None:
    lengths, budget = case
    assert sorted(row for micro in pack(lengths, budget) for row in micro.rows) == list(range(len(lengths)))


@given(lengths_and_budgets)
def test_the_budget_holds_but_for_a_single_sample_and_padding_at_most_doubles(case: tuple[list[int], int]) -> None:
    lengths, budget = case
    for micro in pack(lengths, budget):
        assert micro.padded_tokens <= budget or len(micro.rows) == 1
        assert micro.length == safe_length(max(lengths[row] for row in micro.rows))
        assert all(lengths[row] <= micro.length <= 2 * safe_length(lengths[row]) for row in micro.rows)


@given(lengths_and_budgets, st.integers(1, 5))
def test_ranks_run_equally_many_and_each_micro_batch_counts_once(case: tuple[list[int], int], num_ranks: int) -> None:
    plan = pack(*case)
    shares = [share(plan, rank, num_ranks) for rank in range(num_ranks)]
    assert len({len(mine) for mine in shares}) == 1
    worked = [micro for mine in shares for micro in mine if not micro.idle]
    assert sorted(worked, key=lambda micro: micro.rows) == sorted(plan, key=lambda micro: micro.rows)
    assert sum(micro.idle for mine in shares for micro in mine) < num_ranks
    for simultaneous in zip(*shares, strict=True):
        assert all(micro.rows == simultaneous[0].rows for micro in simultaneous if micro.idle)

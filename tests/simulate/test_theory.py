"""Contract 10: the formulas by table, and the bounds against the simulator."""

from statistics import mean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flashflow.simulate.run import simulate
from flashflow.simulate.theory import (
    Work,
    asynchronous_bound,
    paper_bound,
    paper_exact_split,
    paper_split,
    queue_bound,
    synchronous_bound,
)
from tests.simulate.simulated_config import simulated_config

CONTRACT = Work(samples=512, workers=128, epochs=1, mean_generate_s=60, mean_train_s=20, longest_generate_s=1200)
RATE = 10.0
"""Tokens a second of the engines below."""


def test_the_contracts_example():
    assert synchronous_bound(CONTRACT) == 1520
    assert paper_split(CONTRACT, alpha=1).step_s == 920
    exact = paper_exact_split(CONTRACT, alpha=1)
    assert exact.step_s == pytest.approx(864, abs=1)
    assert paper_bound(CONTRACT, beta=exact.beta, alpha=1) == pytest.approx(exact.step_s)


@pytest.mark.parametrize(
    ("beta", "alpha", "seconds"),
    [
        (0.5, 0, 480 + 1200 + 160),  # the sum
        (0.5, 1, 480 + (1200 + 160) / 2),
        (0.5, 1.9, 480 + (1200 + 160) / 2),  # floor(alpha)
        (0.5, 7, 480 + (1200 + 160) / 8),
        (0.05, 7, 1600),  # the trainer is the bottleneck
    ],
)
def test_the_asynchronous_bound_by_hand(beta, alpha, seconds):
    assert asynchronous_bound(CONTRACT, beta=beta, alpha=alpha) == pytest.approx(seconds)


def test_the_papers_bound_is_never_above_ours():
    for beta in (0.1, 0.3, 0.6):
        for alpha in (0, 1, 4):
            assert paper_bound(CONTRACT, beta=beta, alpha=alpha) <= asynchronous_bound(CONTRACT, beta=beta, alpha=alpha)


lengths = st.lists(st.integers(1, 300), min_size=16, max_size=16).filter(lambda values: max(values) > 1)
"""Of the 16 samples of every batch, so that mean and longest are those of every batch."""


def run(folder, values, *, slots, steps, alpha, train_s, schedule="async"):
    return simulate(
        simulated_config(
            folder,
            run__steps=steps,
            rollout__alpha=alpha,
            rollout__schedule=schedule,
            rollout__concurrency=200,
            engine__slots=slots,
            engine__answer_tokens={"kind": "given", "values": values},
            engine__decode_tokens_per_s=RATE,
            trainer__fixed_s=train_s,
            trainer__seconds_per_token=0,
        )
    )


@settings(max_examples=15, deadline=None)
@given(values=lengths, slots=st.integers(1, 20))
def test_queue_scheduling_keeps_its_bound(tmp_path_factory, values, slots):
    """Every step of a synchronous run is one queue of 16 requests."""
    simulation = run(tmp_path_factory.mktemp("queue"), values, slots=slots, steps=3, alpha=0, train_s=1.0)
    bound = queue_bound(16, slots, mean(values) / RATE, max(values) / RATE)
    for record in simulation.records:
        assert record["time_wait_s"] <= bound + 1e-6
        assert record["time_step_s"] <= bound + 1.0 + 1e-6


@settings(max_examples=25, deadline=None)
@given(
    values=lengths,
    slots=st.integers(1, 20),
    alpha=st.sampled_from([0, 0.5, 1, 1.5, 2, 4]),
    train_s=st.floats(0.1, 60),
)
def test_asynchronous_steps_keep_their_bound(tmp_path_factory, values, slots, alpha, train_s):
    """slots = (1 - beta) K workers generate, and the rest trains a batch in t = train_s."""
    steps = 12
    simulation = run(tmp_path_factory.mktemp("async"), values, slots=slots, steps=steps, alpha=alpha, train_s=train_s)
    work = Work(16, slots + 1, 1, mean(values) / RATE, train_s / 16, max(values) / RATE)
    bound = asynchronous_bound(work, beta=1 / (slots + 1), alpha=alpha)
    assert simulation.figures.step_s_mean <= bound * (1 + 1e-9) + 1e-6

"""However the trainer cuts an optimizer step, over one rank or two, loss and gradient are those of the whole."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from split_cases import ALGORITHMS, SPLITS, Split, Step

RELATIVE = 1e-10
Outcome = tuple[dict[str, float], torch.Tensor]


@pytest.fixture(scope="module")
def step() -> Step:
    torch.set_num_threads(1)
    return Step()


@pytest.fixture(scope="module")
def wholes(step: Step) -> dict[str, Outcome]:
    return {name: step.whole(name) for name in ALGORITHMS}


def assert_equal(found: Outcome, whole: Outcome) -> None:
    losses, gradient = whole
    assert found[0] == pytest.approx(losses, rel=RELATIVE, abs=1e-13)
    assert gradient.abs().max() > 0
    assert (found[1] - gradient).abs().max() <= RELATIVE * gradient.abs().max()


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(name=st.sampled_from(sorted(ALGORITHMS)), max_tokens=st.integers(1, 600), order=st.integers(0, 1000))
def test_any_micro_batches_in_any_order_add_up_to_the_whole(step, wholes, name, max_tokens, order):
    assert_equal(step.split(name, Split(max_tokens, order)), wholes[name])


@pytest.mark.slow
def test_two_ranks_add_up_to_the_whole(wholes, tmp_path):
    script = Path(__file__).with_name("split_cases.py")
    ranks = [subprocess.Popen([sys.executable, str(script), str(rank), "2", str(tmp_path)]) for rank in range(2)]
    try:
        assert [rank.wait(timeout=120) for rank in ranks] == [0, 0]
    finally:
        for rank in ranks:
            rank.kill()
    for rank in range(2):
        found = torch.load(tmp_path / f"rank-{rank}.pt", weights_only=False)
        assert len(found) == len(ALGORITHMS) * len(SPLITS)
        for name, losses, gradient in found:
            assert_equal((losses, gradient), wholes[name])

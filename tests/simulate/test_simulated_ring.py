"""The real ring with simulated parts: on the machine's clock, on the virtual one, and between processes."""

import math
from typing import Any

import pytest

from flashflow.clock import LoopClock
from flashflow.config import load_config
from flashflow.launch.in_process import ring
from flashflow.observe.metrics import read_metrics
from flashflow.observe.progress import ProgressDisplay
from flashflow.simulate.clock import run_virtual
from tests.ring import train
from tests.simulate.simulated_config import simulated_config, write_simulated

NULL = {
    "engine__decode_tokens_per_s": 0,
    "engine__answer_tokens": {"kind": "fixed", "value": 40},
    "trainer__seconds_per_token": 0,
    "trainer__fixed_s": 0,
}


def play(folder, *, clock=run_virtual, **overrides: Any) -> list[dict[str, Any]]:
    config = simulated_config(folder, **overrides)
    with ProgressDisplay() as display:
        config.run_folder.mkdir(parents=True, exist_ok=True)
        outcome = clock(ring(config, display, resume=False, clock=LoopClock()))
    assert (outcome.step, outcome.reason) == (config.run.steps, "steps")
    return read_metrics(config.run_folder / "metrics.jsonl")


def test_a_step_takes_the_virtual_time_its_parts_take(tmp_path):
    """Synchronous, every answer 50 tokens at 10 tokens a second, 16 of them in 16 slots; 16 x 60 tokens trained."""
    lines = play(tmp_path, rollout__alpha=0, engine__answer_tokens={"kind": "fixed", "value": 50})
    for line in lines:
        assert line["time_wait_s"] == pytest.approx(5.0, abs=1e-6)
        assert line["time_train_s"] == pytest.approx(1.0 + 16 * 60 * 1e-3, abs=1e-6)


@pytest.mark.parametrize("alpha", [0, 1, 2.5])
def test_staleness_is_bounded_and_versions_are_real(tmp_path, alpha):
    lines = play(tmp_path, rollout__alpha=alpha, run__steps=8)
    assert max(line["staleness_max"] for line in lines) <= math.ceil(alpha)
    assert alpha == 0 or max(line["staleness_max"] for line in lines) >= 1


def test_two_virtual_runs_write_the_same(tmp_path):
    overrides = {"simulate__step_s": {"kind": "normal", "mean": 2, "sigma": 2}, "simulate__crash_rate": 0.05}
    assert play(tmp_path / "a", **overrides) == play(tmp_path / "b", **overrides)


def test_turns_and_observations_make_the_trajectory(tmp_path):
    (line, *_) = play(
        tmp_path,
        run__steps=1,
        engine__answer_tokens={"kind": "fixed", "value": 50},
        simulate__turns={"kind": "fixed", "value": 3},
        simulate__observation_tokens={"kind": "fixed", "value": 7},
        simulate__step_s={"kind": "fixed", "value": 4},
    )
    assert line["tokens_trained"] == 16 * 3 * 50
    assert line["time_wait_s"] == pytest.approx(3 * (5.0 + 4.0), abs=1e-6)
    assert line["time_train_s"] == pytest.approx(1.0 + 16 * (10 + 3 * 50 + 2 * 7) * 1e-3, abs=1e-6)


def test_a_context_that_is_full_ends_the_attempt_as_truncated(tmp_path):
    (line, *_) = play(
        tmp_path,
        run__steps=1,
        sampling__max_new_tokens=100,
        engine__max_context_tokens=250,
        engine__answer_tokens={"kind": "fixed", "value": 50},
        simulate__turns={"kind": "fixed", "value": 9},
    )
    assert (line["tokens_trained"], line["truncated_fraction"]) == (16 * 3 * 50, 1.0)  # 10 + 150 + 100 > 250


def test_crashes_and_hangs_are_tried_again_and_the_run_goes_on(tmp_path):
    lines = play(
        tmp_path,
        simulate__crash_rate=0.2,
        simulate__hang_rate=0.02,
        rollout__turn_deadline_s=50,
        rollout__trajectory_deadline_s=200,
        rollout__max_attempts=4,
    )
    assert lines[-1]["ledger_retries"] > 0
    assert lines[-1]["ledger_consumed"] == 4 * 16


def test_the_null_ring_runs_on_the_machines_clock_in_one_process(tmp_path):
    import asyncio

    lines = play(tmp_path, clock=asyncio.run, **NULL)
    assert [line["tokens_trained"] for line in lines] == [16 * 40] * 4


@pytest.mark.slow
def test_the_null_ring_runs_between_processes_and_resumes(tmp_path):
    path = write_simulated(tmp_path, **NULL)
    ended = train(path)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    again = train(path, "run.steps=6", "--resume")
    assert again.returncode == 0, again.stdout + again.stderr
    lines = read_metrics(load_config(path).run_folder / "metrics.jsonl")
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    assert lines[-1]["ledger_consumed"] == 6 * 16

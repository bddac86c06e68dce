"""`flashflow simulate`: the real scheduling on the virtual clock, the same bytes for the same seed."""

import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flashflow.errors import ConfigError
from flashflow.simulate.run import simulate, write
from flashflow.simulate.spans import Recorder
from tests.simulate.simulated_config import simulated_config
from tests.test_cli import flashflow

UNEVEN = {
    "simulate__step_s": {"kind": "normal", "mean": 5, "sigma": 5},
    "simulate__crash_rate": 0.02,
    "reward__arguments": {"latency_s": 1.0, "sigma_s": 1.0},
}


def files(folder, **overrides):
    config = simulated_config(folder, **overrides)
    write(simulate(config), config.run_folder)
    return [(config.run_folder / name).read_bytes() for name in ("trace.json", "simulation.json")]


def test_the_same_seed_gives_the_same_bytes_and_another_others(tmp_path):
    first, again = files(tmp_path / "a", **UNEVEN), files(tmp_path / "b", **UNEVEN)
    assert first == again
    assert files(tmp_path / "c", **UNEVEN, run__seed=4) != first


def test_the_figures_are_those_of_the_arithmetic(tmp_path):
    """Synchronous: 16 answers of 50 tokens at 10 a second fill 16 slots for 5 s; then 1.96 s of training."""
    overrides = {"rollout__alpha": 0, "engine__answer_tokens": {"kind": "fixed", "value": 50}}
    found = simulate(simulated_config(tmp_path, **overrides)).figures
    step_s = 5.0 + 1.0 + 16 * 60 * 1e-3
    assert found.step_s_mean == pytest.approx(step_s)
    assert found.trainer_busy == pytest.approx(1.96 / step_s)
    assert found.slots_busy == found.engines_busy == pytest.approx(5.0 / step_s)
    assert found.samples_per_s == pytest.approx(16 / step_s)
    assert (found.wasted, found.staleness_max) == (0, 0)
    assert found.states["consumed"] == 4 * 16


def test_messages_take_their_time(tmp_path):
    overrides = {"rollout__alpha": 0, "engine__answer_tokens": {"kind": "fixed", "value": 50}}
    at_once, late = (
        simulate(simulated_config(tmp_path, **overrides, simulate__message_s=seconds)).figures for seconds in (0, 0.1)
    )
    assert late.step_s_mean > at_once.step_s_mean + 0.6  # at least: lease, generate twice, score, commit, batch


def test_a_run_ends_after_the_virtual_seconds(tmp_path):
    simulation = simulate(simulated_config(tmp_path, run__steps=10_000), seconds=300)
    assert simulation.outcome.reason == "stopped"
    assert 280 < sum(record["time_step_s"] for record in simulation.records) < 320


@settings(max_examples=12, deadline=None)
@given(
    alpha=st.sampled_from([0, 0.5, 1, 2, 3]),
    sigma=st.floats(0, 1.5),
    step_s=st.floats(0, 20),
    crash_rate=st.sampled_from([0, 0.01, 0.2]),
    seed=st.integers(0, 1000),
)
def test_under_any_latencies_and_crashes_nothing_is_lost_or_too_old(
    tmp_path_factory, alpha, sigma, step_s, crash_rate, seed
):
    overrides = {
        "rollout__alpha": alpha,
        "engine__answer_tokens": {"kind": "lognormal", "median": 50, "sigma": sigma},
        "simulate__step_s": {"kind": "normal", "mean": step_s, "sigma": step_s},
        "simulate__crash_rate": crash_rate,
        "rollout__max_attempts": 20,
        "run__seed": seed,
    }
    found = simulate(simulated_config(tmp_path_factory.mktemp("any"), **overrides)).figures
    assert found.staleness_max <= math.ceil(alpha)
    assert found.states["consumed"] == 4 * 16
    assert found.states["expired"] == found.states["surplus"] == found.states["filtered"] == 0


def test_the_trace_is_chromes_and_its_length_is_bounded(tmp_path):
    trace, _ = files(tmp_path, simulate__trace_spans=20)
    events = json.loads(trace)["traceEvents"]
    assert len([event for event in events if event["ph"] == "X"]) == 20
    names = {event["args"]["name"] for event in events if event["ph"] == "M"}
    assert "engine-0" in names


def test_busy_time_counts_a_lane_once_and_a_role_once():
    spans = Recorder(10)
    for lane, start, end in ((0, 0.0, 2.0), (1, 1.0, 3.0), (0, 5.0, 6.0)):
        spans.add("engine-0", lane, "x", start, end)
    spans.add("trainer-0", 0, "y", 0.0, 9.0)
    assert (spans.lane_seconds("engine"), spans.busy_seconds("engine")) == (5.0, 4.0)
    assert (spans.lane_seconds("engine", since=1.5), spans.busy_seconds("engine", since=1.5)) == (3.0, 2.5)


def test_a_real_config_cannot_be_simulated(tmp_path):
    from flashflow.config import load_config

    with pytest.raises(ConfigError, match="cannot be simulated"):
        simulate(load_config("configs/quickstart.yaml"))


def test_the_command_prints_figures_and_says_where_the_trace_is(tmp_path):
    config = simulated_config(tmp_path)
    result = flashflow("simulate", tmp_path / "config.yaml", "rollout.alpha=2")
    assert result.returncode == 0, result.stderr
    assert "step time" in result.stdout
    assert (config.run_folder / "trace.json").exists()

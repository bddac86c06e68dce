"""`flashflow plan`: parts are told from a run's trace, and the split is the fastest of those simulated."""

import msgspec
import pytest

from flashflow.clock import LoopClock
from flashflow.errors import ConfigError
from flashflow.launch.in_process import ring
from flashflow.observe.progress import ProgressDisplay
from flashflow.simulate.clock import run_virtual
from flashflow.simulate.planner import Calibration, Candidate, calibrate, measured, plan, simulated
from flashflow.simulate.run import simulate
from tests.simulate.simulated_config import simulated_config, write_simulated
from tests.test_cli import flashflow

LATENCY_BOUND = {
    "rollout__alpha": 0,
    "run__steps": 8,
    "simulate__step_s": {"kind": "normal", "mean": 8, "sigma": 3},
    "checkpoint__every_steps": 0,
    "trainer__seconds_per_token": 2e-3,
}


def real_run(folder, **overrides):
    """Journal and metrics of the ring itself, on the virtual clock."""
    config = simulated_config(folder, **{**LATENCY_BOUND, **overrides})
    config.run_folder.mkdir(parents=True, exist_ok=True)
    with ProgressDisplay() as display:
        run_virtual(ring(config, display, resume=False, clock=LoopClock()))
    return config


def test_the_parts_are_told_from_the_trace(tmp_path):
    config = real_run(tmp_path)
    found = calibrate(config.run_folder, config)
    assert found.decode_tokens_per_s == pytest.approx(10, rel=0.15)
    assert sum(found.latency_s) / len(found.latency_s) == pytest.approx(8, rel=0.15)
    assert found.prompt_tokens == 10
    assert len(found.answer_tokens) == 8 * 16


def test_what_training_costs_is_told_with_prompts_and_updates(tmp_path):
    """As a simulated trainer counts tokens: a run whose prompts are long has its own steps predicted too."""
    prompts = {"kind": "fixed", "value": 500}
    slow = {"data__source": {"kind": "simulated", "prompt_tokens": prompts}, "engine__update_s": 3}
    config = real_run(tmp_path, **slow)
    found = calibrate(config.run_folder, config)
    assert found.train_s_per_token == pytest.approx(2e-3, rel=0.1)
    assert found.update_s == pytest.approx(3)
    predicted = measured(config, found, Candidate(1, 1, 0.0, 16, 0.0, 0.0))
    assert predicted.step_s == pytest.approx(simulate(config).figures.step_s_mean, rel=0.1)


@pytest.mark.parametrize(("alpha", "concurrency"), [(0, 16), (2, 16), (2, 40), (1, 8)])
def test_step_times_of_other_settings_are_predicted_within_a_fifth(tmp_path, alpha, concurrency):
    config = real_run(tmp_path / "seen")
    found = calibrate(config.run_folder, config)
    predicted = measured(config, found, Candidate(1, 1, alpha, concurrency, 0.0, 0.0))
    overrides = {**LATENCY_BOUND, "rollout__alpha": alpha, "rollout__concurrency": concurrency, "run__steps": 16}
    truth = simulate(simulated_config(tmp_path / "new", **overrides)).figures.step_s_mean
    assert predicted.step_s == pytest.approx(truth, rel=0.2)


FOUND = Calibration(
    prompt_tokens=10,
    answer_tokens=[50.0] * 64,
    latency_s=[0.0] * 64,
    decode_tokens_per_s=10,
    train_fixed_s=0.0,
    train_s_per_token=5e-3,
    update_s=0.0,
    train_devices=1,
)


def test_the_fastest_split_is_found(tmp_path):
    """16 answers a batch, 5 s each in 4 slots an engine: 20 / engines s; training 16 x 50 x .005 = 4 / devices s."""
    config = simulated_config(tmp_path, engine__slots=4)
    found = plan(config, FOUND, devices=5)
    assert (found.best.train_devices, found.best.engines) == (1, 4)
    assert found.best.alpha > 0
    assert found.asynchrony_pays
    assert found.speedup > 2


def test_where_training_is_nothing_asynchrony_does_not_pay(tmp_path):
    even = msgspec.structs.replace(FOUND, train_s_per_token=0.0)
    found = plan(simulated_config(tmp_path), even, devices=2)
    assert not found.asynchrony_pays
    assert found.best.alpha == 0


def test_a_schedule_can_be_kept(tmp_path):
    config = simulated_config(tmp_path, rollout__alpha=0, rollout__schedule="sync_naive")
    now = Candidate(1, 1, 0.0, 16, 0.0, 0.0)
    assert simulated(config, FOUND, now, config.rollout.schedule).rollout.schedule == "sync_naive"


def test_a_candidate_keeps_what_is_not_its_own(tmp_path):
    config = simulated_config(tmp_path, batch__groups=6)
    other = simulated(config, FOUND, Candidate(3, 2, 4.0, 20, 0.0, 0.0))
    assert (other.batch.groups, other.placement.engine, other.rollout.alpha) == (6, 2, 4.0)


def test_a_run_that_says_too_little_and_too_few_devices_are_refused(tmp_path):
    config = simulated_config(tmp_path)
    with pytest.raises(ConfigError, match="0 attempts and 0 steps"):
        calibrate(tmp_path, config)
    with pytest.raises(ConfigError, match="--devices: 1"):
        plan(config, FOUND, devices=1)


def test_the_command_names_the_best_setting(tmp_path):
    config = real_run(tmp_path)
    result = flashflow("plan", write_simulated(tmp_path, **LATENCY_BOUND), "--trace", config.run_folder, "--devices", 2)
    assert result.returncode == 0, result.stderr
    assert "times as fast as today's" in result.stdout

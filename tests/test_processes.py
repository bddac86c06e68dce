"""The ring as real processes: equal to the reference loop, and it ends in order whatever happens to it."""

import os
import re
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest
import torch

from flashflow.config import load_config
from flashflow.observe.metrics import read_metrics
from tests.reference_loop import reference_loop
from tests.ring import children, command, environment, final_weights, make_ring, metrics, train

WAIT_S = 120


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    return reference_loop(load_config(make_ring(tmp_path_factory.mktemp("reference"))))


class Run:
    """A `flashflow train` under way."""

    def __init__(self, path: Path, *arguments: str) -> None:
        self.path = path
        self.process = subprocess.Popen(
            command(path, *arguments), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment()
        )

    def until_step(self, step: int) -> str:
        """The output up to the line that reports the step; blocks until it is there."""
        assert self.process.stdout is not None
        lines = []
        for line in self.process.stdout:
            lines.append(line)
            if re.match(rf"step +{step}/", line):
                return "".join(lines)
        raise AssertionError("".join(lines))

    def segments(self) -> set[str]:
        """Shared memory of this run, by the ids under which its gangs met."""
        meetings = (load_config(self.path).run_folder / "gang").glob("*")
        ids = {meeting.name.rpartition("-")[0] for meeting in meetings} | {f"local{self.process.pid}"}
        return {name for name in segments() if name.split("-")[1] in ids}

    def end(self) -> tuple[int, str, float]:
        """Exit code, the rest of the output, seconds until the end."""
        started = time.monotonic()
        output, _ = self.process.communicate(timeout=WAIT_S)
        return self.process.returncode, output, time.monotonic() - started


def segments() -> set[str]:
    """Of every run on this machine."""
    return {name for name in os.listdir("/dev/shm") if name.startswith("flashflow")}


def alive(pids: list[int]) -> list[int]:
    return [pid for pid in pids if psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE]


@pytest.mark.parametrize("env", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_the_ring_between_processes_equals_the_reference_loop_bit_for_bit(tmp_path, reference, env):
    path = make_ring(tmp_path, overrides={"placement.env": env, "placement.reward": 1})
    ended = train(path)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    history, weights = reference
    assert [line["loss"] for line in metrics(path)] == [step["loss"] for step in history]
    final = final_weights(path)
    assert all(torch.equal(final[name], tensor) for name, tensor in weights.items())


def test_a_reward_that_raises_stops_the_run_with_its_traceback(tmp_path):
    run = Run(make_ring(tmp_path, reward="explode"))
    code, output, _ = run.end()
    assert code == 1
    assert "ZeroDivisionError: the reward function of the test blew up" in output
    assert "rewards.py" in output
    assert run.segments() == set()
    config = load_config(run.path)
    assert (config.run_folder / "config.yaml").exists()
    assert any((config.run_folder / "journal").iterdir())


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_the_run_in_order_and_it_resumes(tmp_path, number, code):
    run = Run(make_ring(tmp_path, overrides={"run.steps": 500, "rollout.alpha": 1, "checkpoint.every_steps": 0}))
    run.until_step(3)
    pids = list(children(run.process.pid).values())
    assert len(pids) == 7
    run.process.send_signal(number)
    found, output, seconds = run.end()
    assert found == code, output
    assert seconds < 10
    assert alive(pids) == []
    assert run.segments() == set()
    done = metrics(run.path)[-1]["step"]
    assert (load_config(run.path).run_folder / "checkpoints" / f"step-{done:06d}").exists()

    resumed = train(run.path, f"run.steps={done + 2}", "--resume")
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    assert [line["step"] for line in metrics(run.path)] == list(range(1, done + 3))


@pytest.mark.slow
@pytest.mark.parametrize("role", ["env-0", "reward-0", "engine-0", "buffer-0", "proxy-0", "trainer-0", "controller-0"])
def test_a_killed_process_is_replaced_and_every_planned_step_is_trained(tmp_path, role):
    overrides = {
        "run.steps": 12,
        "rollout.alpha": 1,
        "placement.env": 2,
        "network.peer_deadline_s": 3,
        "weights.deadline_s": 2,  # less than an engine takes to come back
        "evaluation.every_steps": 4,
        "evaluation.problems": 8,
    }
    run = Run(make_ring(tmp_path, overrides=overrides))
    run.until_step(3)
    os.kill(children(run.process.pid)[role], signal.SIGKILL)
    code, output, _ = run.end()
    assert code == 0, output
    assert f"{role} was killed by SIGKILL" in output
    lines = metrics(run.path)
    assert [line["step"] for line in lines] == list(range(1, 13))
    assert max(line["staleness_max"] for line in lines) <= 1
    assert min(line["tokens_generated"] for line in lines) >= 0
    evaluations = read_metrics(load_config(run.path).run_folder / "evaluations.jsonl")
    assert [evaluation["version"] for evaluation in evaluations] == [0, 4, 8, 12]
    assert all(evaluation["num_failed"] == 0 for evaluation in evaluations)
    assert run.segments() == set()


@pytest.mark.slow
def test_a_killed_supervisor_leaves_no_process_behind_and_the_run_resumes(tmp_path):
    run = Run(make_ring(tmp_path, overrides={"run.steps": 500, "rollout.alpha": 1}))
    run.until_step(2)
    processes = [psutil.Process(pid) for pid in children(run.process.pid).values()]
    run.process.kill()
    _, left = psutil.wait_procs(processes, timeout=20)
    assert left == []
    left_behind = run.segments()
    assert left_behind  # nobody was left to remove them
    done = metrics(run.path)[-1]["step"]
    resumed = train(run.path, f"run.steps={done + 2}", "--resume")
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    assert not left_behind & segments()


def test_a_run_folder_in_use_is_refused_and_one_that_holds_a_run_is_not_overwritten_unasked(tmp_path):
    path = make_ring(tmp_path, overrides={"run.steps": 500, "rollout.alpha": 1})
    run = Run(path)
    run.until_step(1)
    second = train(path, "--overwrite")
    assert second.returncode == 2
    assert f"is in use by process {run.process.pid}" in second.stderr
    run.process.send_signal(signal.SIGINT)
    assert run.end()[0] == 130
    third = train(path)
    assert third.returncode == 2
    assert "holds a run already; remedy: --resume, --overwrite" in third.stderr


@pytest.mark.slow
def test_in_one_process_a_signal_ends_the_run_in_order_too(tmp_path):
    overrides = {"run.runtime": "in_process", "run.steps": 500, "rollout.alpha": 1}
    run = Run(make_ring(tmp_path, overrides=overrides))
    run.until_step(2)
    run.process.send_signal(signal.SIGTERM)
    code, output, _ = run.end()
    assert code == 143, output
    done = metrics(run.path)[-1]["step"]
    assert (load_config(run.path).run_folder / "checkpoints" / f"step-{done:06d}").exists()
    assert run.segments() == set()


@pytest.mark.slow
def test_in_one_process_a_reward_that_raises_is_one_message(tmp_path):
    ended = train(make_ring(tmp_path, reward="explode", overrides={"run.runtime": "in_process"}))
    assert ended.returncode == 1
    assert "ZeroDivisionError: the reward function of the test blew up" in ended.stderr
    assert ended.stderr.count("Traceback") == 1


@pytest.mark.slow
def test_when_nothing_moves_every_role_says_what_it_waits_for(tmp_path):
    overrides = {"network.stall_report_s": 2, "run.steps": 2, "engine.batch_invariant": False}
    ended = train(make_ring(tmp_path, reward="stall", overrides=overrides))
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "no step done for 2 s (network.stall_report_s)" in ended.stdout
    assert "controller: waits for batch 1; version 0 served" in ended.stdout
    assert re.search(r"env-0: \d+ attempts, the oldest for", ended.stdout)
    assert re.search(r"reward: \d+ calls, of which [1-9]\d* run", ended.stdout)
    assert "trainer-0: at step 0, waits for the controller" in ended.stdout

"""`sbatch launch/slurm_async.sh` on a real Slurm of three virtual nodes."""

import json
import re
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch

from flashflow.config import load_config
from tests.launch.nodes import ROOT
from tests.launch.slurm import Slurm, install
from tests.reference_loop import reference_loop
from tests.ring import final_weights, make_ring, metrics

pytestmark = pytest.mark.timeout(900)

SCRIPTS = sorted((ROOT / "launch").glob("*.sh"))


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_the_scripts_are_shell(script):
    subprocess.run(["bash", "-n", str(script)], check=True)
    usage = subprocess.run(
        ["bash", str(ROOT / "launch" / "slurm_async.sh")], capture_output=True, text=True, check=False
    )
    assert usage.returncode == 2
    assert usage.stderr.startswith("usage: sbatch [options] slurm_async.sh CONFIG")


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    install()
    cluster = Slurm(tmp_path_factory.mktemp("slurm"))
    yield cluster
    cluster.close()


class Job:
    def __init__(self, slurm: Slurm, config: Path, *options: str, script: str = "slurm_async.sh", arguments=()) -> None:
        self.slurm, self.config = slurm, config
        self.output = config.with_name("job.out")
        command = ["sbatch", "--parsable", f"--output={self.output}", *options, str(ROOT / "launch" / script)]
        self.id = slurm.run(*command, str(config), *arguments, FLASHFLOW_PYTHON=sys.executable).strip().split(";")[0]

    def wait(self, **expected) -> dict[str, str]:
        return self.slurm.wait(self.id, self.output, **expected)

    def until(self, pattern: str, times: int = 1) -> None:
        def found() -> bool:
            text = self.output.read_text() if self.output.exists() else ""
            return len(re.findall(pattern, text, re.MULTILINE)) >= times

        self.slurm.until(found, pattern, 400)


def processes_of(config: Path) -> list[list[str]]:
    """Command lines of what belongs to the run."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        line = process.info["cmdline"] or []
        if any(str(config.parent) in word for word in line):
            found.append(line)
    return found


def started(config: Path) -> list[set[str]]:
    """Names of the role processes, slot by slot."""
    return [set(json.loads(path.read_text())) for path in load_config(config).run_folder.glob("startup*.json")]


@pytest.mark.slow
def test_a_job_of_three_nodes_completes_with_the_planned_steps(slurm, tmp_path):
    config = make_ring(tmp_path, overrides={"run.steps": 5})
    job = Job(slurm, config, "--nodes=3", arguments=["--roles", "engine=2,env=3"])
    assert job.wait()["ExitCode"] == "0:0"
    history, weights = reference_loop(load_config(config))
    assert [line["loss"] for line in metrics(config)] == [step["loss"] for step in history]
    final = final_weights(config)
    assert all(torch.equal(final[name], tensor) for name, tensor in weights.items())
    assert [bool(names) for names in started(config)] == [True] * 3
    assert processes_of(config) == []


@pytest.mark.slow
def test_the_synchronous_script_lays_its_overrides_over_the_config(slurm, tmp_path):
    config = make_ring(tmp_path, overrides={"run.steps": 2, "rollout.alpha": 1})
    Job(slurm, config, "--nodes=1", script="slurm_sync.sh").wait()
    stored = load_config(load_config(config).run_folder / "config.yaml")
    assert (stored.rollout.alpha, stored.weights.sync) == (0, "blocking")


@pytest.mark.slow
def test_a_mistake_in_the_config_is_exit_code_2(slurm, tmp_path):
    job = Job(slurm, make_ring(tmp_path), "--nodes=2", arguments=["--roles", "engines=2"])
    assert job.wait(state="FAILED")["ExitCode"] == "2:0"
    text = job.output.read_text()
    assert text.count("--roles: 'engines=2' names no role; did you mean engine?") == 2  # once a node
    assert "Traceback" not in text


@pytest.mark.slow
def test_before_the_time_limit_it_checkpoints_is_requeued_and_resumes_with_the_same_samples(slurm, tmp_path):
    config = make_ring(tmp_path, overrides={"run.steps": 30, "checkpoint.every_steps": 100})
    job = Job(slurm, config, "--nodes=2", arguments=["--roles", "env=2"])
    job.until(r"^step +2/30")
    slurm.run("scancel", "--signal=USR1", "--batch", job.id)  # what Slurm itself sends before the time limit
    assert job.wait()["Restarts"] == "1"
    assert "time is nearly up: writing a checkpoint, then requeueing" in job.output.read_text()
    assert "was trained again" not in job.output.read_text()  # the checkpoint had all that was trained
    history, _ = reference_loop(load_config(config))
    lines = metrics(config)
    assert [line["step"] for line in lines] == list(range(1, 31))
    assert [line["loss"] for line in lines] == [step["loss"] for step in history]
    assert [line["reward_mean"] for line in lines] == pytest.approx([step["reward_mean"] for step in history])


@pytest.mark.slow
def test_scancel_leaves_nothing(slurm, tmp_path):
    config = make_ring(tmp_path, overrides={"run.steps": 500, "rollout.alpha": 1})
    job = Job(slurm, config, "--nodes=3", arguments=["--roles", "engine=2,env=2"])
    job.until(r"^step +2/500")
    assert len(processes_of(config)) > 10
    slurm.run("scancel", job.id)
    job.wait(state="CANCELLED")
    slurm.until(lambda: processes_of(config) == [], "the processes of the job to end", 40)


@pytest.mark.slow
def test_a_lost_node_requeues_the_job_and_it_resumes(slurm, tmp_path):
    config = make_ring(tmp_path, overrides={"run.steps": 200, "rollout.alpha": 1, "checkpoint.every_steps": 5})
    job = Job(slurm, config, "--nodes=2", arguments=["--roles", "env=2"])
    job.until(r"^step +2/200")
    assert slurm.state(job.id)["NodeList"] == "ffn[1-2]"
    slurm.kill_node("ffn2")
    try:
        assert int(job.wait()["Restarts"]) >= 1
        assert [line["step"] for line in metrics(config)] == list(range(1, 201))
    finally:
        slurm.start_node("ffn2")


@pytest.mark.slow
def test_a_heterogeneous_job_is_one_run(slurm, tmp_path):
    overrides = {"run.steps": 3, "placement.nodes": {"trainer": "ffn1", "engine": "ffn1", "env": "ffn[23]"}}
    config = make_ring(tmp_path, overrides=overrides)
    job = Job(
        slurm, config, "--nodes=1", "--nodelist=ffn1", ":", "--nodes=2", "--nodelist=ffn[2-3]",
        arguments=["--roles", "env=2"],
    )  # fmt: skip
    job.wait()
    assert [line["step"] for line in metrics(config)] == [1, 2, 3]
    by_slot = [{name for name in names if name.startswith(("trainer", "env"))} for names in started(config)]
    assert sorted(map(sorted, by_slot)) == [["env-0"], ["env-1"], ["trainer-0"]]

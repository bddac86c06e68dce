"""The quickstart as a user starts it, shortened: made from nothing, it learns, and it is asynchronous."""

import subprocess
import sys
from pathlib import Path

import pytest

from flashflow.observe.metrics import read_metrics
from tests.ring import environment

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_quickstart_learns_to_add_from_samples_one_version_old(tmp_path):
    overrides = [f"run.folder={tmp_path}", f"model.cache={tmp_path / 'cache'}", "run.steps=40"]
    command = [sys.executable, "-m", "flashflow", "train", "configs/quickstart.yaml", *overrides]
    ended = subprocess.run(
        [*command, "evaluation.every_steps=40"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=environment(),
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    steps = read_metrics(tmp_path / "quickstart" / "metrics.jsonl")
    first, last = read_metrics(tmp_path / "quickstart" / "evaluations.jsonl")
    assert (first["version"], last["version"]) == (0, 40)
    assert first["num_problems"] >= 512
    assert first["accuracy"] <= 0.45
    assert last["accuracy"] >= 0.85
    ages = [step["staleness_max"] for step in steps]
    assert max(ages) == 1
    assert all(step["w_mean"] == pytest.approx(1, abs=0.05) for step in steps)

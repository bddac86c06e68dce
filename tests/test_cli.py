import io
import json
import subprocess
import sys

import pytest
from rich.console import Console

from flashflow.config import load_config
from flashflow.launch.check import print_check, warnings
from flashflow.launch.hosts import Host
from flashflow.launch.plan import plan

CONFIG = """\
run: {{name: clitest, folder: {folder}}}
model: {{path: "builtin:quickstart"}}
data: {{source: {{kind: reasoning_gym, task: chain_sum}}}}
reward: {{function: "{folder}/reward.py:exact"}}
"""


HOST = Host("here", cores=(0, 1))


@pytest.fixture
def config_file(tmp_path):
    (tmp_path / "reward.py").write_text("def exact(completion, **row):\n    return 1.0\n")
    path = tmp_path / "config.yaml"
    path.write_text(CONFIG.format(folder=tmp_path))
    return path


def flashflow(*arguments, cwd=None):
    command = [sys.executable, "-c", "from flashflow.cli import main; main()", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, timeout=60, check=False)


def test_check_prints_placement_numbers_and_warnings(config_file):
    console = Console(file=io.StringIO(), width=120)
    print_check(
        load_config(config_file, ["rollout.alpha=2", "rollout.on_stale=drop", "batch.groups=10"]), [HOST], console
    )
    text = console.file.getvalue()
    for expected in ("trainer-0", "engine-0", "controller-0"):
        assert expected in text
    rows = {row.split("│")[1].strip(): row.split("│")[2].strip() for row in text.splitlines() if row.count("│") == 4}
    assert rows["samples per batch"] == "80"  # 10 groups of 8
    assert rows["max staleness"] == "2"
    assert rows["max groups in flight"] == "30"  # (1 + 2) x 10
    assert rows["sampled tokens per batch"] == "<= 40,960"  # 80 x 512
    assert rows["micro-batches per batch"] == "<= 10"  # 80 sequences of 2048 tokens, 8 in 16384
    assert "favours short answers" in text


def warnings_on(config, cores):
    hosts = [Host("here", cores=tuple(range(cores)))]
    return warnings(config, plan(config, hosts), hosts)


def test_too_few_cores_are_a_warning_that_names_the_numbers(config_file):
    config = load_config(config_file, ["placement.engine=3", "placement.threads=2"])
    (warning,) = (text for text in warnings_on(config, 4) if text.startswith("placement"))
    assert "want 8 cores, this host has 4" in warning
    assert not any(text.startswith("placement") for text in warnings_on(config, 8))


def test_check_plans_for_other_hosts_and_draws_them(config_file):
    result = flashflow(
        "check",
        config_file,
        "model.device=cuda",
        "--roles",
        "trainer=2,engine=4",
        "--hosts",
        "a,b,c",
        "--devices",
        "4,2,0",
    )
    assert result.returncode == 0, result.stderr
    assert "a  [T0 T1 E0 E1]  buffer proxy controller" in result.stdout
    assert "b  [E2 E3      ]" in result.stdout
    refused = flashflow(
        "check", config_file, "model.device=cuda", "--hosts", "2", "--devices", "1", "--roles", "engine=4"
    )
    assert refused.returncode == 2
    assert "placement.engine: 4 wants 4 devices, but of 2 on hosts host-0, host-1 1 are free for it" in refused.stderr


def test_check_succeeds_on_a_right_config(config_file):
    result = flashflow("check", config_file, "run.steps=3")
    assert result.returncode == 0, result.stderr
    assert "the config is right" in result.stdout


@pytest.mark.parametrize("command", ["check", "train"])
def test_mistakes_end_with_2_all_listed_and_nothing_started(config_file, command):
    result = flashflow(command, config_file, "rollout.alpha=-1", "batch.group=3", "run.steps=0")
    assert result.returncode == 2
    assert result.stdout == ""
    first, *rest = result.stderr.splitlines()
    assert first == "flashflow: 3 mistakes in the config; nothing was started"
    assert [line.split(":")[0].strip() for line in rest] == ["run.steps", "rollout.alpha", "batch.group"]
    assert not (config_file.parent / "clitest").exists()


def test_resume_and_overwrite_exclude_each_other(config_file):
    result = flashflow("train", config_file, "--resume", "--overwrite")
    assert result.returncode == 2
    assert "give one" in result.stderr


def test_resuming_what_never_began_is_a_mistake(config_file):
    result = flashflow("train", config_file, "--resume")
    assert result.returncode == 2
    assert "nothing to resume" in result.stderr


def test_resuming_with_another_seed_ends_with_2_and_changes_nothing(config_file):
    stored = config_file.parent / "clitest" / "config.yaml"
    stored.parent.mkdir()
    stored.write_text("run: {seed: 5}\n")
    result = flashflow("train", config_file, "--resume")
    assert result.returncode == 2
    assert f"run.seed: 0, but the run in {stored.parent} began with 5; remedy: put it back" in result.stderr
    assert stored.read_text() == "run: {seed: 5}\n"


def test_a_reward_module_beside_the_working_folder_is_found(config_file):
    (config_file.parent / "beside.py").write_text("def exact(completion, **row):\n    return 1.0\n")
    result = flashflow("check", config_file, "reward.function=beside:exact", cwd=config_file.parent)
    assert result.returncode == 0, result.stderr


def test_the_schema_is_json_and_describes_the_fields():
    result = flashflow("schema")
    schema = json.loads(result.stdout)
    assert schema["properties"].keys() >= {"run", "model", "data", "reward", "rollout"}
    assert "Async ratio" in schema["$defs"]["RolloutSection"]["properties"]["alpha"]["description"]


def test_the_reference_names_every_section_and_default():
    result = flashflow("schema", "--markdown")
    assert "## rollout" in result.stdout
    assert "| `alpha` | number >= 0 | `1.0` |" in result.stdout

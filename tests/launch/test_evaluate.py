"""`flashflow eval` of a run's checkpoints and of the model itself."""

import json
import subprocess
import sys

import pytest

from flashflow.config import load_config
from flashflow.errors import ConfigError, RewardError
from flashflow.evaluation.transcripts import read_transcripts
from flashflow.launch.evaluate import EvalOptions, evaluate
from flashflow.launch.run import train
from tests.ring import environment, make_ring, metrics

OVERRIDES = {
    "run.runtime": "in_process",
    "run.steps": 2,
    "checkpoint.every_steps": 1,
    "evaluation.every_steps": 1,
    "evaluation.problems": 8,
}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Path of the config of a run of two steps, evaluated before and after each."""
    path = make_ring(tmp_path_factory.mktemp("run"), overrides=OVERRIDES)
    assert train(load_config(path), resume=False) == 0
    return path


def flashflow(*arguments):
    command = [sys.executable, "-m", "flashflow", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env=environment(), timeout=120, check=False)


def ask(path, *overrides, **options):
    return evaluate(load_config(path, overrides), EvalOptions(**options), print, lambda done, total: None)


def values(summary):
    return {estimate.name: estimate.value for estimate in summary.estimates}


@pytest.mark.parametrize(("checkpoint", "version"), [(None, 0), ("1", 1), ("newest", 2)])
def test_it_finds_what_the_runs_own_evaluation_found(run, tmp_path, checkpoint, version):
    (expected,) = (e for line in metrics(run) for e in line.get("evaluations", []) if e["version"] == version)
    found = ask(run, checkpoint=checkpoint, output=tmp_path / "t.jsonl").summary
    assert values(found)["average"] == pytest.approx(expected["accuracy"], abs=1e-12)
    assert found.mean_response_tokens == pytest.approx(expected["mean_response_tokens"])
    assert (found.num_problems, found.samples) == (8, 1)


def test_transcripts_hold_every_sample_of_every_problem(run, tmp_path):
    found = ask(run, samples=3, temperature=0.8, output=tmp_path / "deep" / "t.jsonl")
    transcripts = read_transcripts(found.transcripts)
    assert sorted((t.problem, t.sample) for t in transcripts) == [(p, s) for p in range(8) for s in range(3)]
    held_out = [json.loads(line) for line in (run.parent / "eval.jsonl").read_text().splitlines()]
    for t in transcripts:
        assert t.row["prompt"] == held_out[t.problem]["prompt"]
        assert t.prompt == f"<|im_start|>user\n{t.row['prompt']}<|im_end|>\n<|im_start|>assistant\n"
        assert t.reward == (sum(map(ord, t.completion)) + int(t.row["answer"])) % 7 / 6
        assert t.finish_reason in ("stop", "length")
    assert len({t.completion for t in transcripts}) > 8
    mean = sum(t.reward for t in transcripts) / len(transcripts)
    assert values(found.summary) == pytest.approx(
        {"average": mean, "pass@1": values(found.summary)["pass@1"], "pass@3": values(found.summary)["pass@3"]}
    )


def test_the_command_prints_the_table_and_says_where_the_transcripts_are(run):
    result = flashflow("eval", run, "--checkpoint", "step-000002", "--samples", "4", "--k", "1,2,4", "--threshold", 0.5)
    assert result.returncode == 0, result.stderr
    for expected in ("8 held-out problems, 4 sample(s) each", "average", "pass@2", "pass@4", "truncated share"):
        assert expected in result.stdout
    transcripts = load_config(run).run_folder / "evaluations" / "step-000002.jsonl"
    assert f"transcripts: {transcripts}" in result.stdout
    assert len(read_transcripts(transcripts)) == 32


def test_mistakes_of_the_command_end_with_2_all_listed_and_write_nothing(run, tmp_path):
    result = flashflow("eval", run, "--temperature", "0", "--samples", "4", "--k", "8", "--output", tmp_path / "t")
    assert result.returncode == 2
    assert "--temperature: 0 makes all of --samples 4 the same" in result.stderr
    assert "--k: 8 not in 1 .. --samples 4; raise --samples" in result.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("k", ["one", "1;4", ""])
def test_ks_that_are_no_numbers_end_with_2(run, k):
    result = flashflow("eval", run, "--k", k)
    assert result.returncode == 2
    assert "whole numbers joined by commas" in result.stderr


@pytest.mark.parametrize("checkpoint", ["9", "step-000009", "no/such/folder"])
def test_a_missing_checkpoint_is_a_mistake_naming_those_that_exist(run, checkpoint):
    with pytest.raises(ConfigError, match="holds step-000001, step-000002"):
        ask(run, checkpoint=checkpoint)


def test_a_run_without_checkpoints_says_so(tmp_path):
    with pytest.raises(ConfigError, match="holds none yet"):
        ask(make_ring(tmp_path), "evaluation.problems=8", checkpoint="newest")


def test_problems_that_do_not_fit_the_context_are_a_mistake_before_the_model_is_loaded(run):
    with pytest.raises(
        ConfigError, match=r"engine.max_context_tokens: 40, but the 33 tokens of held-out problem 6 .* need 45"
    ):
        ask(run, "engine.max_context_tokens=40")


def test_more_problems_than_are_held_out_are_a_mistake(run):
    with pytest.raises(ConfigError, match=r"evaluation.problems: 512 .* 20 "):
        ask(run, "evaluation.problems=512")


def test_what_the_reward_function_raises_ends_it_with_its_traceback(tmp_path):
    path = make_ring(tmp_path, reward="explode", overrides=OVERRIDES)
    with pytest.raises(RewardError, match="the reward function of the test blew up"):
        ask(path)

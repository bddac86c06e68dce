"""The run folder before a run: what --resume may change, and that a refusal leaves everything as it was."""

import json
from pathlib import Path

import pytest

from flashflow.config import load_config
from flashflow.errors import ConfigError
from flashflow.journal import journal
from flashflow.launch.resume import FIXED
from flashflow.launch.run import prepare
from flashflow.observe.progress import ProgressDisplay
from flashflow.quickstart.recipe import Recipe, cached_folder


@pytest.fixture
def config(tmp_path):
    """A function that loads the config with overrides laid over it."""
    (tmp_path / "reward.py").write_text("def exact(completion, **row):\n    return 1.0\n")
    (tmp_path / "model").mkdir()
    values = {
        "run": {"name": "r", "folder": f"{tmp_path}/runs"},
        "model": {"path": f"{tmp_path}/model", "cache": f"{tmp_path}/cache"},
        "data": {"source": {"kind": "reasoning_gym", "task": "chain_sum"}},
        "reward": {"function": f"{tmp_path}/reward.py:exact"},
        "algorithm": {"preset": "grpo", "clip_low": 0.2},
    }
    path = tmp_path / "config.yaml"
    path.write_text(json.dumps(values))
    return lambda *overrides: load_config(path, overrides)


def start(config, *, resume=False, overwrite=False):
    return prepare(config, ProgressDisplay(), resume=resume, overwrite=overwrite)


def refusal(config, **how):
    """The mistakes; that the stored config is untouched is checked."""
    stored = config.run_folder / "config.yaml"
    before = stored.read_bytes()
    with pytest.raises(ConfigError) as caught:
        start(config, **how)
    assert stored.read_bytes() == before
    assert [path.name for path in config.run_folder.iterdir() if "partial" in path.name] == []
    return caught.value.mistakes


CHANGES = {
    "run.seed": (1, 0),
    "rollout.group_size": (4, 8),
    "rollout.alpha": (2.0, 1.0),
    "batch.groups": (16, 32),
    "model.path": ("org/other", None),
    "algorithm.clip_low": (0.1, 0.2),
}


@pytest.mark.parametrize("field", CHANGES)
def test_what_a_run_keeps_for_life_is_refused_with_both_values(config, field):
    begun = start(config())
    now, then = CHANGES[field]
    then = begun.model.path if field == "model.path" else then
    assert refusal(config(f"{field}={now}"), resume=True) == [
        f"{field}: {now!r}, but the run in {begun.run_folder} began with {then!r}; "
        "remedy: put it back, or start another run.name=..."
    ]


def test_all_refused_fields_are_listed_at_once(config):
    start(config())
    found = refusal(config(*(f"{field}={now}" for field, (now, _) in CHANGES.items())), resume=True)
    assert [mistake.partition(":")[0] for mistake in found] == list(CHANGES)


def test_what_the_journal_refuses_is_refused_here():
    assert set(FIXED) == set(journal._FINGERPRINT.values())


def test_everything_else_may_change_and_is_stored(config):
    start(config())
    changed = config(
        "run.steps=300", "optimizer.lr=1e-5", "placement.env=2", "checkpoint.every_steps=7", "engine.slots=64",
        "evaluation.every_steps=3", "network.call_deadline_s=90", "rollout.turn_deadline_s=100", "rollout.alpha=1.0",
    )  # fmt: skip
    start(changed, resume=True)
    assert load_config(changed.run_folder / "config.yaml") == changed


def test_the_same_algorithm_in_other_words_is_no_change(config):
    start(config("algorithm={preset: grpo, surrogate: clip}"))  # clip is that of the preset
    start(config("algorithm={preset: grpo}"), resume=True)
    found = refusal(config("algorithm={preset: dapo, clip_low: 0.1}"), resume=True)
    assert [mistake.partition(";")[0].replace(str(config().run_folder), "r") for mistake in found] == [
        "algorithm.preset: 'dapo', but the run in r began with 'grpo'",
        "algorithm.clip_low: 0.1, but the run in r began with that of the preset",
    ]


def test_the_same_model_by_another_name_is_no_change(config, tmp_path):
    start(config())
    (tmp_path / "link").symlink_to(tmp_path / "model")
    start(config(f"model.path={tmp_path}/link"), resume=True)
    (tmp_path / "another").mkdir()
    assert len(refusal(config(f"model.path={tmp_path}/another"), resume=True)) == 1


def test_files_of_the_run_that_moved_since_do_not_hinder_it(config, tmp_path):
    start(config())
    (tmp_path / "reward.py").rename(tmp_path / "moved.py")
    start(config(f"reward.function={tmp_path}/moved.py:exact"), resume=True)


def test_a_run_of_an_older_version_lacks_fields_and_goes_on(config):
    begun = start(config())
    (begun.run_folder / "config.yaml").write_text("run: {seed: 0}\n")
    start(config(), resume=True)


def make_builtin(cache, seed, positions=256):
    """In place of the model itself, whose making takes a minute."""
    folder = cached_folder(cache, Recipe(), seed)
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"max_position_embeddings": positions}))
    return folder


BUILTIN = ("model.path=builtin:quickstart", "engine.max_context_tokens=256", "sampling.max_new_tokens=40")


def test_a_builtin_model_resumes_also_from_another_cache(config, tmp_path):
    make_builtin(tmp_path / "cache", 0)
    make_builtin(tmp_path / "elsewhere", 0)
    start(config(*BUILTIN))
    again = start(config(*BUILTIN, f"model.cache={tmp_path}/elsewhere"), resume=True)
    assert Path(again.model.path).parent == tmp_path / "elsewhere"


def test_a_builtin_model_is_not_made_for_a_resume_that_is_refused(config, tmp_path):
    make_builtin(tmp_path / "cache", 0)
    start(config(*BUILTIN))
    (mistake,) = refusal(config(*BUILTIN, "run.seed=1"), resume=True)
    assert mistake.startswith("run.seed: 1, but the run in ")
    assert len(list((tmp_path / "cache").iterdir())) == 1


def test_a_builtin_model_in_place_of_another_is_refused(config, tmp_path):
    folder = make_builtin(tmp_path / "cache", 0)
    start(config())
    (mistake,) = refusal(config(*BUILTIN), resume=True)
    assert mistake.startswith(f"model.path: {str(folder)!r}, but the run in ")


def test_a_context_above_a_builtin_models_is_refused_and_the_run_before_it_kept(config, tmp_path):
    make_builtin(tmp_path / "cache", 0)
    start(config())
    (mistake,) = refusal(config(*BUILTIN, "engine.max_context_tokens=257"), overwrite=True)
    assert mistake.startswith("engine.max_context_tokens: 257 is more than max_position_embeddings 256")

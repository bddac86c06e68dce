"""Checkpoints: what is complete, what is kept, and that a resumed run is the run."""

import json
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import torch
from trainer_cases import described, make_batch, make_model, weights_of

from flashflow.config.sections import OptimizerSection
from flashflow.errors import ConfigError
from flashflow.trainers import checkpoint
from flashflow.trainers.checkpoint import Description
from flashflow.trainers.fsdp import FsdpTrainer
from flashflow.trainers.sharding import full

MakeTrainer = Callable[..., FsdpTrainer]
SECTION = OptimizerSection(lr=1e-2, warmup_steps=3, decay="cosine", weight_decay=0.01)


def describe(step: int) -> Description:
    return Description(step=step, parameters={}, settings={}, skipped_in_row=0, skipped_total=0, num_ranks=1)


def write(folder: Path, step: int) -> Path:
    path = folder / checkpoint.folder_name(step)
    checkpoint.begin(path)
    (checkpoint.temporary(path) / "data").write_text(str(step))
    checkpoint.finish(path, describe(step))
    return path


def moments(trainer: FsdpTrainer) -> list[torch.Tensor]:
    state = trainer._updater.optimizer.state
    return [full(value).clone() for slots in state.values() for value in slots.values()]


def train(trainer: FsdpTrainer, last: int) -> None:
    while trainer.step < last:
        trainer.train(*make_batch(trainer.step + 1))


@pytest.mark.parametrize("tied", [True, False])
def test_four_steps_equal_two_a_checkpoint_and_two_to_the_last_bit(
    make_trainer: MakeTrainer, tmp_path: Path, tied: bool
) -> None:
    whole = make_trainer(model=make_model(tied=tied), optimizer=SECTION)
    train(whole, 4)
    first = make_trainer(model=make_model(tied=tied), optimizer=SECTION)
    train(first, 2)
    folder = tmp_path / checkpoint.folder_name(2)
    first.save(folder)
    resumed = make_trainer(model=make_model(tied=tied, seed=5), optimizer=SECTION)
    resumed.load(folder)
    assert resumed.step == 2
    train(resumed, 4)
    expected, found = weights_of(whole), weights_of(resumed)
    assert list(found) == list(expected)
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    pairs = list(zip(moments(resumed), moments(whole), strict=True))
    assert len(pairs) == 3 * len(expected)
    assert all(torch.equal(one, other) for one, other in pairs)


def test_saving_disturbs_nothing_and_a_checkpoint_of_step_0_loads(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    plain, saving = make_trainer(), make_trainer()
    saving.save(tmp_path / "step-000000")
    train(plain, 2)
    train(saving, 1)
    saving.save(tmp_path / "step-000001")
    train(saving, 2)
    expected = weights_of(plain)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in weights_of(saving).items())
    saving.load(tmp_path / "step-000000")
    assert saving.step == 0
    train(saving, 2)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in weights_of(saving).items())


def test_random_states_and_skipped_steps_come_back(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    trainer = make_trainer(preset="dr_grpo", optimizer=OptimizerSection(max_skipped_steps=5))
    manifest, rows = make_batch(1)
    trainer.train(*described(manifest, [msgspec.structs.replace(rows[0], reward=1e39), *rows[1:]]))
    trainer.save(tmp_path / "step-000001")
    drawn = torch.rand(3)
    other = make_trainer(preset="dr_grpo", optimizer=OptimizerSection(max_skipped_steps=5))
    other.load(tmp_path / "step-000001")
    assert torch.equal(torch.rand(3), drawn)
    assert other.train(*make_batch(2)).metrics["skipped_steps"] == 1


def test_the_config_of_the_resumed_run_wins_over_the_checkpoints_and_is_reported(
    make_trainer: MakeTrainer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make_trainer(optimizer=SECTION).save(tmp_path / "step-000000")
    changed = make_trainer(optimizer=OptimizerSection(lr=1e-3, weight_decay=0.5))
    changed.load(tmp_path / "step-000000")
    assert changed._updater.optimizer.param_groups[0]["weight_decay"] == 0.5
    assert "resuming with another setting than the checkpoint's: optimizer" in caplog.text
    assert changed.train(*make_batch(1)).metrics["learning_rate"] == 1e-3


def test_another_models_checkpoint_is_refused_by_the_difference_and_changes_nothing(
    make_trainer: MakeTrainer, tmp_path: Path
) -> None:
    folder = tmp_path / "step-000001"
    other = make_trainer(model=make_model(tied=False, hidden=32))
    train(other, 1)
    other.save(folder)
    trainer = make_trainer()
    before = weights_of(trainer)
    with pytest.raises(ConfigError) as error:
        trainer.load(folder)
    assert "lm_head.weight: the checkpoint has it, the model has not" in str(error.value)
    assert "model.embed_tokens.weight: float32[300, 32] in the checkpoint, float32[300, 64] in the model" in str(
        error.value
    )
    assert trainer.step == 0
    assert all(torch.equal(tensor, before[name]) for name, tensor in weights_of(trainer).items())


def test_the_newest_complete_checkpoint_is_found_and_torn_ones_are_not(tmp_path: Path) -> None:
    assert checkpoint.newest_complete(tmp_path) is None
    assert checkpoint.newest_complete(tmp_path / "nowhere") is None
    for step in (2, 10, 1_000_000):
        write(tmp_path, step)
    assert checkpoint.newest_complete(tmp_path) == tmp_path / "step-1000000"
    checkpoint.begin(tmp_path / "step-1000001")
    (tmp_path / "step-1000002").mkdir()
    (tmp_path / "notes-000009").mkdir()
    assert checkpoint.newest_complete(tmp_path) == tmp_path / "step-1000000"


def test_prune_keeps_the_newest_and_removes_torn_ones(tmp_path: Path) -> None:
    for step in (1, 2, 3, 10):
        write(tmp_path, step)
    checkpoint.begin(tmp_path / "step-000011")
    (tmp_path / "notes").mkdir()
    removed = checkpoint.prune(tmp_path, keep=2)
    assert [path.name for path in removed] == ["step-000001", "step-000002", "step-000011.tmp"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["notes", "step-000003", "step-000010"]


def test_a_checkpoint_written_again_replaces_the_old_one(tmp_path: Path) -> None:
    path = write(tmp_path, 3)
    (path / "data").write_text("old")
    write(tmp_path, 3)
    assert (path / "data").read_text() == "3"
    assert [entry.name for entry in tmp_path.iterdir()] == ["step-000003"]


def test_what_is_no_checkpoint_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="step-000004 is not a complete checkpoint"):
        checkpoint.read_description(tmp_path / "step-000004")
    path = write(tmp_path, 4)
    (path / checkpoint.DESCRIPTION).write_text(json.dumps({"step": "four"}))
    with pytest.raises(ConfigError, match="step-000004 is not a complete checkpoint"):
        checkpoint.read_description(path)


def test_differences_are_listed_up_to_a_limit() -> None:
    found = {f"p{place}": "float32[1]" for place in range(8)}
    lines = checkpoint.differences(found, {"p0": "float32[2]", "q": "float32[1]"}, limit=3)
    assert lines[-1] == "and 6 more"
    assert len(lines) == 4
    assert checkpoint.differences(found, dict(found)) == []

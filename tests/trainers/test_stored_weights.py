"""The weights of a checkpoint, read without a trainer."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from trainer_cases import make_batch, make_model, weights_of
from two_ranks import make

from flashflow.errors import ConfigError
from flashflow.trainers.fsdp import FsdpTrainer
from flashflow.trainers.weights import load_weights, read_weights

MakeTrainer = Callable[..., FsdpTrainer]


@pytest.mark.parametrize("tied", [True, False])
def test_a_model_gets_the_weights_an_engine_would_get(make_trainer: MakeTrainer, tmp_path: Path, tied: bool) -> None:
    trainer = make_trainer(model=make_model(tied=tied))
    trainer.train(*make_batch(1))
    trainer.save(tmp_path / "step-000001")
    model = make_model(tied=tied, seed=5)
    assert load_weights(model, tmp_path / "step-000001") == 1
    expected = weights_of(trainer)
    found = dict(model.named_parameters())
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    assert tied == (model.lm_head.weight is model.model.embed_tokens.weight)


def test_another_models_checkpoint_is_refused_and_changes_nothing(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    make_trainer().save(tmp_path / "step-000000")
    model = make_model(hidden=32)
    before = [parameter.clone() for parameter in model.parameters()]
    with pytest.raises(ConfigError, match=r"float32\[300, 64\] in the checkpoint, float32\[300, 32\] in the model"):
        load_weights(model, tmp_path / "step-000000")
    assert all(torch.equal(*pair) for pair in zip(before, model.parameters(), strict=True))


def test_a_folder_that_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not a complete checkpoint"):
        read_weights(tmp_path)


@pytest.mark.slow
def test_the_shards_of_two_ranks_are_read_as_whole_tensors(tmp_path: Path) -> None:
    script = Path(__file__).with_name("two_ranks.py")
    command = [sys.executable, str(script)]
    ranks = [subprocess.Popen([*command, str(rank), "2", str(tmp_path), "one step"]) for rank in range(2)]
    try:
        assert [rank.wait(timeout=120) for rank in ranks] == [0, 0]
    finally:
        for rank in ranks:
            rank.kill()
    alone = make("test-stored-weights", "one step")
    alone.train(*make_batch(1))
    found = read_weights(tmp_path / "step-000001")
    for name, tensor in weights_of(alone).items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=1e-6)
    alone.close()

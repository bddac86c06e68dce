"""A loss of the user's own, and the reference model, through the trainer."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from plain_training import assert_same_bits, assert_weights_close
from trainer_cases import make_batch, weights_of

from flashflow.algorithms.ratios import Terms
from flashflow.errors import ConfigError, ContractError
from flashflow.trainers.fsdp import FsdpTrainer

MakeTrainer = Callable[..., FsdpTrainer]
FILE = """\
def clip(terms):
    bounded = terms.r.clamp(1 - terms.config.clip_low, 1 + terms.config.clip_high)
    return (-terms.r * terms.advantages).maximum(-bounded * terms.advantages)


def too_few(terms):
    return terms.logp.sum()
"""


def twice_reinforce(terms: Terms) -> torch.Tensor:
    return -2 * terms.advantages * terms.logp


def nothing(terms: Terms) -> torch.Tensor:
    return terms.logp * 0


def test_a_loss_in_a_file_equals_the_surrogate_it_writes_out(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(FILE)
    own = make_trainer(
        loss=f"{tmp_path}/mine.py:clip", clip_low=0.2, clip_high=0.2, correction={"kind": "truncate"}, optimizer_steps=3
    )
    known = make_trainer(clip_low=0.2, clip_high=0.2, optimizer_steps=3)
    for step in (1, 2):
        found, expected = (trainer.train(*make_batch(step)).metrics for trainer in (own, known))
        assert found["loss"] == pytest.approx(expected["loss"], rel=1e-6)
        assert found["r_max"] == expected["r_max"] > 1
    assert_weights_close(weights_of(own), weights_of(known), 1e-7)


def test_a_loss_in_a_module_is_scaled_as_it_says(make_trainer: MakeTrainer) -> None:
    own = make_trainer(loss="test_own_loss:twice_reinforce", correction="none").train(*make_batch(1)).metrics
    known = make_trainer(surrogate="reinforce", correction="none").train(*make_batch(1)).metrics
    assert own["loss"] == pytest.approx(2 * known["loss"], rel=1e-6)
    assert own["grad_norm"] == pytest.approx(2 * known["grad_norm"], rel=1e-5)


def test_a_loss_without_gradient_moves_nothing(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(loss="test_own_loss:nothing", correction="none")
    before = weights_of(trainer)
    assert trainer.train(*make_batch(1)).metrics["grad_norm"] == 0
    assert_same_bits(weights_of(trainer), before)


def test_a_loss_that_is_not_there_is_refused_before_the_first_batch(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    (tmp_path / "other.py").write_text(FILE)
    for missing in ("no_such_module:f", "test_own_loss:absent", "nowhere.py:f", f"{tmp_path}/other.py:absent"):
        with pytest.raises(ConfigError, match=r"algorithm\.loss: cannot import"):
            make_trainer(loss=missing)
    trainer = make_trainer(loss=f"{tmp_path}/other.py:too_few")
    with pytest.raises(ContractError, match=r"too_few returned shape \[\].*the sequences are .*g0m"):
        trainer.train(*make_batch(1))


@pytest.mark.parametrize(
    ("overrides", "loaded"),
    [
        ({}, False),
        ({"entropy_coefficient": 0.1}, False),
        ({"kl_coefficient": 0.0}, False),
        ({"kl_coefficient": 0.1}, True),
        ({"kl_coefficient": 0.1, "kl_placement": "reward"}, True),
    ],
)
def test_the_reference_model_is_loaded_only_for_a_kl_term(
    make_trainer: MakeTrainer, overrides: dict[str, object], loaded: bool
) -> None:
    trainer = make_trainer(**overrides)
    assert (trainer._learner._reference is not None) is loaded
    assert ("kl" in trainer.train(*make_batch(1)).metrics) is loaded

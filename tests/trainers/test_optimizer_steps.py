"""Several optimizer steps and epochs per batch, against a loop written by hand."""

import math
from collections.abc import Callable

import msgspec
import numpy as np
import pytest
import torch
from plain_training import PlainAdamW, assert_same_bits, assert_weights_close, plain_logprobs
from trainer_cases import described, make_batch, make_model, weights_of

from flashflow.config.sections import OptimizerSection
from flashflow.records import Trajectory
from flashflow.trainers.fsdp import FsdpTrainer
from flashflow.trainers.share import split_by_group

MakeTrainer = Callable[..., FsdpTrainer]
SECTION = OptimizerSection(lr=1e-2, eps=1e-3, clip_norm=0.5)


def plain_batch(
    rows: list[Trajectory], *, parts: int, epochs: int, cap: float | None, surrogate: str
) -> tuple[dict[str, torch.Tensor], list[float], list[torch.Tensor]]:
    """Batch 1 in float64: (weights, the loss of each optimizer step, r of each). Groups of four consecutive rows.

    clip: mean over the step's sequences of the mean over tokens of min(w, cap) max(-r A, -clip(r, .8, 1.2) A);
    reinforce: mean over the step's sequences of the sum of -min(w, cap) A logp.
    """
    model = make_model().double().eval()
    adamw = PlainAdamW(model, SECTION)
    rewards = np.array([row.reward for row in rows]).reshape(-1, 4)
    centred = rewards - rewards.mean(1, keepdims=True)
    grpo, rloo = centred / (rewards.std(1, ddof=1, keepdims=True) + 1e-6), centred * 4 / 3
    advantages = (grpo if surrogate == "clip" else rloo).flatten()
    prox = [plain_logprobs(model, row, 1.0).detach() for row in rows]
    per_part, losses, ratios = len(rows) // parts, [], []
    for _ in range(epochs):
        for start in range(0, len(rows), per_part):
            total = torch.zeros((), dtype=torch.float64)
            for place in range(start, start + per_part):
                row, advantage = rows[place], float(advantages[place])
                logp = plain_logprobs(model, row, 1.0)
                r = torch.exp(logp - prox[place])
                ratios.append(r.detach())
                behaviour = torch.from_numpy(row.logprobs[row.mask == 1]).double()
                weight = torch.exp(prox[place] - behaviour).clamp(max=cap) if cap is not None else 1.0
                clipped = torch.maximum(-r * advantage, -r.clamp(0.8, 1.2) * advantage)
                total = total + (
                    (weight * clipped).mean() if surrogate == "clip" else -(weight * advantage * logp).sum()
                )
            loss = total / per_part
            adamw.step(torch.autograd.grad(loss, list(model.parameters())))
            losses.append(loss.item())
    return {name: tensor.detach().float() for name, tensor in model.named_parameters()}, losses, ratios


@pytest.mark.parametrize(("preset", "surrogate"), [("grpo", "clip"), ("rloo", "reinforce")])
@pytest.mark.parametrize(("parts", "epochs", "alpha"), [(2, 1, 0.0), (1, 3, 1.0), (2, 2, 1.0)])
def test_optimizer_steps_and_epochs_equal_a_plain_loop(
    make_trainer: MakeTrainer, preset: str, surrogate: str, parts: int, epochs: int, alpha: float
) -> None:
    manifest, rows = make_batch(1, groups=4, group_size=4)
    cap = 2.0 if alpha > 0 else None
    weights, losses, ratios = plain_batch(rows, parts=parts, epochs=epochs, cap=cap, surrogate=surrogate)
    trainer = make_trainer(
        preset=preset, optimizer=SECTION, alpha=alpha, micro_batch_tokens=300, optimizer_steps=parts, epochs=epochs
    )
    metrics = trainer.train(manifest, rows).metrics
    assert trainer.step == 1, "the version counts batches"
    assert metrics["optimizer_steps"] == len(losses) == parts * epochs
    assert metrics["loss"] == pytest.approx(np.mean(losses), abs=1e-5)
    r = torch.cat(ratios)
    assert metrics["r_mean"] == pytest.approx(r.mean().item(), rel=1e-4)
    assert metrics["r_max"] == pytest.approx(r.max().item(), rel=1e-3)
    assert r.max() > 1.2, "no ratio is clipped"
    assert_weights_close(weights_of(trainer), weights, 2e-5)


def test_w_is_of_the_weights_at_consumption_however_the_batch_is_split(make_trainer: MakeTrainer) -> None:
    manifest, rows = make_batch(1, groups=4)
    once = make_trainer().train(manifest, rows).metrics
    often = make_trainer(optimizer_steps=4, epochs=2).train(manifest, rows).metrics
    for name in ("w_mean", "w_max", "mismatch_k3", "effective_sample_size", "correction_weight", "tokens_trained"):
        assert often[name] == pytest.approx(once[name], rel=1e-6), name
    assert (once["r_mean"], once["r_max"]) == (1, 1)
    assert often["r_max"] > 1.01
    assert often["rho_mean"] != pytest.approx(once["rho_mean"], rel=1e-3), "rho follows the current weights"


def test_the_prox_pass_equals_the_first_step_to_the_last_bit(make_trainer: MakeTrainer) -> None:
    manifest, rows = make_batch(1, groups=4)
    still = make_trainer(optimizer=OptimizerSection(lr=0), optimizer_steps=2, epochs=2)
    metrics = still.train(manifest, rows).metrics
    assert (metrics["r_mean"], metrics["r_max"], metrics["clip_fraction"]) == (1, 1, 0)


@pytest.mark.parametrize(
    ("preset", "overrides"), [("tis", {}), ("topr", {}), ("dppo", {}), ("grpo", {"anchor": "behaviour"})]
)
def test_an_algorithm_without_prox_takes_several_steps_on_rho(
    make_trainer: MakeTrainer, preset: str, overrides: dict[str, object]
) -> None:
    manifest, rows = make_batch(1, groups=4)
    trainer = make_trainer(preset=preset, optimizer_steps=2, **overrides)
    metrics = trainer.train(manifest, rows).metrics
    assert math.isfinite(metrics["loss"])
    assert ("w_mean" in metrics) is (preset == "grpo"), "w is not known without a prox pass"
    assert metrics.get("w_max", 1) == 1
    assert 0 < metrics["effective_sample_size"] < 1 or preset == "grpo"


def test_splitting_changes_the_weights_and_redoing_gives_the_same_bits(make_trainer: MakeTrainer) -> None:
    batch = make_batch(1, groups=4)
    options = [{}, {"optimizer_steps": 2}, {"optimizer_steps": 4}, {"epochs": 2}, {"optimizer_steps": 2, "epochs": 2}]
    found = []
    for chosen in options:
        first, again = make_trainer(**chosen), make_trainer(**chosen)
        assert first.train(*batch) == again.train(*batch)
        assert_same_bits(weights_of(first), weights_of(again))
        found.append(weights_of(first)["model.embed_tokens.weight"])
    assert not any(torch.equal(one, other) for place, one in enumerate(found) for other in found[:place])


def test_the_schedule_counts_batches(make_trainer: MakeTrainer) -> None:
    section = OptimizerSection(lr=1.0e-3, warmup_steps=4)
    trainer = make_trainer(optimizer=section, optimizer_steps=3, epochs=2)
    rates = [trainer.train(*make_batch(step)).metrics["learning_rate"] for step in (1, 2)]
    assert rates == pytest.approx([2.5e-4, 5e-4])


def test_a_part_without_a_usable_row_is_a_step_without_gradient(make_trainer: MakeTrainer) -> None:
    manifest, rows = make_batch(1, groups=2)
    rows = [
        msgspec.structs.replace(row, reward=None, outcome="failed") if row.sample.group == 1 else row for row in rows
    ]
    whole = make_trainer(optimizer_steps=2).train(*described(manifest, rows)).metrics
    assert whole["optimizer_steps"] == 2
    assert whole["skipped_steps"] == 0
    assert math.isfinite(whole["grad_norm"])


def test_groups_are_split_whole_and_in_order() -> None:
    rows = make_batch(1, groups=4, group_size=2)[0].rows
    assert split_by_group(rows, 1) == [list(range(8))]
    assert split_by_group(rows, 2) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert split_by_group(rows, 3) == [[0, 1], [2, 3], [4, 5, 6, 7]]
    assert split_by_group(rows[:3], 4) == [[0, 1], [2]]

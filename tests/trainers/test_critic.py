"""PPO: the critic against a loop written by hand, its checkpoints, and what is refused."""

import copy
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from plain_training import PlainAdamW, assert_same_bits, assert_weights_close, plain_logprobs
from trainer_cases import Batch, described, make_batch, make_model, weights_of

from flashflow.config.sections import CriticSection, OptimizerSection
from flashflow.errors import BudgetError, ConfigError
from flashflow.records import Trajectory
from flashflow.trainers.critic import explained_variance
from flashflow.trainers.fsdp import FsdpTrainer
from flashflow.trainers.sharding import full

MakeTrainer = Callable[..., FsdpTrainer]
SECTION = OptimizerSection(lr=1e-2, eps=1e-3, clip_norm=0.5)
GAMMA, LAMBDA, VALUE_CLIP = 0.9, 0.8, 0.02
OPTIONS = {"gamma": GAMMA, "lam": LAMBDA, "value_clip": VALUE_CLIP}


def critic_section(kind: str, **options: Any) -> CriticSection:
    return CriticSection(kind=kind, **{"lr": 2e-2, "eps": 1e-3, "clip_norm": 0.5, **options})  # type: ignore[arg-type]


def with_observations(batch: Batch) -> Batch:
    """A hole in the mask of every longer row, as a second turn leaves one; and one row that failed."""
    manifest, rows = batch
    holed = []
    for row in rows:
        sampled = np.flatnonzero(row.mask)
        hole = sampled[len(sampled) // 3 : len(sampled) // 2]
        mask, logprobs, versions = row.mask.copy(), row.logprobs.copy(), row.versions.copy()
        mask[hole], logprobs[hole], versions[hole] = 0, 0, -1
        holed.append(msgspec.structs.replace(row, mask=mask, logprobs=logprobs, versions=versions))
    holed[1] = msgspec.structs.replace(holed[1], reward=None, outcome="failed")
    return described(manifest, holed)


# ---- an independent implementation in float64


class PlainCritic:
    """A linear head on the hidden states of `backbone`, from 0."""

    def __init__(self, backbone: Any) -> None:
        self.backbone = backbone
        self.weight = torch.zeros(64, dtype=torch.float64, requires_grad=True)
        self.bias = torch.zeros((), dtype=torch.float64, requires_grad=True)

    def values(self, row: Trajectory) -> torch.Tensor:
        """[number of sampled tokens]: of the state in which each was sampled."""
        tokens = torch.from_numpy(row.tokens.astype(np.int64))
        hidden = self.backbone(input_ids=tokens[None]).last_hidden_state[0]
        return torch.stack([hidden[place - 1] @ self.weight + self.bias for place in np.flatnonzero(row.mask)])


def plain_gae(values: list[float], reward: float) -> list[float]:
    """sum over l of (gamma lambda)^l delta_{t+l}, written out; the reward comes with the last sampled token."""
    rewards = [0.0] * (len(values) - 1) + [reward]
    after = [*values[1:], 0.0]
    deltas = [r + GAMMA * v_next - v for r, v_next, v in zip(rewards, after, values, strict=True)]
    return [
        sum((GAMMA * LAMBDA) ** (later - t) * deltas[later] for later in range(t, len(deltas)))
        for t in range(len(deltas))
    ]


class PlainPPO:
    """Batches of whole sequences: token mean of the clipped surrogate and of the clipped value loss."""

    def __init__(self, kind: str, coefficient: float) -> None:
        self.kind, self.coefficient = kind, coefficient
        self.model = make_model().double().eval()
        self.critic = PlainCritic(self.model.base_model if kind == "value_head" else copy.deepcopy(self.model.model))
        self.policy = PlainAdamW(self.model, SECTION)
        section = critic_section(kind)
        head = torch.nn.ParameterList([self.critic.weight, self.critic.bias])
        self.critic.weight, self.critic.bias = head[0], head[1]
        self.module = head if kind == "value_head" else torch.nn.ModuleList([self.critic.backbone, head])
        self.adamw = PlainAdamW(self.module, section)

    def train(self, rows: list[Trajectory], *, parts: int, epochs: int) -> None:
        rows = [row for row in rows if row.reward is not None]
        prox = [plain_logprobs(self.model, row, 1.0).detach() for row in rows]
        old = [self.critic.values(row).detach() for row in rows]
        advantages = [
            torch.tensor(plain_gae(values.tolist(), row.reward or 0.0), dtype=torch.float64)
            for values, row in zip(old, rows, strict=True)
        ]
        groups = sorted({row.sample.group for row in rows})
        per_part = len(groups) // parts
        self.losses: list[tuple[float, float]] = []
        self.moved = 0.0
        for _ in range(epochs):
            for start in range(0, len(groups), per_part):
                chosen = groups[start : start + per_part]
                places = [place for place, row in enumerate(rows) if row.sample.group in chosen]
                self._step(rows, places, prox, old, advantages)

    def _step(self, rows, places, prox, old, advantages) -> None:  # type: ignore[no-untyped-def]
        policy_loss, value_loss = torch.zeros(2, dtype=torch.float64)
        num_tokens = sum(len(prox[place]) for place in places)
        for place in places:
            r = torch.exp(plain_logprobs(self.model, rows[place], 1.0) - prox[place])
            A, v = advantages[place], self.critic.values(rows[place])
            target = A + old[place]
            moved = (v - old[place]).clamp(-VALUE_CLIP, VALUE_CLIP)
            self.moved = max(self.moved, (v - old[place]).abs().max().item())
            policy_loss = policy_loss + torch.maximum(-r * A, -r.clamp(0.8, 1.2) * A).sum() / num_tokens
            squares = torch.maximum((v - target) ** 2, (old[place] + moved - target) ** 2)
            value_loss = value_loss + squares.sum() / 2 / num_tokens
        shared = self.kind == "value_head"
        total = policy_loss + self.coefficient * value_loss if shared else policy_loss
        critics = list(self.module.parameters())
        policy_gradients = torch.autograd.grad(total, list(self.model.parameters()), retain_graph=True)
        critic_gradients = torch.autograd.grad(total if shared else value_loss, critics, retain_graph=True)
        self.policy.step(policy_gradients)
        self.adamw.step(critic_gradients)
        self.losses.append((policy_loss.item(), value_loss.item()))


def head_of(trainer: FsdpTrainer) -> tuple[torch.Tensor, torch.Tensor]:
    assert trainer._critic is not None
    tensors = {name: full(tensor.detach()) for name, tensor in trainer._critic.module.named_parameters()}
    (weight,) = (tensor for name, tensor in tensors.items() if name.endswith("linear.weight"))
    (bias,) = (tensor for name, tensor in tensors.items() if name.endswith("linear.bias"))
    return weight[0], bias[0]


@pytest.mark.parametrize(("parts", "epochs"), [(1, 1), (2, 2)])
@pytest.mark.parametrize("kind", ["value_head", "model"])
def test_ppo_equals_a_plain_loop_written_by_hand(make_trainer: MakeTrainer, kind: str, parts: int, epochs: int) -> None:
    section = critic_section(kind, loss_coefficient=0.5) if kind == "value_head" else critic_section(kind)
    plain = PlainPPO(kind, coefficient=0.5)
    trainer = make_trainer(
        preset="ppo", alpha=0.0, optimizer=SECTION, micro_batch_tokens=300, critic=section, optimizer_steps=parts,
        epochs=epochs, **OPTIONS,
    )  # fmt: skip
    for step in (1, 2):
        manifest, rows = with_observations(make_batch(step, groups=2, longest=30))
        plain.train(rows, parts=parts, epochs=epochs)
        metrics = trainer.train(manifest, rows).metrics
        assert metrics["loss"] == pytest.approx(np.mean([loss for loss, _ in plain.losses]), abs=1e-5)
        assert metrics["value_loss"] == pytest.approx(np.mean([loss for _, loss in plain.losses]), abs=1e-5)
    assert (plain.moved > VALUE_CLIP) is (parts * epochs > 1), "the clip of the values is not exercised"
    expected = {name: tensor.detach().float() for name, tensor in plain.model.named_parameters()}
    assert_weights_close(weights_of(trainer), expected, 3e-5)
    weight, bias = head_of(trainer)
    torch.testing.assert_close(weight, plain.critic.weight.detach().float(), rtol=0, atol=3e-5)
    torch.testing.assert_close(bias, plain.critic.bias.detach().float(), rtol=0, atol=3e-5)
    if kind == "model":
        backbone = trainer._critic.module.backbone  # type: ignore[union-attr]
        for (name, wanted), (_, found) in zip(
            plain.critic.backbone.named_parameters(), backbone.named_parameters(), strict=True
        ):
            torch.testing.assert_close(full(found.detach()), wanted.detach().float(), rtol=0, atol=3e-5, msg=name)


def test_a_model_of_its_own_leaves_the_policys_backbone_alone_and_a_head_does_not(make_trainer: MakeTrainer) -> None:
    batches = [with_observations(make_batch(step)) for step in (1, 2)]
    weights = {}
    for name, section in (
        ("model", critic_section("model")),
        ("faster model", critic_section("model", lr=1e-3)),
        ("head", critic_section("value_head")),
        ("heavier head", critic_section("value_head", loss_coefficient=1.0)),
    ):
        trainer = make_trainer(preset="ppo", critic=section)
        trainer.train(*batches[0])
        first = weights_of(trainer)
        trainer.train(*batches[1])
        weights[name] = (first, weights_of(trainer))
    assert_same_bits(weights["model"][0], weights["faster model"][0])
    # All heads start at 0, so the value loss reaches the backbone from the second batch on.
    assert_weights_close(weights["head"][0], weights["model"][0], 1e-6)
    table = "model.embed_tokens.weight"
    assert not torch.equal(weights["head"][1][table], weights["heavier head"][1][table])
    assert not torch.equal(weights["model"][1][table], weights["faster model"][1][table]), "advantages follow values"


def test_every_option_of_the_critics_optimizer_acts(make_trainer: MakeTrainer) -> None:
    def head(**options: Any) -> torch.Tensor:
        trainer = make_trainer(preset="ppo", critic=critic_section("value_head", **options))
        trainer.train(*make_batch(1))
        trainer.train(*make_batch(2))
        return head_of(trainer)[0]

    plain = head()
    for changed in (
        {"lr": 1e-3}, {"betas": (0.5, 0.9)}, {"eps": 1e-1}, {"weight_decay": 0.5}, {"clip_norm": 1e-2},
        {"warmup_steps": 2}, {"decay": "linear"},
    ):  # fmt: skip
        assert not torch.equal(head(**changed), plain), changed


@pytest.mark.parametrize("kind", ["value_head", "model"])
def test_a_resumed_ppo_run_equals_an_uninterrupted_one_to_the_last_bit(
    make_trainer: MakeTrainer, tmp_path: Path, kind: str
) -> None:
    def make(seed: int = 0) -> FsdpTrainer:
        return make_trainer(
            preset="ppo", model=make_model(seed=seed), critic=critic_section(kind, warmup_steps=3), epochs=2
        )

    def state(trainer: FsdpTrainer) -> dict[str, torch.Tensor]:
        assert trainer._critic is not None
        found = weights_of(trainer)
        for name, tensor in trainer._critic.module.named_parameters():
            found[f"critic.{name}"] = full(tensor.detach()).clone()
            for slot, value in trainer._critic.updater.optimizer.state[tensor].items():
                found[f"critic.{name}.{slot}"] = full(value).clone()
        return found

    whole, first = make(), make()
    for step in (1, 2, 3):
        whole.train(*make_batch(step))
        if step < 3:
            first.train(*make_batch(step))
    first.save(tmp_path / "step-000002")
    resumed = make(seed=5)
    resumed.load(tmp_path / "step-000002")
    resumed.train(*make_batch(3))
    assert list(state(resumed)) == list(state(whole))
    assert_same_bits(state(resumed), state(whole))


def test_a_checkpoint_without_the_critic_is_refused(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    make_trainer().save(tmp_path / "step-000000")
    ppo = make_trainer(preset="ppo")
    with pytest.raises(ConfigError, match=r"does not fit the critic: linear\.weight: the model has it"):
        ppo.load(tmp_path / "step-000000")
    ppo.save(tmp_path / "step-000001")
    with pytest.raises(ConfigError, match="the checkpoint has it, the model has not"):
        make_trainer().load(tmp_path / "step-000001")


def test_gradients_of_the_critic_that_are_not_finite_are_skipped_counted_and_bounded(make_trainer: MakeTrainer) -> None:
    section = critic_section("model", max_skipped_steps=1)
    trainer = make_trainer(preset="ppo", critic=section, optimizer=OptimizerSection(max_skipped_steps=9))
    manifest, rows = make_batch(1)
    broken = [msgspec.structs.replace(rows[0], reward=1e30), *rows[1:]]
    assert trainer.train(*described(manifest, broken)).metrics["critic_skipped_steps"] == 1
    assert not head_of(trainer)[0].any()
    manifest, rows = make_batch(2)
    broken = [msgspec.structs.replace(rows[0], reward=1e30), *rows[1:]]
    with pytest.raises(BudgetError, match=r"critic\.max_skipped_steps: 1\); lower critic\.lr"):
        trainer.train(*described(manifest, broken))


def test_a_critic_nobody_asked_for_or_of_a_smaller_vocabulary_is_refused(
    make_trainer: MakeTrainer, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="critic: estimator grpo has none"):
        make_trainer(critic=CriticSection())
    small = make_model()
    small.resize_token_embeddings(100)
    small.save_pretrained(tmp_path / "small")
    with pytest.raises(ConfigError, match=r"critic\.path: .* knows 100 tokens, the policy 300"):
        make_trainer(preset="ppo", critic=CriticSection(kind="model", path=str(tmp_path / "small")))
    make_model(seed=3).save_pretrained(tmp_path / "fits")
    trainer = make_trainer(preset="ppo", critic=CriticSection(kind="model", path=str(tmp_path / "fits")))
    backbone = trainer._critic.module.backbone  # type: ignore[union-attr]
    assert torch.equal(full(backbone.embed_tokens.weight.detach()), make_model(seed=3).model.embed_tokens.weight)


def test_a_critic_learns_what_does_not_change(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(
        preset="ppo",
        critic=critic_section("model"),
        optimizer=OptimizerSection(lr=0),
        epochs=4,
        lam=1.0,
        value_clip=10.0,
    )
    explained, errors = [], []
    _, rows = make_batch(1)
    for step in range(1, 7):
        metrics = trainer.train(*described(make_batch(step)[0], rows)).metrics
        explained.append(metrics["explained_variance"])
        errors.append(metrics["value_loss"])
    assert explained[0] == 0
    assert explained[-1] > 0.5
    assert errors[-1] < errors[0] / 2


def test_the_explained_variance_by_hand() -> None:
    def alone(part: torch.Tensor) -> torch.Tensor:
        return part

    returns, mask = torch.tensor([[1.0, 2.0, 3.0, 9.0]]), torch.tensor([[True, True, True, False]])
    assert explained_variance(returns, returns, mask, alone) == 1
    assert explained_variance(torch.full((1, 4), 7.0), returns, mask, alone) == 0
    values = torch.tensor([[1.0, 2.0, 4.0, 0.0]])
    assert explained_variance(values, returns, mask, alone) == pytest.approx(1 - (1 / 3) / 1)
    assert explained_variance(returns, torch.ones(1, 4), mask, alone) == 0
    assert math.isfinite(explained_variance(returns, returns, torch.zeros(1, 4, dtype=torch.bool), alone))


def test_the_critic_computes_its_values_in_float32_over_a_bfloat16_backbone(make_trainer: MakeTrainer) -> None:
    for kind in ("value_head", "model"):
        half = make_trainer(preset="ppo", dtype="bfloat16", critic=critic_section(kind))
        exact = make_trainer(preset="ppo", critic=critic_section(kind))
        for step in (1, 2):
            found, wanted = (trainer.train(*make_batch(step)).metrics["value_loss"] for trainer in (half, exact))
            assert found == pytest.approx(wanted, abs=0.02)
        assert head_of(half)[0].dtype == torch.float32

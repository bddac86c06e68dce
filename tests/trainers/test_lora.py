"""LoRA: adapters trained as peft and autograd would, merged for engines, and small checkpoints."""

import copy
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from plain_training import PlainAdamW, assert_same_bits, assert_weights_close
from test_fsdp import generated, plain_grpo_loss
from trainer_cases import make_batch, make_model, weights_of

from flashflow.config.sections import CriticSection, LoraSection, OptimizerSection
from flashflow.engines.embedded.engine import TorchEngine
from flashflow.errors import ConfigError
from flashflow.trainers import checkpoint
from flashflow.trainers.fsdp import FsdpTrainer
from flashflow.trainers.lora import MergedProduct
from flashflow.trainers.merging import DOWN, UP, base_digest
from flashflow.trainers.sharding import full
from flashflow.trainers.share import whole as whole_share
from flashflow.trainers.weights import load_weights, read_weights
from flashflow.transport.weights.shared_memory import attach

MakeTrainer = Callable[..., FsdpTrainer]
LORA = LoraSection(rank=4, alpha=8)
SECTION = OptimizerSection(lr=1e-2, eps=1e-3, weight_decay=0.1, clip_norm=0.5)


def adapters_of(trainer: FsdpTrainer) -> dict[str, torch.Tensor]:
    model = trainer._scorer.model
    return {name: full(each.detach()).clone() for name, each in model.named_parameters() if each.requires_grad}


def base_of(model: Any, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().to(dtype, copy=True) for name, parameter in model.named_parameters()}


def as_peft(model: Any, adapters: dict[str, torch.Tensor], section: LoraSection = LORA) -> Any:
    """peft's own model with these adapters, run by peft's own layers."""
    targets = sorted({name.removesuffix(DOWN).rpartition(".")[2] for name in adapters if name.endswith(DOWN)})
    peft = get_peft_model(model, LoraConfig(r=section.rank, lora_alpha=section.alpha, target_modules=targets))
    missing, unknown = peft.base_model.model.load_state_dict(adapters, strict=False)
    assert not unknown
    assert not [name for name in missing if "lora" in name]
    return peft.eval()


def train(trainer: FsdpTrainer, last: int) -> list[dict[str, float]]:
    return [trainer.train(*make_batch(step)).metrics for step in range(trainer.step + 1, last + 1)]


def test_the_product_and_its_gradients_are_those_autograd_finds_for_the_merged_weight() -> None:
    torch.manual_seed(0)
    shapes = ((2, 5, 6), (7, 6), (3, 6), (7, 3), (7,))
    x, weight, down, up, bias = (torch.randn(shape, dtype=torch.float64) for shape in shapes)
    for each in (x, down, up):
        each.requires_grad_()
    weight.requires_grad_()
    found = MergedProduct.apply(x, weight.detach(), down, up, bias, 0.7)
    expected = torch.nn.functional.linear(x, weight + 0.7 * (up @ down), bias)
    torch.testing.assert_close(found, expected)
    upstream = torch.randn_like(expected)
    pairs = zip(
        torch.autograd.grad(found, (x, down, up), upstream),
        torch.autograd.grad(expected, (x, down, up), upstream),
        strict=True,
    )
    for one, other in pairs:
        torch.testing.assert_close(one, other)


def test_three_steps_equal_a_plain_loop_over_pefts_own_layers(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(lora=LORA, optimizer=SECTION, micro_batch_tokens=300)
    peft = as_peft(make_model(), adapters_of(trainer)).double()
    parameters = [parameter for parameter in peft.parameters() if parameter.requires_grad]
    holder = torch.nn.ParameterList(parameters)
    adamw = PlainAdamW(holder, SECTION)
    for step in (1, 2, 3):
        batch = make_batch(step)
        loss = plain_grpo_loss(peft, batch[1], 1.0, 2.0)
        norm = adamw.step(torch.autograd.grad(loss, parameters))
        found = trainer.train(*batch).metrics
        assert found["loss"] == pytest.approx(loss.item(), abs=1e-6)
        assert found["grad_norm"] == pytest.approx(norm, rel=1e-5)
    expected = {
        name.removeprefix("base_model.model."): each.detach().float()
        for name, each in peft.named_parameters()
        if each.requires_grad
    }
    assert_weights_close(adapters_of(trainer), expected, 1e-6)
    assert max(float(each.abs().max()) for name, each in expected.items() if name.endswith(UP)) > 1e-3


@pytest.mark.parametrize("tied", [True, False])
def test_engines_are_given_what_peft_merges_under_the_names_of_the_unadapted_model(
    make_trainer: MakeTrainer, tied: bool
) -> None:
    trainer = make_trainer(model=make_model(tied=tied), lora=LORA)
    train(trainer, 2)
    found = weights_of(trainer)
    merged = as_peft(make_model(tied=tied), adapters_of(trainer)).merge_and_unload()
    assert_same_bits(found, base_of(merged))
    base = base_of(make_model(tied=tied))
    assert list(found) == list(base)
    changed = {name for name in base if not torch.equal(found[name], base[name])}
    assert changed == {name for name in base if name.endswith("proj.weight")}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_before_the_first_step_and_at_learning_rate_0_the_merged_weights_are_the_base_bit_for_bit(
    make_trainer: MakeTrainer, dtype: str
) -> None:
    trainer = make_trainer(lora=LORA, dtype=dtype, optimizer=OptimizerSection(lr=0.0, weight_decay=0.1))
    base = base_of(make_model(), getattr(torch, dtype))
    assert_same_bits(weights_of(trainer), base)
    train(trainer, 2)
    assert_same_bits(weights_of(trainer), base)


def test_only_the_adapters_have_moments_and_the_base_has_the_dtype_of_the_computation(
    make_trainer: MakeTrainer,
) -> None:
    trainer = make_trainer(lora=LORA, dtype="bfloat16")
    model, optimizer = trainer._scorer.model, trainer._updater.optimizer
    trained = {name: each for name, each in model.named_parameters() if each.requires_grad}
    assert {name.rpartition(".lora_")[2] for name in trained} == {"A.default.weight", "B.default.weight"}
    assert [id(each) for group in optimizer.param_groups for each in group["params"]] == list(map(id, trained.values()))
    assert {each.dtype for each in trained.values()} == {torch.float32}
    assert {each.dtype for each in model.parameters() if not each.requires_grad} == {torch.bfloat16}


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_trainer_scores_with_the_merged_weights_to_the_last_bit(
    make_trainer: MakeTrainer, temperature: float
) -> None:
    """A trainer of all weights, given the merged ones, has the same log-probabilities; peft's layers are close."""
    trainer = make_trainer(lora=LORA, temperature=temperature)
    train(trainer, 2)
    model = make_model()
    model.load_state_dict(weights_of(trainer), strict=False)
    _, rows = make_batch(3)
    peft = make_trainer(model=as_peft(make_model(), adapters_of(trainer)).base_model.model, temperature=temperature)
    whole = make_trainer(model=model, temperature=temperature)
    for found, exact, close in zip(*(each.logprobs(rows) for each in (trainer, whole, peft)), strict=True):
        assert np.array_equal(found, exact)
        assert np.abs(found - close).max() <= 1e-4


def test_bfloat16_trains_and_scores_with_the_weights_that_engines_are_given(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(lora=LORA, dtype="bfloat16")
    metrics = train(trainer, 2)
    assert all(math.isfinite(each["loss"]) and each["grad_norm"] > 0 for each in metrics)
    model = make_model()
    model.load_state_dict({name: each.float() for name, each in weights_of(trainer).items()}, strict=False)
    whole = make_trainer(model=model, dtype="bfloat16")
    _, rows = make_batch(3)
    for found, exact in zip(trainer.logprobs(rows), whole.logprobs(rows), strict=True):
        assert np.array_equal(found, exact)


def test_the_reference_of_a_kl_term_is_the_base(make_trainer: MakeTrainer) -> None:
    algorithm = {"kl_coefficient": 0.1, "kl_placement": "loss"}
    whole = make_trainer(optimizer=SECTION, **algorithm)
    lora = make_trainer(lora=LORA, optimizer=SECTION, **algorithm)
    _, rows = make_batch(3)
    train(lora, 2)
    passes = lora._passes(whole_share(rows, 1, 0))
    reference = lora._learner._reference
    assert reference is not None
    found = lora._learner.logprobs(passes, reference, range(len(rows)))
    expected = whole._learner.logprobs(whole._passes(whole_share(rows, 1, 0)), whole._scorer, range(len(rows)))
    assert torch.equal(found, expected)
    assert not torch.equal(found, lora._learner.logprobs(passes, lora._scorer, range(len(rows))))
    assert train(lora, 3)[0]["kl"] > 0


@pytest.mark.parametrize("kind", ["value_head", "model"])
def test_a_critic_learns_beside_adapters(make_trainer: MakeTrainer, kind: str) -> None:
    critic = CriticSection(kind=kind, lr=1e-2)  # type: ignore[arg-type]
    trainer = make_trainer(preset="ppo", lora=LORA, critic=critic)
    before = adapters_of(trainer)
    losses = [each["value_loss"] for each in (trainer.train(*make_batch(step)).metrics for step in (1, 2))]
    assert all(map(math.isfinite, losses))
    after = adapters_of(trainer)
    assert all(not torch.equal(after[name], before[name]) for name in before if name.endswith(UP))
    merged = weights_of(trainer)
    assert torch.equal(merged["model.embed_tokens.weight"], base_of(make_model())["model.embed_tokens.weight"])


# ---- checkpoints


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_resumed_run_is_the_run_and_a_checkpoint_holds_the_adapters_alone(
    make_trainer: MakeTrainer, tmp_path: Path, dtype: str
) -> None:
    whole = make_trainer(lora=LORA, dtype=dtype)
    train(whole, 4)
    first = make_trainer(lora=LORA, dtype=dtype)
    train(first, 2)
    folder = tmp_path / checkpoint.folder_name(2)
    first.save(folder)
    resumed = make_trainer(lora=LORA, dtype=dtype, seed=7)
    resumed.load(folder)
    train(resumed, 4)
    assert_same_bits(adapters_of(resumed), adapters_of(whole))
    assert_same_bits(weights_of(resumed), weights_of(whole))
    assert read_weights(folder).keys() == adapters_of(whole).keys()


@pytest.mark.parametrize(("dtype", "tied"), [("float32", True), ("float32", False), ("bfloat16", True)])
def test_a_model_gets_the_merged_weights_an_engine_would_get(
    make_trainer: MakeTrainer, tmp_path: Path, dtype: str, tied: bool
) -> None:
    trainer = make_trainer(model=make_model(tied=tied), lora=LORA, dtype=dtype)
    train(trainer, 2)
    trainer.save(tmp_path / "step-000002")
    expected = weights_of(trainer)
    for loaded in {torch.float32, getattr(torch, dtype)}:
        model = make_model(tied=tied).to(loaded)
        assert load_weights(model, tmp_path / "step-000002") == 2
        assert_same_bits(base_of(model, getattr(torch, dtype)), expected)
        assert tied == (model.lm_head.weight is model.model.embed_tokens.weight)


def test_adapters_of_other_weights_are_refused_and_nothing_changes(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    trainer = make_trainer(lora=LORA)
    train(trainer, 1)
    trainer.save(tmp_path / "step-000001")
    other = make_model(seed=5)
    before = base_of(other)
    with pytest.raises(ConfigError, match="name the model that the run began with"):
        load_weights(other, tmp_path / "step-000001")
    assert_same_bits(base_of(other), before)
    resumed = make_trainer(model=other, lora=LORA)
    with pytest.raises(ConfigError, match="the adapters belong to other weights"):
        resumed.load(tmp_path / "step-000001")
    assert resumed.step == 0


@pytest.mark.parametrize(
    ("saved", "loading", "message"),
    [
        (LORA, LORA.model_copy(update={"rank": 2}), "rank: 4 in the checkpoint, 2 in the config"),
        (LORA, LORA.model_copy(update={"alpha": 3}), "alpha: 8 in the checkpoint, 3 in the config"),
        (LORA, LORA.model_copy(update={"target_modules": ["q_proj"]}), "the checkpoint has it, the model has not"),
        (LORA, None, "the checkpoint is of LoRA; give the section lora"),
        (None, LORA, "the checkpoint is of a whole model; remove the section lora"),
    ],
)
def test_a_checkpoint_of_other_adapters_is_refused_with_the_difference(
    make_trainer: MakeTrainer, tmp_path: Path, saved: LoraSection | None, loading: LoraSection | None, message: str
) -> None:
    make_trainer(lora=saved).save(tmp_path / "step-000000")
    with pytest.raises(ConfigError, match=message):
        make_trainer(lora=loading).load(tmp_path / "step-000000")


# ---- what is adapted


def test_the_adapters_of_a_seed_are_always_the_same_and_the_random_state_is_left_alone(
    make_trainer: MakeTrainer,
) -> None:
    first = make_trainer(lora=LORA, seed=3)
    model = make_model()
    state = torch.get_rng_state()
    second = make_trainer(model=model, lora=LORA, seed=3)
    assert torch.equal(torch.get_rng_state(), state)
    assert_same_bits(adapters_of(first), adapters_of(second))
    other = adapters_of(make_trainer(lora=LORA, seed=4))
    assert not any(torch.equal(other[name], each) for name, each in adapters_of(first).items() if name.endswith(DOWN))


def test_named_modules_get_adapters_and_no_others(make_trainer: MakeTrainer) -> None:
    section = LORA.model_copy(update={"target_modules": ["q_proj", "model.layers.1.mlp.down_proj"]})
    adapted = {name.removesuffix(UP) for name in adapters_of(make_trainer(lora=section)) if name.endswith(UP)}
    assert adapted == {f"model.layers.{layer}.self_attn.q_proj" for layer in (0, 1)} | {"model.layers.1.mlp.down_proj"}


@pytest.mark.parametrize("target", ["lm_head", "embed_tokens", "query"])
def test_a_target_that_cannot_be_merged_is_refused_naming_those_that_can(
    make_trainer: MakeTrainer, target: str
) -> None:
    section = LORA.model_copy(update={"target_modules": ["q_proj", target]})
    with pytest.raises(
        ConfigError, match=f"lora.target_modules: '{target}' is no linear layer .* down_proj, gate_proj"
    ):
        make_trainer(lora=section)


def test_the_digest_of_a_base_tells_models_apart_but_not_the_dtype_they_were_loaded_in() -> None:
    model = make_model()
    expected = base_digest(model)
    assert base_digest(copy.deepcopy(model).to(torch.bfloat16)) == expected
    with torch.no_grad():
        model.model.norm.weight[3] += 1 / 64
    assert base_digest(model) != expected


def test_an_engine_samples_with_the_log_probabilities_of_the_trainer(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(lora=LORA, temperature=0.8)
    train(trainer, 2)
    attached = attach(trainer.stage())
    engine = TorchEngine(make_model(seed=9), slots=8, max_context_tokens=256)
    engine.load(2, attached.tensors)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 300, size).tolist() for size in (3, 17, 40, 1)]
    rows = generated(engine, prompts, [20, 90, 30, 64], 0.8)
    gaps = [np.abs(found - row.logprobs).max() for found, row in zip(trainer.logprobs(rows), rows, strict=True)]
    assert max(gaps) == 0 if engine.exact else max(gaps) < 1e-4

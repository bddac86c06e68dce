"""The FSDP2 trainer against loops written by hand, and against the engine."""

import math
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from plain_training import PlainAdamW, assert_same_bits, assert_weights_close, plain_logprobs
from trainer_cases import Batch, described, make_batch, make_manifest, make_model, make_trajectory, weights_of
from transformers import Qwen3Config, Qwen3ForCausalLM
from transformers.models.granite import GraniteConfig, GraniteForCausalLM

from flashflow.config.sections import OptimizerSection
from flashflow.engines.embedded.engine import TorchEngine
from flashflow.errors import BudgetError, ConfigError, ContractError
from flashflow.messages import Generate, SamplingKey
from flashflow.records import SampleId, Trajectory
from flashflow.trainers.fsdp import FsdpTrainer
from flashflow.trainers.logprobs import TokenScorer
from flashflow.transport.weights.shared_memory import attach

MakeTrainer = Callable[..., FsdpTrainer]
replace = msgspec.structs.replace


# ---- an independent implementation: one sequence at a time, no padding, no chunks, AdamW from its paper


def plain_grpo_loss(model: Any, rows: list[Trajectory], temperature: float, cap: float | None) -> torch.Tensor:
    """Mean over sequences of the mean over tokens of -min(w, cap) A r, r being 1 in value; w left out without cap."""
    by_group: dict[int, list[float]] = {}
    for row in rows:
        if row.reward is not None:
            by_group.setdefault(row.sample.group, []).append(row.reward)
    total, counted = torch.zeros((), dtype=torch.float64), 0
    for row in rows:
        if row.reward is None:
            continue
        rewards = by_group[row.sample.group]
        spread = np.std(rewards, ddof=1) if len(rewards) > 1 else 0.0
        advantage = (row.reward - np.mean(rewards)) / (spread + 1e-6) if max(rewards) > min(rewards) else 0.0
        logp = plain_logprobs(model, row, temperature)
        behaviour = torch.from_numpy(row.logprobs[row.mask.astype(bool)]).double()
        weight = torch.exp(logp.detach() - behaviour).clamp(max=cap) if cap is not None else 1.0
        total = total - (weight * torch.exp(logp - logp.detach()) * float(advantage)).mean()
        counted += 1
    return total / counted


def plain_training(
    batches: list[Batch], section: OptimizerSection, *, temperature: float = 1.0, cap: float | None = 2.0, seed: int = 0
) -> tuple[dict[str, torch.Tensor], list[float], list[float]]:
    """In float64: (weights, losses, gradient norms)."""
    model = make_model(seed=seed).double().eval()
    adamw, losses, norms = PlainAdamW(model, section), [], []
    for _, rows in batches:
        loss = plain_grpo_loss(model, rows, temperature, cap)
        norms.append(adamw.step(torch.autograd.grad(loss, list(model.parameters()))))
        losses.append(loss.item())
    return {name: tensor.detach().float() for name, tensor in model.named_parameters()}, losses, norms


SECTION = OptimizerSection(lr=1e-2, eps=1e-3, weight_decay=0.1, clip_norm=0.5)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_three_steps_equal_a_plain_loop_written_by_hand(make_trainer: MakeTrainer, temperature: float) -> None:
    batches = [make_batch(step) for step in (1, 2, 3)]
    weights, losses, norms = plain_training(batches, SECTION, temperature=temperature)
    trainer = make_trainer(optimizer=SECTION, temperature=temperature, micro_batch_tokens=300)
    for (manifest, rows), loss, norm in zip(batches, losses, norms, strict=True):
        result = trainer.train(manifest, rows)
        assert result.metrics["loss"] == pytest.approx(loss, abs=1e-6)
        assert result.metrics["grad_norm"] == pytest.approx(norm, rel=1e-5)
    assert norms[0] > 2 * SECTION.clip_norm, "the clipping is not exercised"
    assert_weights_close(weights_of(trainer), weights, 1e-6)


def test_without_correction_the_weights_are_the_plain_loops_too(make_trainer: MakeTrainer) -> None:
    batches = [make_batch(1)]
    weights, losses, _ = plain_training(batches, SECTION, cap=None)
    trainer = make_trainer(optimizer=SECTION, alpha=0.0)
    assert trainer.train(*batches[0]).metrics["loss"] == pytest.approx(losses[0], abs=1e-6)
    assert_weights_close(weights_of(trainer), weights, 1e-6)


@pytest.mark.parametrize("preset", ["grpo", "dapo", "dr_grpo", "gspo", "topr", "reinforce_pp"])
def test_any_micro_batch_budget_gives_the_same_loss_and_weights(make_trainer: MakeTrainer, preset: str) -> None:
    batch = make_batch(1)
    results, weights = [], []
    for budget in (16, 200, 100_000):
        trainer = make_trainer(preset=preset, micro_batch_tokens=budget)
        results.append(trainer.train(*batch))
        weights.append(weights_of(trainer))
    assert [result.metrics["num_micro_batches"] for result in results] == [12, 3, 2]
    for result, found in zip(results[1:], weights[1:], strict=True):
        assert result.metrics["loss"] == pytest.approx(results[0].metrics["loss"], abs=1e-6)
        assert_weights_close(found, weights[0], 1e-6)


def test_the_same_rows_give_the_same_bits(make_trainer: MakeTrainer) -> None:
    first, second = make_trainer(), make_trainer()
    for step in (1, 2):
        assert first.train(*make_batch(step)) == second.train(*make_batch(step))
    assert_same_bits(weights_of(first), weights_of(second))


# ---- log-probabilities


def test_logprobs_equal_a_plain_forward_and_do_not_move_the_training(make_trainer: MakeTrainer) -> None:
    _, rows = make_batch(1)
    trainer, other = make_trainer(temperature=0.7), make_trainer(temperature=0.7)
    model = make_model().double().eval()
    for row, found in zip(rows, trainer.logprobs(rows), strict=True):
        assert found.dtype == np.float32
        assert not found[row.mask == 0].any()
        expected = plain_logprobs(model, row, 0.7).detach().numpy()
        np.testing.assert_allclose(found[row.mask == 1], expected, atol=2e-5)
    assert trainer.train(*make_batch(1)) == other.train(*make_batch(1))
    assert_same_bits(weights_of(trainer), weights_of(other))


def test_logprobs_of_a_row_do_not_depend_on_its_micro_batch(make_trainer: MakeTrainer) -> None:
    _, rows = make_batch(1, longest=120)
    alone = make_trainer(micro_batch_tokens=1).logprobs(rows)
    together = make_trainer(micro_batch_tokens=100_000).logprobs(rows)
    assert all(np.array_equal(one, other) for one, other in zip(alone, together, strict=True))


def test_chunks_of_the_head_change_no_bit_of_the_log_probabilities() -> None:
    tokens = torch.randint(0, 300, (3, 32), generator=torch.Generator().manual_seed(0))
    mask = torch.arange(32).expand(3, 32) >= torch.tensor([[5], [20], [1]])
    model = make_model()
    whole, chunked = TokenScorer(model, 0.9), TokenScorer(model, 0.9, logits_per_chunk=1)
    assert (whole.chunk, chunked.chunk) == (111_840, 16)
    (logprobs, entropies), (in_chunks, entropies_in_chunks) = whole(tokens, mask), chunked(tokens, mask)
    assert torch.equal(logprobs, in_chunks)
    assert torch.equal(entropies, entropies_in_chunks)
    parameters = list(model.parameters())
    gradients = torch.autograd.grad(logprobs.sum(), parameters), torch.autograd.grad(in_chunks.sum(), parameters)
    for gradient, in_chunks_gradient in zip(*gradients, strict=True):
        torch.testing.assert_close(gradient, in_chunks_gradient, rtol=1e-4, atol=1e-5)


def test_the_entropy_is_that_of_the_distribution_and_has_a_gradient_when_asked() -> None:
    tokens = torch.randint(0, 300, (1, 16), generator=torch.Generator().manual_seed(0))
    mask = torch.zeros(1, 16, dtype=torch.bool)
    mask[0, 6:9] = True
    model = make_model().eval()
    expected = torch.distributions.Categorical(logits=model(input_ids=tokens).logits[0, 5:8] / 0.5).entropy()
    scorer = TokenScorer(model, 0.5)
    _, without = scorer(tokens, mask)
    _, entropies = scorer(tokens, mask, entropy_gradient=True)
    torch.testing.assert_close(entropies[0, 6:9], expected, rtol=1e-5, atol=1e-5)
    assert not without.requires_grad
    parameters = list(model.parameters())
    found, by_autograd = (
        torch.autograd.grad(entropies.sum(), parameters),
        torch.autograd.grad(expected.sum(), parameters),
    )
    for gradient, wanted in zip(found, by_autograd, strict=True):
        torch.testing.assert_close(gradient, wanted, rtol=1e-4, atol=1e-5)


def generated(
    engine: TorchEngine, prompts: list[list[int]], lengths: list[int], temperature: float
) -> list[Trajectory]:
    """Requests of their own lengths, sampled together."""
    for place, (prompt, length) in enumerate(zip(prompts, lengths, strict=True)):
        engine.submit(
            Generate(
                request=str(place), session="", key=SamplingKey(seed=1, group=0, member=place, retry=0, turn=0),
                prompt_ids=np.array(prompt, np.int32), generated_ids=np.zeros(0, np.int32), max_new_tokens=length,
                temperature=temperature, stop_ids=[], stop_strings=[], min_version=0,
            )
        )  # fmt: skip
    tokens: list[list[int]] = [list(prompt) for prompt in prompts]
    logprobs = [[0.0] * len(prompt) for prompt in prompts]
    while engine.num_running + engine.num_waiting:
        for sampled in engine.step():
            tokens[int(sampled.request)].append(sampled.token)
            logprobs[int(sampled.request)].append(sampled.logprob)
    return [
        Trajectory(
            sample=SampleId(group=0, member=place), tokens=np.array(tokens[place], np.int32),
            mask=(np.arange(len(tokens[place])) >= len(prompt)).astype(np.uint8),
            logprobs=np.array(logprobs[place], np.float32),
            versions=np.where(np.arange(len(tokens[place])) >= len(prompt), 0, -1).astype(np.int32),
            num_turns=1, outcome="completed", reward=float(place % 2), reward_components={}, finish_reason="length",
            seconds=0.0,
        )
        for place, prompt in enumerate(prompts)
    ]  # fmt: skip


@pytest.mark.parametrize("temperature", [1.0, 0.8])
def test_an_exact_engine_and_the_trainer_agree_to_the_last_bit(make_trainer: MakeTrainer, temperature: float) -> None:
    trainer = make_trainer(temperature=temperature, micro_batch_tokens=700)
    attached = attach(trainer.stage())
    engine = TorchEngine(make_model(seed=9), slots=8, max_context_tokens=256)
    engine.load(0, attached.tensors)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 300, size).tolist() for size in (3, 17, 40, 1, 9, 25, 60, 5, 33)]
    rows = generated(engine, prompts, [20, 90, 30, 64, 7, 150, 50, 1, 70], temperature)
    gap = max(
        float(np.abs(found - row.logprobs).max()) for found, row in zip(trainer.logprobs(rows), rows, strict=True)
    )
    assert gap == 0 if engine.exact else gap < 1e-4
    metrics = trainer.train(make_manifest(1, rows, len(rows)), rows).metrics
    assert metrics["mismatch_k3"] == 0 if engine.exact else metrics["mismatch_k3"] < 1e-6
    assert metrics["w_max"] == pytest.approx(1, abs=0 if engine.exact else 1e-3)


def test_long_sequences_need_no_more_padding_than_their_keys(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(micro_batch_tokens=1500)
    attached = attach(trainer.stage())
    engine = TorchEngine(make_model(seed=9), slots=8, max_context_tokens=1024)
    engine.load(0, attached.tensors)
    rng = np.random.default_rng(1)
    prompts = [rng.integers(0, 300, size).tolist() for size in (120, 129, 195, 250, 380, 505, 640, 1000)]
    rows = generated(engine, prompts, [20, 3, 9, 12, 8, 20, 5, 20], 1.0)
    found = trainer.logprobs(rows)
    gap = max(float(np.abs(one - row.logprobs).max()) for one, row in zip(found, rows, strict=True))
    assert gap == 0 if engine.exact else gap < 1e-4
    metrics = trainer.train(make_manifest(1, rows, len(rows)), rows).metrics
    assert metrics["padding_fraction"] < 0.25, "a sequence of 129 tokens is not padded to 512"
    assert metrics["w_max"] == pytest.approx(1, abs=0 if engine.exact else 1e-3)


def test_the_gradient_does_not_see_the_padding_of_the_keys() -> None:
    tokens = torch.randint(0, 300, (2, 208), generator=torch.Generator().manual_seed(0))
    mask = torch.arange(208).expand(2, 208) >= torch.tensor([[150], [20]])
    model = make_model()
    scorer = TokenScorer(model, 1.0)
    gradients = []
    for length in (208, 512):
        padded, counted = (torch.nn.functional.pad(part, (0, length - 208)) for part in (tokens, mask))
        logprobs, _ = scorer(padded, counted)
        gradients.append(torch.autograd.grad(logprobs.sum(), list(model.parameters())))
    for short, long in zip(*gradients, strict=True):
        torch.testing.assert_close(short, long, rtol=1e-4, atol=1e-4)


# ---- what counts, and what is refused


def test_a_failed_member_leaves_baseline_and_loss(make_trainer: MakeTrainer) -> None:
    manifest, rows = make_batch(1)
    rows = [replace(row, reward=None, outcome="failed") if place in (1, 6) else row for place, row in enumerate(rows)]
    weights, losses, _ = plain_training([(manifest, rows)], SECTION)
    trainer = make_trainer(optimizer=SECTION)
    result = trainer.train(*described(manifest, rows))
    assert result.metrics["loss"] == pytest.approx(losses[0], abs=1e-6)
    assert result.metrics["failed_fraction"] == 2 / 12
    assert result.metrics["tokens_trained"] == sum(row.num_sampled for row in rows if row.reward is not None)
    assert_weights_close(weights_of(trainer), weights, 1e-6)


@pytest.mark.parametrize("preset", ["grpo", "gspo", "cispo", "tis", "topr", "opmd", "rloo", "kimi", "dppo"])
def test_rows_without_advantage_are_measured_and_leaving_out_their_gradient_changes_nothing(
    make_trainer: MakeTrainer, preset: str
) -> None:
    manifest, rows = make_batch(1, groups=2)
    rows = [replace(row, reward=0.5) if row.sample.group == 0 else row for row in rows]
    # A term too small to matter makes every row take the pass with gradient.
    quick, thorough = make_trainer(preset=preset), make_trainer(preset=preset, entropy_coefficient=1e-30)
    found, expected = (trainer.train(*described(manifest, rows)).metrics for trainer in (quick, thorough))
    assert found["tokens_trained"] == sum(row.num_sampled for row in rows)
    for name in ("loss", "grad_norm", "rho_mean", "rho_max", "mismatch_k3", "entropy"):
        assert found[name] == pytest.approx(expected[name], rel=1e-5, abs=1e-6), name
    assert_weights_close(weights_of(quick), weights_of(thorough), 1e-6)


def test_a_batch_without_signal_still_lets_the_moments_act(make_trainer: MakeTrainer) -> None:
    manifest, rows = make_batch(2)
    batches = [make_batch(1), described(manifest, [replace(row, reward=1.0) for row in rows])]
    weights, _, _ = plain_training(batches, SECTION)
    trainer = make_trainer(optimizer=SECTION)
    for batch in batches:
        trainer.train(*batch)
    assert_weights_close(weights_of(trainer), weights, 1e-6)


def test_a_batch_without_a_usable_row_moves_nothing_and_says_so(make_trainer: MakeTrainer) -> None:
    manifest, rows = make_batch(1)
    trainer = make_trainer()
    before = weights_of(trainer)
    result = trainer.train(*described(manifest, [replace(row, reward=None, outcome="failed") for row in rows]))
    assert (result.metrics["loss"], result.metrics["grad_norm"], result.metrics["empty_batch"]) == (0, 0, 1)
    assert trainer.step == 1
    assert_same_bits(weights_of(trainer), before)


def test_rows_that_are_not_the_next_manifests_are_refused(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer()
    with pytest.raises(ContractError, match="manifest 2 handed to a trainer at step 0"):
        trainer.train(*make_batch(2))
    manifest, rows = make_batch(1)
    with pytest.raises(ContractError, match="names 12 samples for this rank, 11 came"):
        trainer.train(manifest, rows[:-1])
    with pytest.raises(ContractError, match="row 0 is g0m0, g0m1 came"):
        trainer.train(manifest, [rows[1], rows[0], *rows[2:]])
    unprompted = replace(rows[0], mask=np.ones_like(rows[0].mask))
    with pytest.raises(ContractError, match=r"g0m0: manifest 1 says (\d+) tokens, .* \1 and \1 came"):
        trainer.train(manifest, [unprompted, *rows[1:]])
    with pytest.raises(ContractError, match="g0m0: its first token is sampled"):
        trainer.train(*described(manifest, [unprompted, *rows[1:]]))
    assert trainer.step == 0


def test_a_nan_log_probability_names_its_sample(make_trainer: MakeTrainer) -> None:
    manifest, rows = make_batch(1)
    broken = rows[5].logprobs.copy()
    broken[-1] = np.nan
    with pytest.raises(ContractError, match=r"behaviour_logprobs of sequence (\d+) .*\1: g1m1") as error:
        make_trainer().train(manifest, [*rows[:5], replace(rows[5], logprobs=broken), *rows[6:]])
    assert "batch 1" in str(error.value)


def test_a_gradient_that_is_not_finite_is_skipped_counted_and_bounded(make_trainer: MakeTrainer) -> None:
    def exploding(step: int) -> Batch:
        manifest, rows = make_batch(step)
        return described(manifest, [replace(rows[0], reward=1e39), *rows[1:]])

    trainer = make_trainer(preset="dr_grpo", optimizer=OptimizerSection(lr=1e-2, max_skipped_steps=2))
    before = weights_of(trainer)
    for step in (1, 2):
        assert trainer.train(*exploding(step)).metrics["skipped_steps"] == step
    assert trainer.step == 2
    assert_same_bits(weights_of(trainer), before)
    assert trainer.train(*make_batch(3)).metrics["skipped_steps"] == 2
    for step in (4, 5):
        trainer.train(*exploding(step))
    with pytest.raises(
        BudgetError, match=r"step 6: the gradient was not finite 3 times in a row .*max_skipped_steps: 2"
    ):
        trainer.train(*exploding(6))


def test_a_model_that_changes_its_logits_after_the_head_or_slides_its_window_is_refused() -> None:
    shape = {"vocab_size": 300, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1,
             "num_attention_heads": 2, "num_key_value_heads": 1}  # fmt: skip
    with pytest.raises(ConfigError, match="transforms its logits after the head"):
        TokenScorer(GraniteForCausalLM(GraniteConfig(**shape, logits_scaling=8.0, initializer_range=0.5)), 1.0)
    windowed = Qwen3Config(**shape, use_sliding_window=True, sliding_window=8, max_window_layers=0)
    with pytest.raises(ConfigError, match="sliding_attention; the fsdp trainer needs full attention"):
        TokenScorer(Qwen3ForCausalLM(windowed), 1.0)


# ---- regularisers, metrics, staging


def test_the_reference_stays_where_the_run_started(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(kl_coefficient=0.1)
    divergences = [trainer.train(*make_batch(step)).metrics["kl"] for step in (1, 2, 3)]
    assert divergences[0] == 0
    assert 0 < divergences[1] < divergences[2]


def test_a_kl_penalty_in_the_reward_is_summed_per_sequence_before_the_baseline(make_trainer: MakeTrainer) -> None:
    manifest, rows = make_batch(1)
    model = make_model().double().eval()
    penalised = []
    for row in rows:
        ratio = row.logprobs[row.mask == 1].astype(np.float64) - plain_logprobs(model, row, 1.0).detach().numpy()
        assert row.reward is not None
        penalised.append(replace(row, reward=row.reward - 0.05 * float(ratio.sum())))
    direct, by_config = make_trainer(), make_trainer(kl_coefficient=0.05, kl_placement="reward")
    direct.train(*described(manifest, penalised))
    result = by_config.train(manifest, rows)
    assert_weights_close(weights_of(by_config), weights_of(direct), 1e-5)
    assert result.metrics["reward_mean"] == np.mean([row.reward for row in rows]), "metrics show the raw reward"


def test_an_entropy_bonus_raises_the_entropy(make_trainer: MakeTrainer) -> None:
    plain, bonus = make_trainer(), make_trainer(entropy_coefficient=1.0)
    for trainer in (plain, bonus):
        for _ in range(4):
            trainer.train(*make_batch(trainer.step + 1))
    entropies = [trainer.train(*make_batch(5)).metrics["entropy"] for trainer in (plain, bonus)]
    assert entropies[0] < entropies[1]


def test_metrics_describe_the_batch(make_trainer: MakeTrainer) -> None:
    rng = np.random.default_rng(0)
    cases = [(0, 1.0, 10, 0), (0, 0.0, 20, 1), (1, 0.5, 30, 2), (1, 0.5, 40, 2)]
    trainer = make_trainer()
    for step in (1, 2):
        trainer.train(*make_batch(step))
    rows = [
        make_trajectory(SampleId(group, place % 2), prompt=4, response=length, rng=rng, version=version, reward=reward)
        for place, (group, reward, length, version) in enumerate(cases)
    ]
    rows[3] = replace(rows[3], outcome="truncated")
    metrics = trainer.train(make_manifest(3, rows, 2), rows).metrics
    expected = {
        "reward_mean": 0.5, "reward_std": math.sqrt(1 / 8), "response_length_mean": 25, "response_length_max": 40,
        "truncated_fraction": 0.25, "failed_fraction": 0, "no_signal_fraction": 0.5, "tokens_trained": 100,
        "staleness_mean": 0.75, "staleness_max": 2, "staleness_0": 0.5, "staleness_1": 0.25, "staleness_2": 0.25,
        "num_samples": 4, "r_mean": 1, "r_max": 1, "learning_rate": 0.01, "empty_batch": 0, "skipped_steps": 0,
        "num_micro_batches": 2, "padding_fraction": 1 - 116 / (2 * 32 + 2 * 48),
    }  # fmt: skip
    assert {name: metrics[name] for name in expected} == pytest.approx(expected)
    by_lag = [metrics[f"mismatch_k3_lag_{lag}"] for lag in (0, 1, 2)]
    assert metrics["mismatch_k3"] == pytest.approx(0.7 * by_lag[0] + 0.2 * by_lag[1] + 0.1 * by_lag[2])
    assert all(math.isfinite(value) for value in metrics.values())


@pytest.mark.parametrize("tied", [True, False])
def test_staged_names_are_those_of_the_unsharded_model(make_trainer: MakeTrainer, tied: bool) -> None:
    model = make_model(tied=tied)
    expected = {name: tensor.detach().clone() for name, tensor in model.named_parameters()}
    trainer = make_trainer(model=model)
    found = weights_of(trainer)
    assert list(found) == list(expected)
    assert ("lm_head.weight" in found) is not tied
    assert_same_bits(found, expected)
    weights = trainer.stage()
    assert weights.version == 0
    trainer.train(*make_batch(1))
    assert trainer.stage().version == 1
    attach(weights).verify()


def test_bfloat16_computes_and_stages_in_bfloat16_over_float32_parameters(make_trainer: MakeTrainer) -> None:
    half, full = make_trainer(dtype="bfloat16"), make_trainer()
    assert half.train(*make_batch(1)).metrics["loss"] == pytest.approx(
        full.train(*make_batch(1)).metrics["loss"], abs=0.02
    )
    staged, exact = weights_of(half), weights_of(full)
    assert {tensor.dtype for tensor in staged.values()} == {torch.bfloat16}
    for name, tensor in staged.items():
        torch.testing.assert_close(tensor.float(), exact[name], rtol=0.01, atol=0.021)

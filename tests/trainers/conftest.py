"""A tiny model, batches of random trajectories, and one process group for all trainer tests."""

import uuid
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from transformers import Qwen3Config, Qwen3ForCausalLM

from flashflow.algorithms.presets import resolve
from flashflow.config.sections import OptimizerSection
from flashflow.records import Manifest, ManifestRow, SampleId, Trajectory
from flashflow.trainers.fsdp import FsdpTrainer
from flashflow.trainers.sharding import start_alone

VOCABULARY = 300
Batch = tuple[Manifest, list[Trajectory]]


@pytest.fixture(scope="session", autouse=True)
def process_group() -> Iterator[None]:
    torch.set_num_threads(1)
    start_alone(torch.device("cpu"))
    yield
    dist.destroy_process_group()


def make_model(*, seed: int = 0, tied: bool = True, hidden: int = 64) -> Any:
    torch.manual_seed(seed)
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=VOCABULARY, hidden_size=hidden, intermediate_size=96, num_hidden_layers=2,
            num_attention_heads=2, num_key_value_heads=1, head_dim=32, max_position_embeddings=1024,
            tie_word_embeddings=tied, initializer_range=0.1,
        )
    )  # fmt: skip


def make_trajectory(
    sample: SampleId, *, prompt: int, response: int, rng: np.random.Generator, version: int = 0, reward: float | None = 0.0
) -> Trajectory:
    tokens = rng.integers(0, VOCABULARY, prompt + response).astype(np.int32)
    mask = np.zeros(len(tokens), np.uint8)
    mask[prompt:] = 1
    behaviour = np.where(mask, rng.normal(-5.7, 0.3, len(tokens)), 0).astype(np.float32)
    versions = np.where(mask, version, -1).astype(np.int32)
    return Trajectory(
        sample=sample, tokens=tokens, mask=mask, logprobs=behaviour, versions=versions, num_turns=1,
        outcome="failed" if reward is None else "completed", reward=reward, reward_components={},
        finish_reason="stop", seconds=1.0,
    )  # fmt: skip


def make_manifest(step: int, rows: list[Trajectory], group_size: int) -> Manifest:
    named = [
        ManifestRow(
            sample=row.sample, num_tokens=row.num_tokens, num_sampled=row.num_sampled,
            initiating_version=row.initiating_version or 0, reward=row.reward, outcome=row.outcome,
        )
        for row in rows
    ]  # fmt: skip
    return Manifest(step=step, rows=named, group_size=group_size, rng_key=2**64 - step)


def make_batch(step: int, *, groups: int = 3, group_size: int = 4, longest: int = 60, seed: int = 0) -> Batch:
    """Random tokens, lengths and rewards; behaviour log-probabilities some way off the policy's."""
    rng = np.random.default_rng((seed, step))
    rows = [
        make_trajectory(
            SampleId(group=(step - 1) * groups + group, member=member),
            prompt=int(rng.integers(2, 12)), response=int(rng.integers(1, longest)), rng=rng, version=step - 1,
            reward=float(rng.integers(0, 5)) / 4,
        )
        for group in range(groups)
        for member in range(group_size)
    ]  # fmt: skip
    return make_manifest(step, rows, group_size), rows


@pytest.fixture
def make_trainer() -> Iterator[Callable[..., FsdpTrainer]]:
    """FsdpTrainer over a tiny model; further keyword arguments override any field of the algorithm."""
    made: list[FsdpTrainer] = []

    def make(
        *, model: Any = None, preset: str = "grpo", alpha: float = 1.0, micro_batch_tokens: int = 4096,
        temperature: float = 1.0, dtype: str = "float32", optimizer: OptimizerSection | None = None, **overrides: object,
    ) -> FsdpTrainer:  # fmt: skip
        advantage, loss = resolve(preset, overrides, alpha=alpha)
        trainer = FsdpTrainer(
            model if model is not None else make_model(),
            run_id=f"test-{uuid.uuid4().hex[:8]}", advantage=advantage, loss=loss,
            optimizer=optimizer if optimizer is not None else OptimizerSection(lr=1e-2, eps=1e-3), num_steps=100,
            micro_batch_tokens=micro_batch_tokens, temperature=temperature, max_response_tokens=64,
            dtype=dtype,  # type: ignore[arg-type]
        )  # fmt: skip
        made.append(trainer)
        return trainer

    yield make
    for trainer in made:
        trainer.close()


def weights_of(trainer: FsdpTrainer) -> dict[str, torch.Tensor]:
    """A copy of what an engine would get."""
    from flashflow.transport.weights.shared_memory import attach

    attached = attach(trainer.stage())
    attached.verify()
    return {name: tensor.clone() for name, tensor in attached.tensors.items()}

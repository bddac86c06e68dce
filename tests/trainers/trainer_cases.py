"""A tiny model and batches of random trajectories for the trainer tests."""

from typing import Any

import msgspec
import numpy as np
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from flashflow.records import Manifest, ManifestRow, SampleId, Trajectory
from flashflow.trainers.fsdp import FsdpTrainer
from flashflow.transport.weights.shared_memory import attach

VOCABULARY = 300
Batch = tuple[Manifest, list[Trajectory]]


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
    sample: SampleId,
    *,
    prompt: int,
    response: int,
    rng: np.random.Generator,
    version: int = 0,
    reward: float | None = 0.0,
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


def described(manifest: Manifest, rows: list[Trajectory]) -> Batch:
    """Other rows in the place of the manifest's, and what it says of them."""
    return msgspec.structs.replace(manifest, rows=make_manifest(manifest.step, rows, 1).rows), rows


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


def weights_of(trainer: FsdpTrainer) -> dict[str, torch.Tensor]:
    """A copy of what an engine would get."""
    attached = attach(trainer.stage())
    attached.verify()
    return {name: tensor.clone() for name, tensor in attached.tensors.items()}

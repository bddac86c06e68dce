"""One process group per test file, and a maker of trainers that are closed at the end."""

import uuid
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from trainer_cases import make_model

from flashflow.algorithms.presets import resolve
from flashflow.config.sections import CriticSection, FsdpTrainerSection, LoraSection, OptimizerSection
from flashflow.trainers.fsdp import FsdpTrainer
from flashflow.trainers.sharding import start_alone


@pytest.fixture(scope="module", autouse=True)
def process_group() -> Iterator[None]:
    torch.set_num_threads(1)
    start_alone(torch.device("cpu"))
    yield
    dist.destroy_process_group()


@pytest.fixture
def make_trainer() -> Iterator[Callable[..., FsdpTrainer]]:
    """FsdpTrainer over a tiny model; further keyword arguments override any field of the algorithm."""
    made: list[FsdpTrainer] = []

    def make(
        *, model: Any = None, preset: str = "grpo", alpha: float = 1.0, micro_batch_tokens: int = 4096,
        temperature: float = 1.0, dtype: str = "float32", optimizer: OptimizerSection | None = None,
        optimizer_steps: int = 1, epochs: int = 1, critic: CriticSection | None = None,
        lora: LoraSection | None = None, seed: int = 0, section: FsdpTrainerSection | None = None,
        **overrides: object,
    ) -> FsdpTrainer:  # fmt: skip
        advantage, loss = resolve(preset, overrides, alpha=alpha)
        trainer = FsdpTrainer(
            model if model is not None else make_model(),
            run_id=f"test-{uuid.uuid4().hex[:8]}", advantage=advantage, loss=loss,
            optimizer=optimizer if optimizer is not None else OptimizerSection(lr=1e-2, eps=1e-3), num_steps=100,
            micro_batch_tokens=micro_batch_tokens, temperature=temperature, max_response_tokens=64,
            dtype=dtype,  # type: ignore[arg-type]
            optimizer_steps=optimizer_steps, epochs=epochs, critic=critic, lora=lora, seed=seed, section=section,
        )  # fmt: skip
        made.append(trainer)
        return trainer

    yield make
    for trainer in made:
        trainer.close()

"""The learning rate by step, values by hand."""

import math

import pytest

from flashflow.config.sections import OptimizerSection
from flashflow.trainers.schedule import learning_rate


def rates(num_steps: int, **options: object) -> list[float]:
    section = OptimizerSection.model_validate({"lr": 1.0, **options})
    return [learning_rate(section, step, num_steps) for step in range(1, num_steps + 1)]


def test_warm_up_rises_linearly_to_the_full_rate_and_stays() -> None:
    assert rates(6, warmup_steps=4) == [0.25, 0.5, 0.75, 1, 1, 1]


def test_linear_decay_reaches_the_least_rate_at_the_last_step() -> None:
    assert rates(5, decay="linear", min_lr_fraction=0.2) == pytest.approx([1, 0.8, 0.6, 0.4, 0.2])
    assert rates(6, decay="linear", warmup_steps=2) == pytest.approx([0.5, 1, 0.75, 0.5, 0.25, 0])


def test_cosine_decay_is_half_way_in_the_middle() -> None:
    assert rates(5, decay="cosine") == pytest.approx([1, (1 + math.sqrt(0.5)) / 2, 0.5, (1 - math.sqrt(0.5)) / 2, 0])
    assert rates(3, decay="cosine", min_lr_fraction=0.5) == pytest.approx([1, 0.75, 0.5])


def test_a_run_shorter_than_its_warm_up_or_longer_than_planned_is_served() -> None:
    assert rates(2, warmup_steps=4, decay="linear") == [0.25, 0.5]
    assert rates(1, decay="linear") == [1]
    assert learning_rate(OptimizerSection(lr=1.0, decay="linear", min_lr_fraction=0.1), 50, 10) == pytest.approx(0.1)

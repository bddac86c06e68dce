"""Adapters on two ranks: rank 3 divides by neither, so that a shard of A holds two rows and the other one."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lora_ranks import Dtype, make, run
from trainer_cases import make_batch, make_model, weights_of

from flashflow.trainers import checkpoint
from flashflow.trainers.fsdp import FsdpTrainer
from flashflow.trainers.weights import load_weights


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_two_ranks_train_and_publish_the_adapters_that_one_does(tmp_path: Path, dtype: Dtype) -> None:
    folder = tmp_path / "two"
    folder.mkdir()
    script = Path(__file__).with_name("lora_ranks.py")
    ranks = [subprocess.Popen([sys.executable, str(script), str(rank), "2", str(folder), dtype]) for rank in range(2)]
    try:
        assert [rank.wait(timeout=120) for rank in ranks] == [0, 0]
    finally:
        for rank in ranks:
            rank.kill()
    outcomes = [torch.load(folder / f"rank-{rank}.pt", weights_only=False) for rank in range(2)]
    assert all(torch.equal(outcomes[0]["weights"][name], tensor) for name, tensor in outcomes[1]["weights"].items())
    alone = make("test-lora-one-rank", dtype)
    expected = run(alone, tmp_path)
    if dtype == "float32":
        for outcome in outcomes:
            for found, wanted in zip(outcome["metrics"], expected["metrics"], strict=True):
                assert without_cut(found) == pytest.approx(without_cut(wanted), rel=1e-4, abs=1e-5)
            for name, tensor in expected["weights"].items():
                torch.testing.assert_close(outcome["weights"][name], tensor, rtol=0, atol=1e-5)
    assert_the_checkpoint_of_two_ranks_is_used_on_one(alone, folder, outcomes[0], dtype)
    alone.close()


def without_cut(metrics: dict[str, float]) -> dict[str, float]:
    """But for how the work is cut, which goes by the number of ranks."""
    return {name: value for name, value in metrics.items() if name not in ("num_micro_batches", "padding_fraction")}


def assert_the_checkpoint_of_two_ranks_is_used_on_one(
    alone: FsdpTrainer, folder: Path, outcome: dict[str, Any], dtype: Dtype
) -> None:
    stored = folder / checkpoint.folder_name(1)
    alone.load(stored)
    published = weights_of(alone)
    model = make_model().to(getattr(torch, dtype))
    load_weights(model, stored)
    assert all(torch.equal(tensor, published[name]) for name, tensor in model.named_parameters())
    alone.train(*make_batch(2, groups=4))
    tolerance = 1e-4 if dtype == "float32" else 0.2
    for found, wanted in zip(alone.logprobs(make_batch(3)[1]), outcome["logprobs"], strict=True):
        np.testing.assert_allclose(found, wanted, atol=tolerance)

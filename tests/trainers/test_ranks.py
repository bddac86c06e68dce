"""Two ranks train what one does."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from trainer_cases import make_batch, weights_of
from two_ranks import make, run, second_batch

from flashflow.trainers import checkpoint

PACKING = ("num_micro_batches", "padding_fraction")
"""Metrics of how the work was cut."""


@pytest.mark.slow
@pytest.mark.parametrize("case", ["one step", "several steps", "value_head", "model"])
def test_two_ranks_of_which_one_idles_train_what_one_does(tmp_path: Path, case: str) -> None:
    folder = tmp_path / "two"
    folder.mkdir()
    script = Path(__file__).with_name("two_ranks.py")
    ranks = [subprocess.Popen([sys.executable, str(script), str(rank), "2", str(folder), case]) for rank in range(2)]
    try:
        assert [rank.wait(timeout=120) for rank in ranks] == [0, 0]
    finally:
        for rank in ranks:
            rank.kill()
    alone = make("test-one-rank", case)
    expected = run(alone, tmp_path)
    outcomes = [torch.load(folder / f"rank-{rank}.pt", weights_only=False) for rank in range(2)]
    for outcome in outcomes:
        for found, wanted in zip(outcome["metrics"], expected["metrics"], strict=True):
            assert set(found) == set(wanted)
            shared = {name: found[name] for name in found if name not in PACKING}
            assert shared == pytest.approx({name: wanted[name] for name in shared}, rel=1e-4, abs=1e-6)
        assert list(outcome["weights"]) == list(expected["weights"])
        for name, tensor in expected["weights"].items():
            torch.testing.assert_close(outcome["weights"][name], tensor, rtol=0, atol=1e-6)
        for found, wanted in zip(outcome["logprobs"], alone.logprobs(make_batch(3)[1]), strict=True):
            np.testing.assert_allclose(found, wanted, atol=1e-5)
    assert all(torch.equal(outcomes[0]["weights"][name], tensor) for name, tensor in outcomes[1]["weights"].items())
    alone.load(folder / checkpoint.folder_name(1))
    alone.train(*second_batch())
    again = weights_of(alone)
    for name, tensor in outcomes[0]["weights"].items():
        torch.testing.assert_close(again[name], tensor, rtol=0, atol=1e-6)
    alone.close()

"""Filters, overlong shaping and replay in the whole ring: they act, keep batches full, and are redone the same."""

import asyncio
import math

import pytest
import torch

from flashflow.clock import LoopClock
from flashflow.config import load_config
from flashflow.errors import RemoteError
from flashflow.launch.in_process import ring
from flashflow.launch.run import prepare
from flashflow.observe.progress import ProgressDisplay
from tests.ring import final_weights, make_ring, metrics
from tests.test_ring import in_process, play

DAPO = {"algorithm.preset": "dapo"}
REPLAY = {"replay.enabled": True, "replay.min_mean": 0.4}
STOPS = [chr(letter) for letter in range(ord("!"), ord("5"))]
"""Of the 256 bytes that a random model answers with: answers end early, here and there."""


class Interrupted(Exception):
    pass


class InterruptedDisplay(ProgressDisplay):
    """Ends the run once a step is reported."""

    def __init__(self, step):
        super().__init__()
        self.last = step

    def update(self, record):
        super().update(record)
        if record["step"] == self.last:
            raise Interrupted


def interrupt(path, step):
    """Runs the ring up to `step`, in the middle between two checkpoints."""
    display = InterruptedDisplay(step)
    config = prepare(load_config(path), display, resume=False, overwrite=False)
    with pytest.raises(Interrupted):
        asyncio.run(ring(config, display, resume=False, clock=LoopClock()))


def ring_of(folder, *, reward="some_silent", **overrides):
    return make_ring(
        folder, reward=reward, overrides={**in_process(), "run.steps": 3, "sampling.stop_strings": STOPS, **overrides}
    )


@pytest.mark.parametrize("alpha", [0, 2])
def test_dapo_replaces_groups_without_signal_and_trains_full_batches(tmp_path, alpha):
    path = ring_of(tmp_path, **DAPO, **{"rollout.alpha": alpha})
    play(path, seed=1 if alpha else None, virtual=alpha > 0)
    lines = metrics(path)
    assert [line["groups"] for line in lines] == [4] * 3
    assert all(line["no_signal_fraction"] == 0 and math.isfinite(line["loss"]) for line in lines)
    assert max(line["staleness_max"] for line in lines) <= alpha
    filtered = [line["filtered_groups"] for line in lines]
    assert sum(filtered) > 0
    assert lines[-1]["ledger_filtered"] == 4 * sum(filtered) or alpha > 0
    states = ("admitted", "leased", "committed", "consumed", "filtered", "failed", "expired", "surplus")
    assert lines[-1]["ledger_submitted"] == sum(lines[-1][f"ledger_{state}"] for state in states)


def test_everything_filtered_ends_the_run_with_an_error(tmp_path):
    path = ring_of(tmp_path, reward="constant", **DAPO, **{"filters.max_filtered_fraction": 0.5})
    with pytest.raises(
        RemoteError, match=r"^BudgetError: .* dropped 17 groups of 17, .*rewards.py:constant tells too few attempts"
    ):
        play(path, seed=1, virtual=True)


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    path = ring_of(tmp_path_factory.mktemp("plain"))
    play(path)
    return metrics(path)


@pytest.mark.parametrize(
    "option", [{"overlong.penalty": True}, {"overlong.mask_truncated": True}, {"filters.mean_upper": 0.9}, REPLAY]
)
def test_each_option_changes_the_training(tmp_path, plain, option):
    path = ring_of(tmp_path, **option)
    play(path)
    lines = metrics(path)
    assert [line["loss"] for line in lines] != [line["loss"] for line in plain]
    assert max(line["truncated_fraction"] for line in lines) < 1
    if "filters.mean_upper" not in option:
        # The first batch is sampled by the same weights: its reward in the metrics is the raw one.
        assert lines[0]["reward_mean"] == plain[0]["reward_mean"]


def test_a_batch_that_was_truncated_whole_trains_nothing_and_says_so(tmp_path):
    path = ring_of(tmp_path, **{"overlong.mask_truncated": True, "sampling.stop_strings": [], "run.steps": 1})
    play(path)
    (line,) = metrics(path)
    assert (line["truncated_fraction"], line["empty_batch"]) == (1, 1)
    assert (line["loss"], line["grad_norm"], line["tokens_trained"], line["w_mean"]) == (0, 0, 0, 1)


def test_replay_slots_have_metrics_of_their_own_and_the_staleness_speaks_of_fresh_samples(tmp_path):
    path = ring_of(tmp_path, **REPLAY, **{"run.steps": 6})
    play(path)
    lines = metrics(path)
    replayed = [line for line in lines if line["replay_groups"]]
    assert replayed
    assert all(line["groups"] == 4 and line["staleness_max"] == 0 for line in lines)
    assert all(1 <= line["replay_staleness_max"] <= 4 and line["replay_uses_mean"] >= 2 for line in replayed)
    # Their own behaviour log-probabilities: w is not 1 where the batch has replay slots, and only there.
    assert all(line["w_max"] > 1 + 1e-3 for line in replayed)
    assert all(abs(line["w_max"] - 1) < 1e-4 for line in lines if not line["replay_groups"])


@pytest.mark.parametrize("options", [DAPO, REPLAY], ids=["dapo", "replay"])
def test_an_interrupted_run_redoes_the_same_batches(tmp_path, options):
    whole, parts = (ring_of(tmp_path / name, **options, **{"run.steps": 6}) for name in ("whole", "parts"))
    play(whole)
    interrupt(parts, 5)
    play(parts, resume=True)
    assert sum(line["filtered_groups"] + line["replay_groups"] for line in metrics(whole)) > 0
    assert [line["loss"] for line in metrics(parts)] == [line["loss"] for line in metrics(whole)]
    for name in ("filtered_groups", "replay_groups", "replay_staleness_max", "reward_mean"):
        assert [line.get(name) for line in metrics(parts)] == [line.get(name) for line in metrics(whole)]
    resumed, expected = final_weights(parts), final_weights(whole)
    assert all(torch.equal(resumed[name], tensor) for name, tensor in expected.items())

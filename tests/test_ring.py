"""The whole ring in one process: equal to the reference loop bit for bit, and honest about log-probabilities."""

import asyncio
import hashlib
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from flashflow.clock import LoopClock
from flashflow.config import Config, load_config
from flashflow.launch.in_process import ring
from flashflow.launch.run import prepare
from flashflow.messages import Message
from flashflow.observe.progress import ProgressDisplay
from flashflow.simulate.clock import run_virtual
from flashflow.transport.channel import Peer
from tests.reference_loop import reference_loop
from tests.ring import final_weights, make_ring, metrics


def play(path: Path, *, seed: int | None = None, virtual: bool = False, resume: bool = False) -> Config:
    """Runs the ring of a config file to its end."""
    return play_config(load_config(path), seed=seed, virtual=virtual, resume=resume)


def play_config(config: Config, *, seed: int | None = None, virtual: bool = False, resume: bool = False) -> Config:
    """Runs the ring to its end. With a seed every message is late by up to 0.3 s, drawn from it and the message."""
    display = ProgressDisplay()
    config = prepare(config, display, resume=resume, overwrite=False)

    def delay(peer: Peer, name: str, message: Message) -> float:
        text = f"{seed}/{peer}/{name}/{type(message).__name__}/{message!r}".encode()
        return hashlib.blake2b(text, digest_size=1).digest()[0] / 255 * 0.3

    async def main() -> None:
        await ring(config, display, resume=resume, clock=LoopClock(), delay=None if seed is None else delay)

    if virtual:
        run_virtual(main())
    else:
        asyncio.run(main())
    return config


def in_process(**overrides: object) -> dict[str, object]:
    return {"run.runtime": "in_process", **{name.replace("__", "."): value for name, value in overrides.items()}}


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    path = make_ring(tmp_path_factory.mktemp("reference"), overrides=in_process())
    return reference_loop(load_config(path))


def assert_equals_reference(path: Path, reference) -> None:
    history, weights = reference
    written = metrics(path)
    assert [line["loss"] for line in written] == [step["loss"] for step in history]
    assert [line["reward_mean"] for line in written] == pytest.approx([step["reward_mean"] for step in history])
    final = final_weights(path)
    for name, tensor in weights.items():
        assert torch.equal(final[name], tensor), name


@pytest.mark.parametrize("env", [1, 3])
def test_the_ring_at_alpha_0_equals_the_reference_loop_bit_for_bit(tmp_path, reference, env):
    path = make_ring(tmp_path, overrides=in_process(placement__env=env, rollout__concurrency=5))
    play(path)
    assert_equals_reference(path, reference)


@pytest.mark.parametrize("seed", [1, 2])
def test_random_delays_of_every_message_change_no_bit_at_alpha_0(tmp_path, reference, seed):
    path = make_ring(tmp_path, overrides=in_process(placement__env=2, placement__engine=2))
    play(path, seed=seed, virtual=True)
    assert_equals_reference(path, reference)


@pytest.mark.parametrize(("alpha", "on_stale"), [(1, "wait"), (0.5, "wait"), (1.5, "drop")])
def test_staleness_is_bounded_by_alpha_and_reached(tmp_path, alpha, on_stale):
    overrides = in_process(rollout__alpha=alpha, rollout__on_stale=on_stale, placement__env=2)
    path = make_ring(tmp_path, overrides={**overrides, "run.steps": 6})
    play(path, seed=1, virtual=True)
    ages = [line["staleness_max"] for line in metrics(path)]
    assert max(ages) <= math.ceil(alpha)
    assert max(ages) >= 1


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_with_learning_rate_0_engine_and_trainer_agree(tmp_path, temperature):
    overrides = in_process(rollout__alpha=1, sampling__temperature=temperature, optimizer__lr=0.0)
    path = make_ring(tmp_path, overrides=overrides)
    play(path)
    for line in metrics(path):
        assert abs(line["w_mean"] - 1) <= 1e-5
        # |prox - behaviour| of every trained token: log w of the largest and of the smallest.
        assert max(math.log(line["w_max"]), -math.log(line["w_min"])) <= 1e-4
        assert line["mismatch_k3"] <= 1e-8


@pytest.mark.parametrize("tied", [True, False])
def test_after_each_sync_the_engine_computes_what_the_trainer_does(tmp_path, tied):
    path = make_ring(tmp_path, tied=tied, overrides=in_process(placement__engine=2))
    play(path)
    for line in metrics(path):  # at alpha 0 every token was sampled by the weights of the sync before
        assert line["grad_norm"] > 0
        assert max(math.log(line["w_max"]), -math.log(line["w_min"])) <= 1e-5
        assert line["mismatch_k3"] <= 1e-10


def test_every_sample_is_in_at_most_one_manifest_and_every_task_in_order(tmp_path):
    path = make_ring(tmp_path, overrides={**in_process(rollout__alpha=2), "run.steps": 5})
    play(path, seed=4, virtual=True)
    last = metrics(path)[-1]
    states = ("admitted", "leased", "committed", "consumed", "filtered", "failed", "expired", "surplus")
    assert last["ledger_submitted"] == sum(last[f"ledger_{state}"] for state in states)
    assert last["ledger_consumed"] == 5 * 16


def test_a_resumed_run_equals_an_uninterrupted_one_at_alpha_0(tmp_path, reference):
    path = make_ring(tmp_path, overrides={**in_process(), "run.steps": 2})
    play(path)
    longer = make_ring(tmp_path, overrides=in_process())
    play(longer, resume=True)
    assert_equals_reference(longer, reference)


def test_an_evaluation_is_written_into_the_metrics(tmp_path):
    path = make_ring(tmp_path, overrides={**in_process(), "evaluation.every_steps": 2, "evaluation.problems": 8})
    play(path)
    evaluations = [e for line in metrics(path) for e in line.get("evaluations", [])]
    assert [e["version"] for e in evaluations] == [0, 2, 4]
    assert all(e["num_problems"] == 8 and 0 <= e["accuracy"] <= 1 for e in evaluations)
    assert "eval_accuracy" in metrics(path)[-1]
    assert np.isfinite([e["mean_response_tokens"] for e in evaluations]).all()


def test_data_that_ends_ends_the_run_cleanly(tmp_path):
    path = make_ring(tmp_path, overrides={**in_process(data__epochs=1), "run.steps": 100})
    config = play(path)
    assert metrics(path)[-1]["step"] == 10  # 40 tasks, 4 groups a batch
    assert (config.run_folder / "checkpoints" / "step-000010").exists()

"""Two trainer ranks as real processes: the training of one, to rounding, and a gang that lives and dies together."""

import math
import os
import signal

import pytest
import torch

from tests.ring import children, final_weights, make_ring, metrics, train
from tests.test_processes import Run

pytestmark = pytest.mark.slow


def test_two_ranks_train_what_one_does(tmp_path):
    overrides = {"run.steps": 10, "batch.micro_batch_tokens": 256, "optimizer.lr": 1e-3, "engine.batch_invariant": True}
    paths = {}
    for ranks in (1, 2):
        paths[ranks] = make_ring(tmp_path / str(ranks), overrides={**overrides, "placement.trainer": ranks})
        ended = train(paths[ranks])
        assert ended.returncode == 0, ended.stdout + ended.stderr
    one, two = metrics(paths[1]), metrics(paths[2])
    # Rewards equal: not one token was sampled otherwise.
    assert [line["reward_mean"] for line in one] == [line["reward_mean"] for line in two]
    for key in ("grad_norm", "entropy", "tokens_trained"):
        assert [line[key] for line in two] == pytest.approx([line[key] for line in one], rel=1e-5), key
    assert [line["loss"] for line in two] == pytest.approx([line["loss"] for line in one], abs=1e-6)
    assert max(disagreement(line) for line in two) <= 1e-5
    first, second = final_weights(paths[1]), final_weights(paths[2])
    for name, tensor in first.items():
        torch.testing.assert_close(second[name], tensor, rtol=1e-4, atol=1e-5, msg=name)


def disagreement(line):
    """|log w| of the token on which engine and trainer agree least."""
    return max(math.log(line["w_max"]), -math.log(line["w_min"]))


def test_with_learning_rate_0_the_engine_and_two_ranks_agree(tmp_path):
    overrides = {"run.steps": 4, "rollout.alpha": 1, "optimizer.lr": 0.0, "placement.trainer": 2}
    path = make_ring(tmp_path, overrides=overrides)
    ended = train(path)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    for line in metrics(path):
        assert disagreement(line) <= 1e-4
        assert line["mismatch_k3"] <= 1e-8
        assert line["num_samples"] == 16


def test_a_killed_rank_restarts_the_gang_and_every_planned_step_is_trained(tmp_path):
    overrides = {"run.steps": 10, "rollout.alpha": 1, "placement.trainer": 2}
    run = Run(make_ring(tmp_path, overrides=overrides))
    run.until_step(3)
    os.kill(children(run.process.pid)["trainer-1"], signal.SIGKILL)
    code, output, _ = run.end()
    assert code == 0, output
    assert [line["step"] for line in metrics(run.path)] == list(range(1, 11))
    assert run.segments() == set()

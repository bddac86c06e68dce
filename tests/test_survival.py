"""At alpha 0 nothing that dies changes a bit: neither an engine in mid-answer nor the whole run at any message."""

import os
import signal
import subprocess
import sys

import pytest
import torch

from flashflow.config import load_config
from tests.reference_loop import reference_loop
from tests.ring import children, environment, final_weights, make_ring, metrics
from tests.test_processes import Run

POINTS = ("1", "60", "222", "400", "455", "520", "700", "890")
"""Of some 900 messages."""


@pytest.mark.slow
def test_a_run_killed_at_any_message_and_resumed_equals_an_undisturbed_one(tmp_path):
    command = [sys.executable, "-m", "tests.killed_ring", str(tmp_path), *POINTS]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=240, env=environment(), check=False)
    assert ended.stdout.splitlines() == [f"{point} equal" for point in POINTS], ended.stderr


@pytest.mark.slow
def test_an_engine_killed_in_mid_answer_changes_no_bit(tmp_path):
    overrides = {
        "placement.engine": 2,
        "engine.stream_every_s": 0.01,
        "engine.slots": 8,
        "sampling.max_new_tokens": 64,
        "network.peer_deadline_s": 3,
    }
    path = make_ring(tmp_path, overrides=overrides)
    history, weights = reference_loop(load_config(make_ring(tmp_path / "reference", overrides=overrides)))
    run = Run(path)
    earlier = ""
    for step, engine in ((1, "engine-0"), (2, "engine-1")):
        earlier += run.until_step(step)
        os.kill(children(run.process.pid)[engine], signal.SIGKILL)
    code, output, _ = run.end()
    assert code == 0, output
    assert all(f"{engine} was killed by SIGKILL" in earlier + output for engine in ("engine-0", "engine-1"))
    assert [line["loss"] for line in metrics(path)] == [step["loss"] for step in history]
    final = final_weights(path)
    assert all(torch.equal(final[name], tensor) for name, tensor in weights.items())

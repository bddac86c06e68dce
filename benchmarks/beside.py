"""An engine and a trainer, each a process, on the same two cores: how much does each take from the other?

    python -m benchmarks.beside engine|trainer --seconds 8

is one of the processes: it says `ready`, waits for a line, works for the time given and prints tokens per second.
`measure` starts them.
"""

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import torch

from benchmarks.generation import PROMPT_TOKENS, EngineContestant, make_model, make_requests
from benchmarks.record import ROOT

SIZE = "8.9M"
ROWS, NEW_TOKENS = 32, 96


class Layout(NamedTuple):
    """How the processes share the cores."""

    name: str
    roles: tuple[str, ...]
    threads: int
    pinned: bool


LAYOUTS = (
    Layout("engine alone, 1 pinned thread", ("engine",), 1, True),
    Layout("trainer alone, 1 pinned thread", ("trainer",), 1, True),
    Layout("both, 1 pinned thread each", ("engine", "trainer"), 1, True),
    Layout("engine alone, 2 threads", ("engine",), 2, False),
    Layout("both, 2 threads each", ("engine", "trainer"), 2, False),
)


def measure(layout: Layout, cores: tuple[int, int], seconds: float) -> dict[str, float]:
    """Tokens per second by role."""
    processes = {
        role: _start(role, layout, [core] if layout.pinned else list(cores), seconds)
        for role, core in zip(("engine", "trainer"), cores, strict=True)
        if role in layout.roles
    }
    for process in processes.values():
        assert process.stdout is not None
        if process.stdout.readline() != "ready\n":
            raise RuntimeError(f"{process.args} ended before it was ready")
    for process in processes.values():
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
    return {role: float(process.communicate()[0]) for role, process in processes.items()}


def _start(role: str, layout: Layout, cores: list[int], seconds: float) -> "subprocess.Popen[str]":
    command = [
        sys.executable, "-m", "benchmarks.beside", role, "--seconds", str(seconds), "--threads", str(layout.threads),
        "--cores", *map(str, cores),
    ]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": str(layout.threads)}
    return subprocess.Popen(
        command, cwd=ROOT, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def decode(seconds: float) -> float:
    """Tokens per second of an engine that is never short of requests."""
    contestant = EngineContestant(make_model(SIZE, Path()), ROWS, PROMPT_TOKENS + NEW_TOKENS)
    requests = make_requests([NEW_TOKENS] * ROWS, 4096)
    contestant.seconds(requests[:8])
    _wait_for_the_start()
    started, tokens = time.perf_counter(), 0
    while time.perf_counter() - started < seconds:
        contestant.seconds(requests)
        tokens += ROWS * NEW_TOKENS
    return tokens / (time.perf_counter() - started)


def train(seconds: float) -> float:
    """Tokens per second of plain training steps on sequences of the engine's length."""
    model = make_model(SIZE, Path()).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)
    rows = torch.tensor([request.prompt for request in make_requests([0] * ROWS, 4096)]).repeat(1, 4)

    def step() -> None:
        model(input_ids=rows, labels=rows, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    _wait_for_the_start()
    started, tokens = time.perf_counter(), 0
    while time.perf_counter() - started < seconds:
        step()
        tokens += rows.numel()
    return tokens / (time.perf_counter() - started)


def _wait_for_the_start() -> None:
    print("ready", flush=True)
    sys.stdin.readline()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("role", choices=["engine", "trainer"])
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--cores", type=int, nargs="+", required=True)
    arguments = parser.parse_args()
    os.sched_setaffinity(0, arguments.cores)
    torch.set_num_threads(arguments.threads)
    print({"engine": decode, "trainer": train}[arguments.role](arguments.seconds))


if __name__ == "__main__":
    main()

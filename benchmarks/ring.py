"""What the ring itself costs: a null engine and a null trainer, trajectories of 2,560 tokens, every process real.

    python -m benchmarks.ring --seconds 20

Prints trajectories per second and CPU microseconds per trajectory by process, over a window in which the ring runs
steadily, and appends them as one JSON object, with command, commit and machine, to results/ring.jsonl.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from rich.table import Table

from benchmarks.record import ROOT, commit, cpu_seconds, family, machine
from flashflow.observe.metrics import read_metrics
from flashflow.topology import FLEET, GANG

RESULTS = Path(__file__).resolve().parent / "results" / "ring.jsonl"
PROMPT_TOKENS, ANSWER_TOKENS = 256, 2304
WARM_STEPS = 5
POLL_S = 0.02
DEADLINE_S = 120.0


def ring_config(folder: Path, *, groups: int, alpha: float, concurrency: int, env: int) -> dict[str, Any]:
    length = PROMPT_TOKENS + ANSWER_TOKENS
    return {
        "run": {"name": "ring", "folder": str(folder), "steps": 1_000_000},
        "data": {"source": {"kind": "simulated", "prompt_tokens": {"kind": "fixed", "value": PROMPT_TOKENS}}},
        "reward": {"function": "flashflow.simulate.reward:simulated"},
        "sampling": {"max_new_tokens": ANSWER_TOKENS},
        "rollout": {"group_size": 8, "alpha": alpha, "concurrency": concurrency},
        "batch": {"groups": groups},
        "engine": {
            "kind": "simulated",
            "slots": concurrency * env,
            "max_context_tokens": length,
            "answer_tokens": {"kind": "fixed", "value": ANSWER_TOKENS},
        },
        "trainer": {"kind": "simulated"},
        "placement": {"env": env},
        "checkpoint": {"every_steps": 20},
    }


@contextmanager
def under_way(config: dict[str, Any]) -> Iterator["subprocess.Popen[bytes]"]:
    """The run, killed in order at the end."""
    folder = Path(config["run"]["folder"])
    path = folder / "ring.yaml"
    path.write_text(yaml.safe_dump(config))
    command = [sys.executable, "-m", "flashflow", "train", str(path)]
    with (folder / "output").open("wb") as output:
        run = subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=output)
        try:
            yield run
        finally:
            run.terminate()
            run.wait()


def measure(config: dict[str, Any], seconds: float) -> dict[str, Any]:
    """Raises RuntimeError when the ring does not get under way."""
    metrics = Path(config["run"]["folder"]) / "ring" / "metrics.jsonl"
    with under_way(config) as run:
        first = _next_step(run, metrics, WARM_STEPS)
        began, cpu_before = time.monotonic(), cpu_by_role(run.pid)
        time.sleep(seconds)
        last = _next_step(run, metrics, first + 1)
        took, cpu_after = time.monotonic() - began, cpu_by_role(run.pid)
    trajectories = sum(line["samples"] for line in read_metrics(metrics) if first < line["step"] <= last)
    spent = {name: cpu_after[name] - cpu_before[name] for name in cpu_after if name in cpu_before}
    return {
        "per_second": round(trajectories / took, 1),
        "trajectories": trajectories,
        "seconds": round(took, 2),
        "cpu_us": {name: round(1e6 * cpu_s / trajectories) for name, cpu_s in spent.items()},
        "cores_used": round(sum(spent.values()) / took, 2),
    }


def _next_step(run: "subprocess.Popen[bytes]", metrics: Path, at_least: int) -> int:
    """The moment at which a step from `at_least` on has just been done; returns the step."""
    until = time.monotonic() + DEADLINE_S
    seen: int | None = None
    while time.monotonic() < until and run.poll() is None:
        step = metrics.read_bytes().count(b"\n") if metrics.exists() else 0
        if seen is not None and step > seen and step >= at_least:
            return step
        seen = step
        time.sleep(POLL_S)
    raise RuntimeError(f"no step {at_least} after {DEADLINE_S:.0f} s; the run says {run.poll()}")


def cpu_by_role(supervisor: int) -> dict[str, float]:
    """CPU seconds so far; reward workers count as their role."""
    first, *others = family(supervisor)
    spent = {"supervisor": cpu_seconds(first)}
    for process in others:
        role = process.name().rpartition("-")[0]
        if role in FLEET + GANG:
            spent[role] = spent.get(role, 0.0) + cpu_seconds(process)
    return spent


def show(result: dict[str, Any]) -> None:
    table = Table("process", "CPU us per trajectory", title=f"{result['per_second']:.0f} trajectories per second")
    for name, cpu_us in sorted(result["cpu_us"].items(), key=lambda item: -item[1]):
        table.add_row(name, str(cpu_us))
    table.add_row("all", str(sum(result["cpu_us"].values())), style="bold")
    Console().print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--groups", type=int, default=32, help="batch.groups, of 8")
    parser.add_argument("--alpha", type=float, default=4.0)
    parser.add_argument("--concurrency", type=int, default=256, help="rollout.concurrency")
    parser.add_argument("--env", type=int, default=1, help="placement.env")
    parser.add_argument("--output", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    shape = {name: getattr(arguments, name) for name in ("groups", "alpha", "concurrency", "env")}
    with tempfile.TemporaryDirectory() as folder:
        measured = measure(ring_config(Path(folder), **shape), arguments.seconds)
    result = {
        "command": f"python -m benchmarks.ring --seconds {arguments.seconds:g}",
        "commit": commit(),
        "machine": machine(),
        "tokens": PROMPT_TOKENS + ANSWER_TOKENS,
        **shape,
        "load": os.getloadavg()[0],
        **measured,
    }
    with arguments.output.open("a") as output:
        output.write(json.dumps(result) + "\n")
    show(result)


if __name__ == "__main__":
    main()

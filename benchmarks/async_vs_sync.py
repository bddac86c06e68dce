"""Asynchronous against synchronous, in real processes on this machine's clock: configs/async_vs_sync.yaml.

    python -m benchmarks.async_vs_sync

Three runs of one program: `sync_naive`; `async` at alpha 2; and the same without training, whose step time is
T_generate. Exits with 1 unless async trains at least twice the samples per second of sync_naive, and its step time is
within 10 % of max(T_generate, T_train). Appends to results/async_vs_sync.jsonl.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.record import ROOT, commit, machine
from flashflow.observe.metrics import read_metrics

CONFIG = "configs/async_vs_sync.yaml"
RESULTS = Path(__file__).resolve().parent / "results" / "async_vs_sync.jsonl"
RUNS = {
    "sync_naive": ["rollout.schedule=sync_naive", "rollout.alpha=0", "run.steps=12"],
    "async": [],
    "generate": ["trainer.fixed_s=0"],
}
WARMUP_STEPS = 4
"""Until batches are as old as they get."""
SPEEDUP, SLACK = 2.0, 1.1


def run(name: str, folder: Path) -> dict[str, float]:
    """Mean over the steps after the warm-up."""
    places = [f"run.name={name}", f"run.folder={folder}", *RUNS[name]]
    subprocess.run([sys.executable, "-m", "flashflow", "train", CONFIG, *places], cwd=ROOT, check=True)
    steps = read_metrics(folder / name / "metrics.jsonl")[WARMUP_STEPS:]
    seconds = sum(step["time_step_s"] for step in steps)
    return {
        "step_s": seconds / len(steps),
        "train_s": sum(step["time_train_s"] for step in steps) / len(steps),
        "samples_per_s": sum(step["samples"] for step in steps) / seconds,
        "staleness_max": max(step["staleness_max"] for step in steps),
    }


def measure() -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        runs = {name: run(name, Path(folder)) for name in RUNS}
    bound = max(runs["generate"]["step_s"], runs["async"]["train_s"])
    return {
        "command": "python -m benchmarks.async_vs_sync",
        "commit": commit(),
        "machine": machine(),
        "runs": runs,
        "speedup": runs["async"]["samples_per_s"] / runs["sync_naive"]["samples_per_s"],
        "step_over_bound": runs["async"]["step_s"] / bound,
    }


def main() -> int:
    record = measure()
    table = Table("run", "step s", "train s", "samples/s", "staleness")
    for name, found in record["runs"].items():
        table.add_row(name, *(f"{found[key]:.2f}" for key in ("step_s", "train_s", "samples_per_s", "staleness_max")))
    console = Console()
    console.print(table)
    console.print(f"async over sync_naive: {record['speedup']:.2f}x (at least {SPEEDUP:g})")
    console.print(f"step time over max(T_generate, T_train): {record['step_over_bound']:.3f} (at most {SLACK:g})")
    with RESULTS.open("a", encoding="utf-8") as results:
        results.write(json.dumps(record) + "\n")
    return 0 if record["speedup"] >= SPEEDUP and record["step_over_bound"] <= SLACK else 1


if __name__ == "__main__":
    sys.exit(main())

"""The quickstart over several seeds, warm start included: does it learn, how fast, and is it really asynchronous?

    python -m benchmarks.quickstart --seeds 0 1 2

Prints one table and appends one JSON object per seed, with command, commit and machine, to results/quickstart.jsonl.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.record import ROOT, commit, machine
from flashflow.observe.metrics import read_metrics

RESULTS = Path(__file__).resolve().parent / "results" / "quickstart.jsonl"


def run(seed: int, folder: Path) -> dict[str, Any]:
    """One quickstart from nothing, its model included."""
    arguments = ["train", "configs/quickstart.yaml", f"run.seed={seed}"]
    places = [f"run.folder={folder / 'runs'}", f"model.cache={folder / 'cache'}"]
    started = time.monotonic()
    ended = subprocess.run([sys.executable, "-m", "flashflow", *arguments, *places], cwd=ROOT, check=False)
    seconds = time.monotonic() - started
    steps = read_metrics(folder / "runs" / "quickstart" / "metrics.jsonl")
    evaluations = read_metrics(folder / "runs" / "quickstart" / "evaluations.jsonl")
    return {
        "command": " ".join(["flashflow", *arguments]),
        "commit": commit(),
        "machine": machine(),
        "seed": seed,
        "exit_code": ended.returncode,
        "seconds": round(seconds, 1),
        "steps": steps[-1]["step"],
        "accuracy": {str(evaluation["version"]): round(evaluation["accuracy"], 4) for evaluation in evaluations},
        "problems": evaluations[0]["num_problems"],
        "staleness_max": max(step["staleness_max"] for step in steps),
        "stale_steps": sum(step["staleness_max"] >= 1 for step in steps),
        "median_step_s": round(sorted(step["time_step_s"] for step in steps)[len(steps) // 2], 3),
    }


def show(results: list[dict[str, Any]]) -> None:
    table = Table("seed", "before", "after", "seconds", "median step", "staleness max", "steps with it")
    for result in results:
        accuracies = list(result["accuracy"].values())
        table.add_row(
            str(result["seed"]),
            f"{accuracies[0]:.3f}",
            f"{accuracies[-1]:.3f}",
            f"{result['seconds']:.0f}",
            f"{result['median_step_s']:.2f} s",
            str(result["staleness_max"]),
            f"{result['stale_steps']} of {result['steps']}",
        )
    Console().print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--output", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    results = []
    for seed in arguments.seeds:
        with tempfile.TemporaryDirectory() as folder:
            results.append(run(seed, Path(folder)))
        with arguments.output.open("a") as output:
            output.write(json.dumps(results[-1]) + "\n")
    show(results)


if __name__ == "__main__":
    main()

"""From `flashflow train` to the first generated token, by process: the quickstart, its model made and the disk warm.

    python -m benchmarks.startup --repeat 5

Prints the medians as one table and appends them as one JSON object, with command, commit and machine, to
results/startup.jsonl. The first run, which warms the disk, is not counted.
"""

import argparse
import json
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any, get_args

from rich.console import Console
from rich.table import Table

from benchmarks.record import ROOT, commit, machine
from flashflow.launch.startup import Milestone, startup_path

RESULTS = Path(__file__).resolve().parent / "results" / "startup.jsonl"
CONFIG = "configs/quickstart.yaml"
MILESTONES = get_args(Milestone)
POLL_S = 0.05
DEADLINE_S = 300.0

Milestones = dict[str, dict[str, float]]
"""Seconds since the command's start, by process and milestone."""


def start_once(cache: Path) -> Milestones:
    """One run, ended at its first token. Raises RuntimeError when it ends before."""
    with tempfile.TemporaryDirectory() as runs:
        places = [f"run.folder={runs}", f"model.cache={cache}"]
        command = [sys.executable, "-m", "flashflow", "train", CONFIG, *places]
        with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as run:
            try:
                return _until_first_token(run, startup_path(Path(runs) / "quickstart"))
            finally:
                run.send_signal(signal.SIGTERM)


def _until_first_token(run: "subprocess.Popen[bytes]", path: Path) -> Milestones:
    until = time.monotonic() + DEADLINE_S
    while time.monotonic() < until and run.poll() is None:
        milestones: Milestones = read_milestones(path)
        if "first_token" in milestones.get("engine-0", {}):
            return milestones
        time.sleep(POLL_S)
    raise RuntimeError(f"no token after {DEADLINE_S:.0f} s, or the run ended with {run.poll()}; see {CONFIG}")


def read_milestones(path: Path) -> Milestones:
    """{} while the file is being written."""
    try:
        milestones: Milestones = json.loads(path.read_text())
    except (FileNotFoundError, json.JSONDecodeError):
        return {}
    return milestones


def medians(runs: list[Milestones]) -> Milestones:
    return {
        process: {
            name: round(median(run[process][name] for run in runs if name in run[process]), 2) for name in reached
        }
        for process, reached in runs[-1].items()
    }


def show(milestones: Milestones) -> None:
    table = Table("process", *(name.replace("_", " ") for name in MILESTONES), title="seconds since the command")
    for process, reached in milestones.items():
        table.add_row(process, *(f"{reached[name]:.2f}" if name in reached else "" for name in MILESTONES))
    Console(width=120).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--cache", type=Path, default=ROOT / ".cache" / "flashflow", help="model.cache")
    parser.add_argument("--output", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    start_once(arguments.cache)
    runs = [start_once(arguments.cache) for _ in range(arguments.repeat)]
    result: dict[str, Any] = {
        "command": f"flashflow train {CONFIG}",
        "commit": commit(),
        "machine": machine(),
        "runs": len(runs),
        "first_token_s": [run["engine-0"]["first_token"] for run in runs],
        "median_s": medians(runs),
    }
    with arguments.output.open("a") as output:
        output.write(json.dumps(result) + "\n")
    show(result["median_s"])


if __name__ == "__main__":
    main()

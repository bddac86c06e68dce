"""Under real torchrun: seconds from the command to the first generated token, and from a failure to the next step.

    python -m benchmarks.launch --repeat 3

The quickstart with one slot, alpha 1, a checkpoint every second step, its model made. Killed with SIGKILL are an env, a
trainer rank (the gang starts again) and the slot (torchrun starts it again). Prints the medians and appends them, with
command, commit and machine, to results/launch.jsonl. The first run, which warms the disk, is not counted.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median

import psutil

from benchmarks.record import ROOT, commit, machine
from flashflow.launch.startup import startup_path
from flashflow.observe.metrics import read_metrics

RESULTS = Path(__file__).resolve().parent / "results" / "launch.jsonl"
CONFIG = "configs/quickstart.yaml"
VICTIMS = ("env-0", "trainer-0", "slot")
POLL_S = 0.02
DEADLINE_S = 300.0


def measure(cache: Path) -> dict[str, float]:
    """One run with three failures: seconds by name."""
    with tempfile.TemporaryDirectory() as runs:
        options = [f"run.folder={runs}", f"model.cache={cache}", "checkpoint.every_steps=2", "evaluation.every_steps=0"]
        torchrun = [str(Path(sys.executable).with_name("torchrun")), "--standalone", "--max-restarts=3"]
        command = [*torchrun, "--monitor-interval=0.1", "launch/main.py", "--config", CONFIG, *options]
        folder = Path(runs) / "quickstart"
        began = time.time()
        with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as run:
            try:
                _until(run, lambda: "first_token" in _milestones(folder).get("engine-0", {}))
                seconds = {"torchrun to first token": time.time() - began}
                _until(run, partial(_beyond, folder, 4))
                for victim in VICTIMS:
                    os.kill(_find(run.pid, victim), signal.SIGKILL)
                    killed, step = time.time(), _step(folder)
                    # The step under way may still end; the one after it needs what was killed.
                    _until(run, partial(_beyond, folder, step + 1))
                    seconds[f"{victim} killed to the second step after"] = time.time() - killed
                    _until(run, partial(_beyond, folder, step + 5))
                return seconds
            finally:
                run.send_signal(signal.SIGTERM)


def _until(run: "subprocess.Popen[bytes]", true: Callable[[], bool]) -> None:
    ends = time.monotonic() + DEADLINE_S
    while not true():
        if run.poll() is not None or time.monotonic() > ends:
            raise RuntimeError(f"waited {DEADLINE_S:.0f} s, or the run ended with {run.poll()}; see {CONFIG}")
        time.sleep(POLL_S)


def _milestones(folder: Path) -> dict[str, dict[str, float]]:
    try:
        found: dict[str, dict[str, float]] = json.loads(startup_path(folder).read_text())
    except (OSError, ValueError):
        return {}
    return found


def _step(folder: Path) -> int:
    lines = read_metrics(folder / "metrics.jsonl")
    return int(lines[-1]["step"]) if lines else 0


def _beyond(folder: Path, step: int) -> bool:
    return _step(folder) > step


def _find(torchrun: int, victim: str) -> int:
    """Pid of a role, or of the slot."""
    for process in psutil.Process(torchrun).children(recursive=True):
        line = process.cmdline()
        if victim == "slot" and "launch/main.py" in line:
            return process.pid
        if "flashflow.launch.role" in line:
            spec = json.loads(line[-1])
            if f"{spec['role']}-{spec['index']}" == victim:
                return process.pid
    raise RuntimeError(f"{victim} does not run")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--repeat", type=int, default=3)
    options = parser.parse_args()
    cache = ROOT / ".cache" / "flashflow"
    runs = [measure(cache) for _ in range(options.repeat + 1)][1:]
    medians = {name: round(median(run[name] for run in runs), 2) for name in runs[0]}
    for name, seconds in medians.items():
        print(f"{seconds:8.2f} s  {name}")
    record = {
        "command": f"python -m benchmarks.launch --repeat {options.repeat}",
        "commit": commit(),
        "machine": machine(),
        "medians_s": medians,
        "runs_s": [{name: round(value, 2) for name, value in run.items()} for run in runs],
    }
    with RESULTS.open("a", encoding="utf-8") as results:
        results.write(json.dumps(record) + "\n")


if __name__ == "__main__":
    main()

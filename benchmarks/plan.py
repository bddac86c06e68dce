"""Does the planner tell the future? Fitted on a real synchronous run, it predicts the step times of other settings.

    python -m benchmarks.plan

Runs configs/async_vs_sync.yaml with a slot for every attempt, in real processes: at alpha 0, whose trace is all the
planner sees, at alpha 2, and at alpha 1 with another concurrency. Exits with 1 when a prediction is off by more than a
fifth. Appends to results/plan.jsonl.
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
from flashflow.config import load_config
from flashflow.observe.metrics import read_metrics
from flashflow.simulate.planner import Candidate, calibrate, measured

CONFIG = "configs/async_vs_sync.yaml"
RESULTS = Path(__file__).resolve().parent / "results" / "plan.jsonl"
COMMON = ["engine.slots=64", "run.steps=14", "checkpoint.every_steps=0"]
SEEN = {"alpha": 0, "concurrency": 64}
NEW = {"alpha 2": {"alpha": 2, "concurrency": 192}, "concurrency 24": {"alpha": 1, "concurrency": 24}}
WARMUP_STEPS = 3
TOLERANCE = 0.2


def real_step_s(name: str, folder: Path, setting: dict[str, int]) -> float:
    overrides = [f"rollout.{key}={value}" for key, value in setting.items()]
    places = [f"run.name={name.replace(' ', '-')}", f"run.folder={folder}", *COMMON, *overrides]
    subprocess.run([sys.executable, "-m", "flashflow", "train", CONFIG, *places], cwd=ROOT, check=True)
    steps = read_metrics(folder / name.replace(" ", "-") / "metrics.jsonl")[WARMUP_STEPS:]
    return sum(step["time_step_s"] for step in steps) / len(steps)


def measure() -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        seen = real_step_s("seen", folder, SEEN)
        config = load_config(ROOT / CONFIG, COMMON)
        found = calibrate(folder / "seen", config)
        rows = {}
        for name, setting in NEW.items():
            wanted = Candidate(1, 1, setting["alpha"], setting["concurrency"], 0.0, 0.0)
            rows[name] = {
                "predicted_s": measured(config, found, wanted).step_s,
                "real_s": real_step_s(name, folder, setting),
            }
    return {
        "command": "python -m benchmarks.plan",
        "commit": commit(),
        "machine": machine(),
        "seen_step_s": seen,
        "rows": rows,
    }


def main() -> int:
    record = measure()
    table = Table("setting", "predicted s", "real s", "off", title=f"seen: alpha 0, {record['seen_step_s']:.2f} s")
    right = True
    for name, row in record["rows"].items():
        off = row["predicted_s"] / row["real_s"] - 1
        right &= abs(off) <= TOLERANCE
        table.add_row(name, f"{row['predicted_s']:.2f}", f"{row['real_s']:.2f}", f"{off:+.0%}")
    Console().print(table)
    with RESULTS.open("a", encoding="utf-8") as results:
        results.write(json.dumps(record) + "\n")
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())

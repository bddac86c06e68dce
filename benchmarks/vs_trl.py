"""flashflow against TRL's GRPOTrainer: same model, sums, reward, batch, optimizer and cores, one after the other.

    python -m benchmarks.vs_trl --sizes 0.13M 8.9M --rounds 2          (needs trl: pip install trl==1.16.0)

Counted from the start of the command, start-up included: seconds until the greedy accuracy on held-out sums has reached
a mark. Weights are set aside every few steps and examined afterwards, so that no one's clock holds an evaluation.
Samples per second leave out the first steps. Every way runs once per round, in turn; the table gives medians. Appends
one JSON object per run, with command, commit and machine, to results/vs_trl.jsonl.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table
from safetensors.torch import load_file

from benchmarks.record import ROOT, commit, machine
from benchmarks.sums import MAX_NEW_TOKENS, SIZES, Examiner, model_folder, training_rows
from flashflow.observe.metrics import read_metrics
from flashflow.trainers.weights import read_weights

RESULTS = Path(__file__).resolve().parent / "results" / "vs_trl.jsonl"
GROUP_SIZE = 8
UNCOUNTED_STEPS = 3
"""First steps left out of the samples per second: compilers, caches and queues fill."""
DEADLINE_S = 1800


class Setting(NamedTuple):
    """Of one size of model."""

    groups: int
    steps: int
    snapshot_steps: int
    lr: float
    mark: float
    """Held-out accuracy to be reached."""
    problems: int


SETTINGS = {
    "0.13M": Setting(groups=32, steps=40, snapshot_steps=2, lr=3e-4, mark=0.85, problems=512),
    "8.9M": Setting(groups=8, steps=30, snapshot_steps=2, lr=1e-4, mark=0.85, problems=256),
}


class Way(NamedTuple):
    """Of training."""

    name: str
    threads: int
    alpha: float | None = None
    """None: TRL."""


WAYS = (
    Way("TRL, 1 thread", 1),
    Way("TRL, 2 threads", 2),
    Way("flashflow, synchronous", 1, 0),
    Way("flashflow, synchronous, 2 threads each", 2, 0),
    Way("flashflow, asynchronous", 1, 1),
)


class Trace(NamedTuple):
    """What a run left: seconds from the start of its command."""

    step_s: dict[int, float]
    snapshots: list[tuple[int, float, Path]]


def run_trl(way: Way, setting: Setting, model: Path, folder: Path, seed: int) -> Trace:
    rows = folder / "rows.jsonl"
    # As many as it can use: preparing the other thousands would be charged to its start.
    needed = training_rows(model)[: setting.steps * setting.groups]
    rows.write_text("".join(json.dumps(row) + "\n" for row in needed))
    (folder / "snapshots").mkdir()
    plan = setting._asdict() | {
        "samples": setting.groups * GROUP_SIZE, "group_size": GROUP_SIZE, "max_new_tokens": MAX_NEW_TOKENS,
        "model": str(model), "rows": str(rows), "folder": str(folder), "seed": seed, "threads": way.threads,
    }  # fmt: skip
    (folder / "plan.json").write_text(json.dumps(plan))
    started = time.time()
    execute(["-m", "benchmarks.trl_grpo", str(folder / "plan.json")], way, folder)
    stamps = {line["step"]: line["time"] - started for line in read_metrics(folder / "steps.jsonl")}
    files = {int(path.stem): path for path in (folder / "snapshots").iterdir()}
    return Trace(stamps, [(step, stamps[step], files[step]) for step in sorted(files)])


def run_flashflow(way: Way, setting: Setting, model: Path, folder: Path, seed: int) -> Trace:
    started = time.time()
    arguments = [
        "-m", "flashflow", "train", "configs/quickstart.yaml", f"run.folder={folder}", f"run.seed={seed}",
        f"model.path={model}", f"run.steps={setting.steps}", f"rollout.alpha={way.alpha}",
        f"rollout.group_size={GROUP_SIZE}", f"batch.groups={setting.groups}", "evaluation.every_steps=0",
        f"checkpoint.every_steps={setting.snapshot_steps}", "checkpoint.keep=1000", f"optimizer.lr={setting.lr}",
        "optimizer.warmup_steps=0", f"placement.threads={way.threads}",
    ]  # fmt: skip
    execute(arguments, way, folder)
    run = folder / "quickstart"
    saved = {
        int(path.name.removeprefix("step-")): (path.stat().st_mtime - started, path)
        for path in (run / "checkpoints").iterdir()
    }
    steps = read_metrics(run / "metrics.jsonl")
    # The last step's checkpoint is complete when the run ends; the steps before it are counted back from there.
    elapsed, step_s = saved[steps[-1]["step"]][0], {}
    for line in reversed(steps):
        step_s[line["step"]] = elapsed
        elapsed -= line["time_step_s"]
    return Trace(step_s, [(step, *saved[step]) for step in sorted(saved)])


def execute(arguments: list[str], way: Way, folder: Path) -> None:
    """Raises CalledProcessError, after showing the output, when it fails."""
    environment = {**os.environ, "OMP_NUM_THREADS": str(way.threads), "TOKENIZERS_PARALLELISM": "false"}
    with (folder / "output.log").open("w") as log:
        ended = subprocess.run(
            [sys.executable, *arguments], cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT,
            timeout=DEADLINE_S, check=False,
        )  # fmt: skip
    if ended.returncode != 0:
        print((folder / "output.log").read_text()[-4000:], file=sys.stderr)
        ended.check_returncode()


def measure(size: str, way: Way, model: Path, examiner: Examiner, round_: int) -> dict[str, Any]:
    setting = SETTINGS[size]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        play = run_trl if way.alpha is None else run_flashflow
        trace = play(way, setting, model, folder, round_)
        accuracies = [
            (step, seconds, examiner.accuracy(load_file(path) if path.is_file() else read_weights(path)))
            for step, seconds, path in trace.snapshots
        ]
    first, last = UNCOUNTED_STEPS, max(trace.step_s)
    samples = (last - first) * setting.groups * GROUP_SIZE
    reached = next((seconds for _, seconds, accuracy in accuracies if accuracy >= setting.mark), None)
    return {
        "command": f"python -m benchmarks.vs_trl --sizes {size}",
        "commit": commit(),
        "machine": machine(),
        "versions": {name: metadata.version(name) for name in ("trl", "transformers", "torch", "flashflow")},
        "size": size,
        "way": way.name,
        "threads": way.threads,
        "alpha": way.alpha,
        "round": round_,
        "setting": setting._asdict(),
        "samples_per_s": round(samples / (trace.step_s[last] - trace.step_s[first]), 2),
        "first_step_s": round(trace.step_s[1], 1),
        "seconds_to_mark": None if reached is None else round(reached, 1),
        "seconds": round(trace.step_s[last], 1),
        "accuracy": [[step, round(seconds, 1), round(accuracy, 4)] for step, seconds, accuracy in accuracies],
    }


def show(results: list[dict[str, Any]]) -> None:
    table = Table("model", "way", "samples/s", "first step", "seconds to mark", "mark", "accuracy at the end")
    for size, way in dict.fromkeys((result["size"], result["way"]) for result in results):
        ours = [result for result in results if (result["size"], result["way"]) == (size, way)]
        marks = [result["seconds_to_mark"] for result in ours]
        table.add_row(
            size,
            way,
            f"{statistics.median(result['samples_per_s'] for result in ours):.1f}",
            f"{statistics.median(result['first_step_s'] for result in ours):.0f} s",
            "not reached" if None in marks else f"{statistics.median(marks):.0f}",
            f"{ours[0]['setting']['mark']:.2f}",
            f"{statistics.median(result['accuracy'][-1][2] for result in ours):.3f}",
        )
    Console().print(table)


def runs(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    for size in arguments.sizes:
        model = model_folder(size, arguments.cache)
        examiner = Examiner(model, SETTINGS[size].problems)
        for round_ in range(arguments.rounds):
            for way in WAYS:
                yield measure(size, way, model, examiner, round_)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", choices=list(SIZES), default=list(SIZES))
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--cache", type=Path, default=ROOT / ".cache" / "flashflow")
    parser.add_argument("--output", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    results = []
    for result in runs(arguments):
        with arguments.output.open("a") as output:
            output.write(json.dumps(result) + "\n")
        print(result["size"], result["way"], result["samples_per_s"], result["seconds_to_mark"], flush=True)
        results.append(result)
    show(results)


if __name__ == "__main__":
    main()

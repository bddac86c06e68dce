"""Final held-out accuracy of the algorithms, fresh and stale, on the quickstart: the table of docs/algorithms.md.

    python -m benchmarks.algorithms --seeds 0 1 2 --steps 100

Each run is a `flashflow train configs/quickstart.yaml` of its own, one after the other. Appends one JSON object per
run, with command, commit and machine, to results/algorithms.jsonl, and writes the table of all runs of the newest
commit, steps and machine into docs/algorithms.md. With --table it runs nothing and only writes the table.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

from benchmarks.record import ROOT, commit, machine
from flashflow.observe.metrics import read_metrics

RESULTS = Path(__file__).resolve().parent / "results" / "algorithms.jsonl"
DOCUMENT = ROOT / "docs" / "algorithms.md"
BEGIN, END = "<!-- accuracy: begin -->", "<!-- accuracy: end -->"

ALGORITHMS: dict[str, list[str]] = {
    "grpo": ["algorithm.preset=grpo"],
    "decoupled_ppo (grpo)": ["algorithm.preset=decoupled_ppo", "algorithm.estimator=grpo"],
    "tis": ["algorithm.preset=tis"],
    "topr": ["algorithm.preset=topr"],
    "cispo": ["algorithm.preset=cispo"],
    "gspo": ["algorithm.preset=gspo"],
}
ALPHAS = (0, 8)


def arguments_of(algorithm: str, alpha: int, seed: int, steps: int, problems: int) -> list[str]:
    """Of `flashflow`; evaluated before the first and after the last step."""
    return [
        "train", "configs/quickstart.yaml", f"run.steps={steps}", f"run.seed={seed}", f"rollout.alpha={alpha}",
        f"evaluation.every_steps={steps}", f"evaluation.problems={problems}", f"checkpoint.every_steps={steps}",
        f"optimizer.warmup_steps={min(5, steps - 1)}", *ALGORITHMS[algorithm],
    ]  # fmt: skip


def run(algorithm: str, alpha: int, seed: int, steps: int, problems: int, cache: Path) -> dict[str, Any]:
    """One training run in a folder of its own. Raises CalledProcessError when it fails."""
    arguments = arguments_of(algorithm, alpha, seed, steps, problems)
    with tempfile.TemporaryDirectory() as folder:
        places = [f"run.folder={folder}", f"model.cache={cache}"]
        started = time.monotonic()
        subprocess.run([sys.executable, "-m", "flashflow", *arguments, *places], cwd=ROOT, check=True)
        seconds = time.monotonic() - started
        lines = read_metrics(Path(folder) / "quickstart" / "metrics.jsonl")
    evaluations = [evaluation for line in lines for evaluation in line.get("evaluations", [])]
    return {
        "command": " ".join(["flashflow", *arguments]),
        "commit": commit(),
        "machine": machine(),
        "algorithm": algorithm,
        "alpha": alpha,
        "seed": seed,
        "steps": lines[-1]["step"],
        "problems": evaluations[-1]["num_problems"],
        "accuracy_first": evaluations[0]["accuracy"],
        "accuracy_last": evaluations[-1]["accuracy"],
        "staleness_max": max(line["staleness_max"] for line in lines),
        "staleness_mean": sum(line["staleness_mean"] for line in lines) / len(lines),
        "seconds": round(seconds, 1),
    }


def read_results(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def comparable(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Those made under the conditions of the newest: same commit, machine, steps and problems."""

    def conditions(result: dict[str, Any]) -> tuple[Any, ...]:
        # The results themselves make the tree dirty.
        return (result["commit"].removesuffix("-dirty"), result["machine"], result["steps"], result["problems"])

    return [result for result in results if conditions(result) == conditions(results[-1])]


def table(results: list[dict[str, Any]]) -> str:
    """Markdown: mean over the seeds, and the range where there are several."""
    chosen = comparable(results)
    by_cell: dict[tuple[str, int], dict[int, dict[str, Any]]] = defaultdict(dict)
    for result in chosen:
        by_cell[result["algorithm"], result["alpha"]][result["seed"]] = result
    seeds = sorted({result["seed"] for result in chosen})
    first, newest = [result["accuracy_first"] for result in chosen], chosen[-1]
    host = f"{newest['machine']['cpu']}, {newest['machine']['cores']} cores"
    lines = [
        f"Accuracy on {newest['problems']} held-out problems after {newest['steps']} steps of "
        f"`configs/quickstart.yaml` (before: {min(first):.3f} to {max(first):.3f}); seeds "
        f"{', '.join(map(str, seeds))}, mean and range; {host}; commit {newest['commit']}.",
        "",
        "| algorithm | " + " | ".join(f"alpha {alpha}" for alpha in ALPHAS) + " | mean age at alpha 8 |",
        "|---|" + "---|" * (len(ALPHAS) + 1),
    ]
    for algorithm in ALGORITHMS:
        cells = [_cell([r["accuracy_last"] for r in by_cell[algorithm, alpha].values()]) for alpha in ALPHAS]
        ages = [r["staleness_mean"] for r in by_cell[algorithm, ALPHAS[-1]].values()]
        age = f"{sum(ages) / len(ages):.1f}" if ages else ""
        lines.append(f"| {algorithm} | {' | '.join(cells)} | {age} |")
    return "\n".join(lines)


def _cell(accuracies: list[float]) -> str:
    if not accuracies:
        return ""
    mean = f"{sum(accuracies) / len(accuracies):.3f}"
    return mean if len(accuracies) == 1 else f"{mean} ({min(accuracies):.3f} to {max(accuracies):.3f})"


def write_table(document: Path, results: list[dict[str, Any]]) -> None:
    """Between the two markers; the rest stays."""
    text = document.read_text()
    before, after = text[: text.index(BEGIN) + len(BEGIN)], text[text.index(END) :]
    document.write_text(f"{before}\n{table(results)}\n{after}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--algorithms", nargs="+", default=list(ALGORITHMS), choices=list(ALGORITHMS))
    parser.add_argument("--alphas", type=int, nargs="+", default=list(ALPHAS), choices=ALPHAS)
    parser.add_argument("--problems", type=int, default=512)
    parser.add_argument("--cache", type=Path, default=Path(".cache/flashflow"), help="of the builtin models")
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--document", type=Path, default=DOCUMENT)
    parser.add_argument("--table", action="store_true", help="run nothing, write the table")
    arguments = parser.parse_args()
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    for seed in [] if arguments.table else arguments.seeds:
        for algorithm in arguments.algorithms:
            for alpha in arguments.alphas:
                result = run(algorithm, alpha, seed, arguments.steps, arguments.problems, arguments.cache)
                with arguments.output.open("a") as output:
                    output.write(json.dumps(result) + "\n")
    results = read_results(arguments.output)
    write_table(arguments.document, results)
    print(table(results))


if __name__ == "__main__":
    main()

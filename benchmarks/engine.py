"""The embedded engine against `generate` of transformers, and beside a trainer.

    python -m benchmarks.engine                          everything, about six minutes
    python -m benchmarks.engine --only tailed --sizes 0.92M

One thread on one core, float32. Contestants take turns, `--repeats` times; a figure is the median of its repeats.
Prints three tables and appends one JSON object per row, with command, commit and machine, to results/engine.jsonl.
"""

import argparse
import json
import os
import shlex
import statistics
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
import transformers
from rich.console import Console
from rich.table import Table

from benchmarks import beside
from benchmarks.generation import (
    PROMPT_TOKENS,
    SMOLLM2,
    EngineContestant,
    Request,
    TransformersContestant,
    heavy_tailed,
    make_model,
    make_requests,
)
from benchmarks.record import commit, machine
from flashflow.errors import ConfigError

RESULTS = Path(__file__).resolve().parent / "results" / "engine.jsonl"

EQUAL = {"0.13M": (32, 96), "8.9M": (32, 96), SMOLLM2: (8, 48)}
"""Size -> requests at once, new tokens of each."""
TAILED = {"0.92M": 192, "8.9M": 192}
"""Size -> requests."""
SLOTS, MEDIAN, LONGEST = 32, 24, 480

DYNAMIC, STATIC, ENGINE = "generate, dynamic cache", "generate, static cache", "engine"
ORDERED = "generate, sorted by true length"


class Contestant(Protocol):
    def seconds(self, requests: list[Request]) -> float: ...


def equal_lengths(size: str, repeats: int, cache: Path) -> dict[str, Any]:
    """Tokens per second where every answer has the same length and all start at once."""
    rows, new_tokens = EQUAL[size]
    model = make_model(size, cache)
    contestants = {
        DYNAMIC: TransformersContestant(model, rows, None),
        STATIC: TransformersContestant(model, rows, "static"),
        ENGINE: EngineContestant(model, rows, PROMPT_TOKENS + new_tokens),
    }
    requests = dict.fromkeys(contestants, make_requests([new_tokens] * rows, model.config.vocab_size))
    rates = take_turns(contestants, requests, repeats)
    return {"case": "equal", "size": size, "rows": rows, "new_tokens": new_tokens, "tokens_per_s": rates}


def tailed_lengths(size: str, repeats: int, cache: Path) -> dict[str, Any]:
    """Tokens per second where few answers are twenty times as long as most."""
    model = make_model(size, cache)
    lengths = heavy_tailed(TAILED[size], MEDIAN, LONGEST)
    requests = make_requests(lengths, model.config.vocab_size)
    waiting = TransformersContestant(model, SLOTS, None)
    contestants = {DYNAMIC: waiting, ORDERED: waiting, ENGINE: EngineContestant(model, SLOTS, PROMPT_TOKENS + LONGEST)}
    ordered = sorted(requests, key=lambda request: request.new_tokens)
    rates = take_turns(contestants, {DYNAMIC: requests, ORDERED: ordered, ENGINE: requests}, repeats)
    return {"case": "tailed", "size": size, "rows": SLOTS, "lengths": lengths, "tokens_per_s": rates}


def take_turns(
    contestants: Mapping[str, Contestant], requests: Mapping[str, list[Request]], repeats: int
) -> dict[str, list[float]]:
    """Tokens per second of each repeat, so that what else the machine does falls on all alike."""
    for name, contestant in contestants.items():
        contestant.seconds([request._replace(new_tokens=4) for request in requests[name][:32]])
    rates: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(repeats):
        for name, contestant in contestants.items():
            tokens = sum(request.new_tokens for request in requests[name])
            rates[name].append(round(tokens / contestant.seconds(requests[name]), 1))
    return rates


def beside_a_trainer(cores: list[int], seconds: float) -> dict[str, Any]:
    """Tokens per second of the processes, by layout."""
    rates = {layout.name: beside.measure(layout, (cores[0], cores[1]), seconds) for layout in beside.LAYOUTS}
    return {"case": "beside", "size": beside.SIZE, "seconds": seconds, "tokens_per_s": rates}


def results(only: list[str], sizes: list[str] | None, repeats: int, cache: Path) -> Iterator[dict[str, Any]]:
    cores = sorted(os.sched_getaffinity(0))
    if "beside" in only:
        if len(cores) < 2:
            Console().print("[bold red]SKIPPED beside: it needs two cores[/]")
        else:
            yield beside_a_trainer(cores, 8.0)
    os.sched_setaffinity(0, cores[-1:])
    torch.set_num_threads(1)
    for case, measure, known in (("equal", equal_lengths, EQUAL), ("tailed", tailed_lengths, TAILED)):
        for size in known:
            if case not in only or (sizes and size not in sizes):
                continue
            try:
                yield measure(size, repeats, cache)
            except ConfigError as error:
                Console().print(f"[bold red]SKIPPED {case} {size}: {error}[/]")


def show(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        if row["case"] == "beside":
            table = Table("layout", "engine tokens/s", "trainer tokens/s", title=f"{row['size']}, two processes")
            for name, rates in row["tokens_per_s"].items():
                table.add_row(name, *(f"{rates[role]:,.0f}" if role in rates else "" for role in ("engine", "trainer")))
        else:
            baseline = max(
                statistics.median(row["tokens_per_s"][name])
                for name in (DYNAMIC, STATIC)
                if name in row["tokens_per_s"]
            )
            table = Table(
                "contestant",
                "tokens/s",
                "best",
                f"times {DYNAMIC.split(',')[0]}",
                title=f"{row['size']}, {row['case']} lengths",
            )
            for name, rates in row["tokens_per_s"].items():
                median = statistics.median(rates)
                table.add_row(name, f"{median:,.0f}", f"{max(rates):,.0f}", f"{median / baseline:.2f}")
        Console().print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--only", nargs="+", choices=["equal", "tailed", "beside"], default=["equal", "tailed", "beside"]
    )
    parser.add_argument("--sizes", nargs="+", choices=sorted({*EQUAL, *TAILED}))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--cache", type=Path, default=Path(".cache/flashflow"), help="of the builtin models")
    parser.add_argument("--output", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    made = {
        "command": shlex.join(["python", "-m", "benchmarks.engine", *sys.argv[1:]]),
        "commit": commit(),
        "machine": machine(),
        "packages": {"torch": torch.__version__, "transformers": transformers.__version__},
    }
    rows = []
    for row in results(arguments.only, arguments.sizes, arguments.repeats, arguments.cache):
        rows.append({**made, **row})
        with arguments.output.open("a") as output:
            output.write(json.dumps(rows[-1]) + "\n")
    show(rows)


if __name__ == "__main__":
    main()

"""The paper's scheduling figures (ROLL Flash, arXiv 2510.11345) beside those of our scheduler on the virtual clock.

    python -m benchmarks.paper [--only queue ...]

Answers and waits are lognormal with sigma .86, cut off at 20 times the median: the paper has the longest answer at 20
times the median, and that is where the longest of some 4,000 draws lies. One row of each figure sets the scale, or the
one number that the text leaves open; the others are predicted with nothing left free. Exits with 1 when a predicted row
is off by more than a quarter and docs/simulate.md does not list it with the reason.
"""

import argparse
import re
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from rich.console import Console
from rich.table import Table

from benchmarks.record import ROOT
from flashflow.config import load_config
from flashflow.config.simulated import NormalDistribution
from flashflow.messages import SamplingKey
from flashflow.simulate.distributions import drawer
from flashflow.simulate.run import simulate

SIGMA, CAP = 0.86, 20.0
TOLERANCE = 0.25
DOCS = ROOT / "docs" / "simulate.md"
TAIL = {"kind": "lognormal", "median": 100, "sigma": SIGMA, "cap": 100 * CAP}
"""Tokens, of which an engine samples 100 a second: the unit of time is the median."""
NO_WAIT = {"turn_deadline_s": 1e6, "trajectory_deadline_s": 1e7}
BASE: dict[str, Any] = {
    "run": {"name": "paper"},
    "data": {"source": {"kind": "simulated", "prompt_tokens": {"kind": "fixed", "value": 1}}},
    "reward": {"function": "flashflow.simulate.reward:simulated"},
    "sampling": {"max_new_tokens": 2500},
    "rollout": {"alpha": 0, "schedule": "sync_queue", **NO_WAIT},
    "engine": {
        "kind": "simulated", "max_context_tokens": 1_000_000, "answer_tokens": TAIL, "decode_tokens_per_s": 100,
    },
    "trainer": {"kind": "simulated"},
    "checkpoint": {"every_steps": 5},
    "network": {"train_step_deadline_s": 1e6},
}  # fmt: skip


class Row(NamedTuple):
    """One number of the paper and ours."""

    key: str
    text: str
    paper: float | None
    """None: the paper gives none."""
    ours: float
    fitted: bool = False
    secondary: bool = False
    """The number is not in the paper itself but reported of it."""

    @property
    def off(self) -> float | None:
        return None if self.paper is None else self.ours / self.paper - 1


class Figure(NamedTuple):
    title: str
    fit: str
    rows: list[Row]


def step_seconds(steps: int = 30, **overrides: Any) -> float:
    """Mean step time of the setting, in medians. `section__key=value` is laid over BASE."""
    values = {section: dict(fields) for section, fields in BASE.items()}
    values["run"]["steps"] = steps
    for path, value in overrides.items():
        section, key = path.split("__")
        values.setdefault(section, {})[key] = value
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.yaml"
        path.write_text(yaml.safe_dump(values))
        return simulate(load_config(path)).figures.step_s_mean


def scaled(rows: list[tuple[str, str, float | None, float, bool]]) -> list[Row]:
    """(key, text, paper, ours in medians, secondary): the first row sets the scale."""
    _, _, paper, ours, _ = rows[0]
    assert paper is not None
    scale = paper / ours
    return [
        Row(key, text, number, value * scale, fitted=place == 0, secondary=secondary)
        for place, (key, text, number, value, secondary) in enumerate(rows)
    ]


def queue_scheduling() -> Figure:
    """8 prompts, 8 answers each, as many slots as answers."""
    setting = {"batch__groups": 8, "rollout__group_size": 8, "engine__slots": 256, "rollout__concurrency": 200}
    rows = [
        ("queue-naive", "batch rollout", 125.0, step_seconds(rollout__schedule="sync_naive", **setting), False),
        ("queue-0", "queue scheduling", 58.0, step_seconds(**setting), True),
        ("queue-16", "16 redundant prompts", 37.0, step_seconds(rollout__redundant_groups=16, **setting), False),
    ]
    return Figure("queue scheduling, 8 x 8, seconds a step", "median answer", scaled(rows))


def prompt_replication() -> Figure:
    """16 answers a prompt; 16 engines of 16 slots."""

    def seconds(groups: int, replicate: bool) -> float:
        return step_seconds(
            8,
            batch__groups=groups,
            rollout__group_size=16,
            rollout__concurrency=groups * 16,
            rollout__replicate_prompts=replicate,
            placement__engine=16,
            engine__slots=16,
        )

    rows = [
        ("replicate-64-off", "64 x 16 without", 149.0, seconds(64, False), False),
        ("replicate-64-on", "64 x 16 with", 81.0, seconds(64, True), False),
        ("replicate-32-off", "32 x 16 without", 116.0, seconds(32, False), True),
        ("replicate-32-on", "32 x 16 with", 89.0, seconds(32, True), True),
    ]
    return Figure("prompt replication, seconds a step", "median answer", scaled(rows))


def environment_latency() -> Figure:
    """256 environments whose steps take N(10, 10) seconds; answers take no time beside that."""
    paper, latency = 892.0, NormalDistribution(mean=10, sigma=10)
    draw = drawer("step_s", latency, 8)

    def lockstep_turn(turn: int) -> float:
        """Without environment-level asynchrony every turn waits for the slowest environment."""
        return max(draw(SamplingKey(0, group, member, 0, turn)) for group in range(32) for member in range(8))

    times = [lockstep_turn(turn) for turn in range(200)]
    turns = min(range(1, 200), key=lambda count: abs(sum(times[:count]) - paper))
    asynchronous = step_seconds(
        8,
        batch__groups=32,
        rollout__concurrency=256,
        engine__slots=256,
        engine__decode_tokens_per_s=0,
        engine__answer_tokens={"kind": "fixed", "value": 1},
        simulate__turns={"kind": "fixed", "value": turns},
        simulate__step_s={"kind": "normal", "mean": 10, "sigma": 10},
    )
    rows = [
        Row("latency-lockstep", "in lockstep", paper, sum(times[:turns]), fitted=True),
        Row("latency-async", "each environment by itself", 362.0, asynchronous),
    ]
    return Figure("environment latency N(10, 10), seconds a step", f"number of turns: {turns}", rows)


def redundant_environments() -> Figure:
    """256 trajectories a batch; how long an environment takes is lognormal, answers take no time beside that."""
    setting: dict[str, Any] = {
        "batch__groups": 32,
        "rollout__group_size": 8,
        "rollout__concurrency": 450,
        "engine__slots": 512,
        "engine__decode_tokens_per_s": 0,
        "engine__answer_tokens": {"kind": "fixed", "value": 1},
        "simulate__step_s": {"kind": "lognormal", "median": 1, "sigma": SIGMA, "cap": CAP},
    }
    more = {"rollout__redundant_groups": 4, "rollout__redundant_members": 4}
    rows = [
        ("redundant-32x8", "32 x 8", 243.0, step_seconds(**setting), False),
        ("redundant-36x12", "36 x 12", 45.0, step_seconds(**setting, **more), False),
    ]
    return Figure("redundant environments, batch 256, seconds a step", "median of an environment", scaled(rows))


ASYNC: dict[str, Any] = {"batch__groups": 56, "placement__engine": 8, "engine__slots": 4, "rollout__concurrency": 44}
"""56 x 8 answers on 32 slots, fourteen rounds: a smaller run of the shape of 16 GPUs that infer."""


def speedup(alpha: float, train_s: float, generate_s: float) -> float:
    """Samples per second at alpha over those at alpha 0, whose step is generation plus training."""
    step_s = step_seconds(12, rollout__schedule="async", rollout__alpha=alpha, trainer__fixed_s=train_s, **ASYNC)
    return (generate_s + train_s) / step_s


def train_time(generate_s: float) -> float:
    """At which alpha 2 gives 1.64: where training is not the slower side, more of it to overlap gives more."""
    low, high = 0.0, generate_s
    for _ in range(6):
        middle = (low + high) / 2
        low, high = (middle, high) if speedup(2, middle, generate_s) < 1.64 else (low, middle)
    return high


def async_ratio(train_s: float, generate_s: float) -> Figure:
    """24 GPUs train, 16 infer."""
    factors = {alpha: speedup(alpha, train_s, generate_s) for alpha in (1, 2, 4, 8)}
    rows = [
        Row("alpha-2", "alpha 2", 1.64, factors[2], fitted=True),
        Row("alpha-1", "alpha 1", 1.28, factors[1]),
        Row("alpha-4", "alpha 4", 1.64, factors[4]),
        Row("alpha-8", "alpha 8", 1.64, factors[8]),
    ]
    fit = f"training: {train_s:.2f} medians a step, generation {generate_s:.2f}"
    return Figure("async ratio, 24 : 16 GPUs, throughput over alpha 0", fit, rows)


def scaling(train_s: float) -> Figure:
    """The same batch on 16 to 128 GPUs: synchronous on all of them in turn, or split 24 : 16 at alpha 2."""

    def factor(gpus: int) -> float:
        share = gpus / 40
        everywhere = {**ASYNC, "engine__slots": round(4 * 40 / 16 * share), "rollout__concurrency": 360}
        split = {**ASYNC, "engine__slots": round(4 * share), "rollout__concurrency": round(44 * share) + 8}
        together_s = step_seconds(8, **everywhere, trainer__fixed_s=train_s * 24 / gpus)
        apart = {"rollout__schedule": "async", "rollout__alpha": 2, "trainer__fixed_s": train_s / share}
        return together_s / step_seconds(12, **split, **apart)

    rows = [
        Row("scale-16", "16 GPUs", None, factor(16)),
        Row("scale-64", "64 GPUs", None, factor(64)),
        Row("scale-128", "128 GPUs", 2.24, factor(128)),
    ]
    return Figure("longest 20 x the median, throughput over synchronous", "nothing: training as above", rows)


def asynchrony() -> list[Figure]:
    generate_s = step_seconds(12, **ASYNC)
    train_s = train_time(generate_s)
    return [async_ratio(train_s, generate_s), scaling(train_s)]


FIGURES: dict[str, Callable[[], list[Figure]]] = {
    "queue": lambda: [queue_scheduling()],
    "replication": lambda: [prompt_replication()],
    "latency": lambda: [environment_latency()],
    "redundancy": lambda: [redundant_environments()],
    "async": asynchrony,
}


def listed(docs: Path = DOCS) -> set[str]:
    """Keys of the rows that the documents say are off, and why."""
    return set(re.findall(r"^\| `([a-z0-9-]+)` \|", docs.read_text(encoding="utf-8"), re.MULTILINE))


def verdict(row: Row, excused: set[str]) -> str:
    if row.paper is None:
        return ""
    if row.fitted:
        return "fitted"
    if row.off is not None and abs(row.off) <= TOLERANCE:
        return "predicted"
    return "off, docs/simulate.md says why" if row.key in excused else "OFF"


def show(figure: Figure, excused: set[str], console: Console) -> bool:
    """Prints the figure; False when a row is off without an excuse."""
    table = Table(
        "row", "paper", "ours", "off", "", title=f"{figure.title}; fitted: {figure.fit}", title_justify="left"
    )
    verdicts = [verdict(row, excused) for row in figure.rows]
    for row, said in zip(figure.rows, verdicts, strict=True):
        paper = "-" if row.paper is None else f"{row.paper:g}" + (" (secondary source)" if row.secondary else "")
        off = "" if row.off is None else f"{row.off:+.0%}"
        table.add_row(f"{row.text} [dim]{row.key}[/dim]", paper, f"{row.ours:.3g}", off, said)
    console.print(table)
    return "OFF" not in verdicts


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=FIGURES, default=list(FIGURES))
    chosen = parser.parse_args().only
    console, excused, right = Console(), listed(), True
    for name in chosen:
        for figure in FIGURES[name]():
            right &= show(figure, excused, console)
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())

"""What a simulation found, as figures. Pure: from the steps' records and the spans of the simulated parts."""

from collections.abc import Sequence
from statistics import mean, median
from typing import Any

import msgspec

from flashflow.config.sections import Config
from flashflow.simulate.spans import Recorder


class Figures(msgspec.Struct, frozen=True):
    """Of the steps after the warm-up."""

    steps: int
    warmup_steps: int
    """Left out: ceil(alpha) + 1, until every batch is as old as it gets, or half of the run if it is shorter."""
    seconds: float
    """Virtual time of these steps."""
    step_s_mean: float
    step_s_median: float
    wait_s_mean: float
    """The trainer waits for a batch."""
    train_s_mean: float
    samples_per_s: float
    tokens_trained_per_s: float
    tokens_generated_per_s: float
    slots_busy: float
    """Share of the engines' slots that hold a request."""
    engines_busy: float
    """Share of the time in which an engine has any request."""
    trainer_busy: float
    attempts_in_environments: float
    """Mean number."""
    wasted: float
    """Tokens sampled and never to be trained, as a share of those generated."""
    staleness_mean: float
    staleness_max: int
    length_trained_mean: float
    retries: int
    states: dict[str, int]
    """Samples in each state of the ledger at the end."""


def figures(config: Config, records: Sequence[dict[str, Any]], spans: Recorder) -> Figures:
    """Raises ValueError without a step."""
    if not records:
        raise ValueError("no step was trained: simulate for longer")
    warmup = min(config.max_staleness + 1, len(records) // 2)
    kept = records[warmup:]
    seconds = sum(record["time_step_s"] for record in kept)
    end = sum(record["time_step_s"] for record in records)
    since = end - seconds
    engines, slots = config.placement.engine, config.engine.slots
    generated = sum(record["tokens_generated"] for record in kept)
    last = records[-1]

    def rate(amount: float) -> float:
        return amount / seconds if seconds else 0.0

    return Figures(
        steps=len(kept),
        warmup_steps=warmup,
        seconds=seconds,
        step_s_mean=mean(record["time_step_s"] for record in kept),
        step_s_median=median(record["time_step_s"] for record in kept),
        wait_s_mean=mean(record["time_wait_s"] for record in kept),
        train_s_mean=mean(record["time_train_s"] for record in kept),
        samples_per_s=rate(sum(record["samples"] for record in kept)),
        tokens_trained_per_s=rate(sum(record["tokens_trained"] for record in kept)),
        tokens_generated_per_s=rate(generated),
        slots_busy=rate(spans.lane_seconds("engine", since, end)) / (engines * slots),
        engines_busy=rate(spans.busy_seconds("engine", since, end)) / engines,
        trainer_busy=rate(spans.busy_seconds("trainer", since, end)),
        attempts_in_environments=rate(spans.lane_seconds("environment", since, end)),
        wasted=sum(record["tokens_wasted"] for record in kept) / generated if generated else 0.0,
        staleness_mean=mean(record["staleness_mean"] for record in kept),
        staleness_max=int(max(record["staleness_max"] for record in records)),
        length_trained_mean=mean(record["response_length_mean"] for record in kept),
        retries=int(last["ledger_retries"]),
        states={
            name.removeprefix("ledger_"): int(value)
            for name, value in last.items()
            if name.startswith("ledger_") and name.removeprefix("ledger_") in STATES
        },
    )


STATES = ("admitted", "leased", "committed", "consumed", "filtered", "failed", "expired", "surplus")

"""`flashflow plan`: what a run's own attempts and steps say of its parts, and which split of devices suits them.

journal + metrics of a run -> Calibration -> simulated config -> simulate each candidate -> Plan
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import product
from pathlib import Path
from statistics import mean, median
from typing import Any

import msgspec
import numpy as np

from flashflow.config import Config
from flashflow.config.sections import DataSection, Schedule
from flashflow.config.simulated import (
    FixedDistribution,
    GivenDistribution,
    SimulatedData,
    SimulatedEngineSection,
    SimulatedTrainerSection,
    SimulateSection,
)
from flashflow.errors import ConfigError
from flashflow.journal.framing import read_records
from flashflow.journal.payloads import decode_trajectory
from flashflow.observe.metrics import read_metrics
from flashflow.records import Trajectory
from flashflow.simulate.run import simulate

FEWEST_ATTEMPTS = 32
"""Of which lengths and latencies can be told."""
PAYS = 1.05
"""Speed-up over the best synchronous setting from which asynchrony is worth its stale samples."""
ALPHAS = (0.0, 1.0, 2.0, 4.0)
STEPS = 16


class Calibration(msgspec.Struct, frozen=True):
    """The parts of a run, as simulated ones."""

    prompt_tokens: float
    """Mean, of all that was read and not sampled."""
    answer_tokens: list[float]
    """Sampled by each attempt; all of its turns are one here."""
    latency_s: list[float]
    """Of the same attempts: what is left of their time beside the tokens (environment, reward, waits)."""
    decode_tokens_per_s: float
    """Of one slot; 0: too fast to tell."""
    train_fixed_s: float
    train_s_per_token: float
    """Prompts included, as a simulated trainer counts them. On the run's trainer ranks together."""
    update_s: float
    train_devices: int


class Candidate(msgspec.Struct, frozen=True):
    """One setting, and how fast it is."""

    train_devices: int
    engines: int
    alpha: float
    concurrency: int
    samples_per_s: float
    step_s: float


class Plan(msgspec.Struct, frozen=True):
    today: Candidate
    """The config as it is, on as many devices as it has now."""
    best: Candidate
    best_synchronous: Candidate
    candidates: list[Candidate]

    @property
    def speedup(self) -> float:
        return self.best.samples_per_s / self.today.samples_per_s

    @property
    def asynchrony_pays(self) -> bool:
        return self.best.samples_per_s >= PAYS * self.best_synchronous.samples_per_s


def calibrate(run_folder: Path, config: Config) -> Calibration:
    """From the journal's payloads and metrics.jsonl. Raises ConfigError when they are too few."""
    attempts = [attempt for attempt in _attempts(run_folder / "journal") if attempt.num_sampled]
    steps = read_metrics(run_folder / "metrics.jsonl")
    if len(attempts) < FEWEST_ATTEMPTS or len(steps) < 2:
        raise ConfigError(
            [
                f"--trace: {run_folder} holds {len(attempts)} attempts and {len(steps)} steps, of which "
                f"{FEWEST_ATTEMPTS} and 2 are needed; name a longer run, whose last checkpoint does not cover all of it"
            ]
        )
    sampled = np.array([attempt.num_sampled for attempt in attempts], np.float64)
    seconds = np.array([attempt.seconds for attempt in attempts])
    per_token, _ = _line(sampled, seconds)
    prompt_tokens = mean(attempt.num_tokens - attempt.num_sampled for attempt in attempts)
    tokens = np.array([step["samples"] * (prompt_tokens + step["response_length_mean"]) for step in steps])
    train_per_token, train_fixed = _line(tokens, np.array([step["time_train_s"] for step in steps]))
    return Calibration(
        prompt_tokens=prompt_tokens,
        answer_tokens=sampled.tolist(),
        latency_s=np.maximum(0.0, seconds - per_token * sampled).tolist(),
        decode_tokens_per_s=1 / per_token if per_token > 0 else 0.0,
        train_fixed_s=train_fixed,
        train_s_per_token=train_per_token,
        update_s=median(step["time_publish_s"] for step in steps),
        train_devices=config.placement.trainer,
    )


def simulated(config: Config, found: Calibration, candidate: Candidate, schedule: Schedule = "async") -> Config:
    """The config with its parts replaced by simulated ones that are as fast, in the setting of the candidate."""
    share = found.train_devices / candidate.train_devices
    parts: dict[str, Any] = {
        "data": DataSection(source=SimulatedData(prompt_tokens=FixedDistribution(value=max(1.0, found.prompt_tokens)))),
        "reward": config.reward.model_copy(update={"function": "flashflow.simulate.reward:simulated", "arguments": {}}),
        "engine": SimulatedEngineSection(
            slots=config.engine.slots,
            max_context_tokens=10**9,
            answer_tokens=GivenDistribution(values=found.answer_tokens),
            decode_tokens_per_s=found.decode_tokens_per_s,
            update_s=found.update_s,
        ),
        "trainer": SimulatedTrainerSection(
            fixed_s=found.train_fixed_s, seconds_per_token=found.train_s_per_token * share
        ),
        "simulate": SimulateSection(step_s=GivenDistribution(values=found.latency_s), trace_spans=0),
        "sampling": config.sampling.model_copy(update={"max_new_tokens": int(max(found.answer_tokens)) + 1}),
        "rollout": config.rollout.model_copy(
            update={"alpha": candidate.alpha, "schedule": schedule, "concurrency": candidate.concurrency}
        ),
        "placement": config.placement.model_copy(update={"engine": candidate.engines, "env": 1, "trainer": 1}),
        "run": config.run.model_copy(update={"steps": STEPS}),
        "evaluation": config.evaluation.model_copy(update={"every_steps": 0}),
    }
    return config.model_copy(update=parts)


def measured(config: Config, found: Calibration, candidate: Candidate, schedule: Schedule = "async") -> Candidate:
    figures = simulate(simulated(config, found, candidate, schedule)).figures
    return msgspec.structs.replace(candidate, samples_per_s=figures.samples_per_s, step_s=figures.step_s_mean)


def settings(config: Config, devices: int) -> Iterator[Candidate]:
    """Every split of the devices and alpha, at the concurrency that fills the slots and at twice that."""
    for engines, alpha, factor in product(range(1, devices), ALPHAS, (1, 2)):
        concurrency = factor * engines * config.engine.slots
        yield Candidate(devices - engines, engines, alpha, concurrency, 0.0, 0.0)


def plan(config: Config, found: Calibration, devices: int) -> Plan:
    """The fastest setting. Raises ConfigError for fewer than two devices."""
    if devices < 2:
        raise ConfigError([f"--devices: {devices} cannot be split between a trainer and an engine; give 2 or more"])
    rollout, placement = config.rollout, config.placement
    now = Candidate(placement.trainer, placement.engine, rollout.alpha, rollout.concurrency * placement.env, 0.0, 0.0)
    tried = [measured(config, found, candidate) for candidate in settings(config, devices)]
    return Plan(
        today=measured(config, found, now, rollout.schedule),
        best=_fastest(tried),
        best_synchronous=_fastest(candidate for candidate in tried if candidate.alpha == 0),
        candidates=tried,
    )


def _fastest(candidates: Iterable[Candidate]) -> Candidate:
    """Of equally fast ones, within a hundredth, the one of least alpha, then of least concurrency."""
    known = list(candidates)
    top = max(candidate.samples_per_s for candidate in known)
    good = [candidate for candidate in known if candidate.samples_per_s >= 0.99 * top]
    return min(good, key=lambda candidate: (candidate.alpha, candidate.concurrency, candidate.engines))


def _attempts(journal: Path) -> Iterator[Trajectory]:
    for path in sorted(journal.glob("payload-*.log")):
        for _, body in read_records(path, may_be_torn=True):
            yield decode_trajectory(body)


def _line(x: "np.ndarray[Any, np.dtype[np.float64]]", y: Sequence[float] | Any) -> tuple[float, float]:
    """(slope, height at 0) of the best line, neither of them below 0."""
    spread = float(np.var(x))
    slope = max(0.0, float(np.cov(x, y, bias=True)[0, 1]) / spread) if spread > 0 else 0.0
    height = float(np.mean(y) - slope * np.mean(x))
    if height < 0:
        return float(np.mean(y) / np.mean(x)), 0.0
    return slope, height

"""Which process runs where on one host. Pure, but for reading the host's cores when none are given.

Engines and trainers compute without pause, so each gets `placement.threads` cores of its own, in turn: an OpenMP team
that shares a core with a busy process waits at every barrier for its descheduled thread (measured: 4 to 35 times
slower). The other roles mostly wait for messages and go where the scheduler puts them.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass

from flashflow.config.sections import Config

PINNED_ROLES = ("trainer", "engine")
"""In the order in which they get cores."""
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


@dataclass(frozen=True, slots=True)
class ProcessPlan:
    """One process."""

    role: str
    index: int
    threads: int
    """Of torch, OpenMP and BLAS."""
    affinity: tuple[int, ...] | None
    """Cores it may run on; None: any."""
    env: dict[str, str]
    """Laid over the environment it inherits."""

    @property
    def name(self) -> str:
        return f"{self.role}-{self.index}"


def plan(config: Config, cores: Sequence[int] | None = None) -> list[ProcessPlan]:
    """Processes of one host in the order in which they start; `cores` defaults to those this process may use.

    Nothing is pinned when there are fewer than two cores, when a process could not have distinct cores for its
    threads, or when nothing computes on them: the model is placed on CUDA devices, or simulated.
    """
    usable = sorted(os.sched_getaffinity(0) if cores is None else cores)
    placement = config.placement
    pins = len(usable) >= max(2, placement.threads) and config.model.device != "cuda" and not config.simulated
    affinities = _in_turn(config, usable) if pins else {}
    return [
        _process(role, index, placement.threads if role in PINNED_ROLES else 1, affinities.get((role, index)))
        for role, count in process_counts(config).items()
        for index in range(count)
    ]


def process_counts(config: Config) -> dict[str, int]:
    """Number of processes of each role, in the order in which they start: callees before their callers."""
    placement = config.placement
    return {
        "buffer": 1,
        "reward": placement.reward,
        "engine": placement.engine,
        "proxy": 1,
        "env": placement.env,
        "trainer": placement.trainer,
        "controller": 1,
    }


def cores_wanted(config: Config) -> int:
    """Cores that would let every engine and trainer compute undisturbed."""
    counts = process_counts(config)
    return sum(counts[role] for role in PINNED_ROLES) * config.placement.threads


def thread_variables(threads: int) -> dict[str, str]:
    """What bounds the threads of the libraries in a process, for its environment."""
    return {name: str(threads) for name in THREAD_VARIABLES}


def _in_turn(config: Config, cores: Sequence[int]) -> dict[tuple[str, int], tuple[int, ...]]:
    """Deals the cores round, `threads` at a time; the deal starts anew when they are used up."""
    counts = process_counts(config)
    names = [(role, index) for role in PINNED_ROLES for index in range(counts[role])]
    threads = config.placement.threads
    hands = len(cores) // threads
    return {
        name: tuple(cores[turn % hands * threads : (turn % hands + 1) * threads]) for turn, name in enumerate(names)
    }


def _process(role: str, index: int, threads: int, affinity: tuple[int, ...] | None) -> ProcessPlan:
    return ProcessPlan(role, index, threads, affinity, thread_variables(threads))

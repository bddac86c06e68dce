"""What stands in for environments and the tokenizer: prompts of drawn lengths, turns, waits, crashes, hangs."""

import asyncio
import contextlib
import heapq
import itertools
from collections.abc import Iterator
from typing import Final

import numpy as np

from flashflow.clock import Clock
from flashflow.config.simulated import SimulateSection
from flashflow.data.simulated import PROMPT_TOKENS
from flashflow.environments.episode import Episode
from flashflow.errors import EnvironmentBroken
from flashflow.messages import GenerateReply, Lease, SamplingKey
from flashflow.records import Int32Array, Task
from flashflow.simulate.distributions import Draw, drawer, uniform
from flashflow.simulate.spans import Spans, Unheard

OBSERVATION_ID: Final = 1
"""Token id of all that is read."""
EVALUATION: Final = 1 << 62
"""Keeps the draws of evaluation apart."""


class SimulatedEnvironments:
    """Makes the episode of a lease."""

    def __init__(
        self,
        section: SimulateSection,
        *,
        name: str,
        seed: int,
        group_size: int,
        clock: Clock,
        spans: Spans | None = None,
    ) -> None:
        """name: under which `spans` hears of their waits. Raises OSError or ValueError when a file cannot be read."""
        self.name, self.spans = name, spans if spans is not None else Unheard()
        self.lanes = Lanes()
        self.crash_rate, self.hang_rate = section.crash_rate, section.hang_rate
        self.clock = clock
        self._seed = seed

        def draws(name: str) -> Draw:
            return drawer(name, getattr(section, name), group_size)

        self.turns, self.observation_tokens = draws("turns"), draws("observation_tokens")
        self.reset_s, self.step_s = draws("reset_s"), draws("step_s")

    def __call__(self, lease: Lease) -> Episode:
        sample, seed = lease.sample, self._seed if lease.purpose == "train" else self._seed ^ EVALUATION
        key = SamplingKey(seed, sample.group, sample.member, sample.retry, 0)
        return SimulatedEpisode(self, key, prompt_ids(lease.task))


class Lanes:
    """Small numbers for what goes on at the same time."""

    def __init__(self) -> None:
        self._free: list[int] = []
        self._count = itertools.count()

    @contextlib.contextmanager
    def one(self) -> Iterator[int]:
        lane = heapq.heappop(self._free) if self._free else next(self._count)
        try:
            yield lane
        finally:
            heapq.heappush(self._free, lane)


class SimulatedEpisode:
    def __init__(self, world: SimulatedEnvironments, key: SamplingKey, prompt: Int32Array) -> None:
        self._world = world
        self._key = key
        self._prompt = prompt
        self._left = max(1, round(world.turns(key)))
        self._turns = itertools.count()

    async def reset(self) -> Int32Array:
        await self._wait(self._world.reset_s(self._key), "reset")
        return self._prompt

    async def step(self, answer: GenerateReply) -> Int32Array | None:
        """Raises EnvironmentBroken for a crash; never returns from a hang."""
        world, turn = self._world, next(self._turns)
        key = SamplingKey(self._key.seed, self._key.group, self._key.member, self._key.retry, turn)
        fate = uniform("fate", key) if world.crash_rate or world.hang_rate else 1.0
        if fate < world.hang_rate:
            await asyncio.get_running_loop().create_future()
        await self._wait(world.step_s(key), f"turn {turn}")
        if fate < world.hang_rate + world.crash_rate:
            raise EnvironmentBroken(f"simulate.crash_rate {world.crash_rate:g} had it crash in turn {turn}")
        self._left -= 1
        return ids(round(world.observation_tokens(key))) if self._left else None

    async def _wait(self, seconds: float, what: str) -> None:
        if seconds <= 0:
            return
        world = self._world
        with world.lanes.one() as lane:
            start = world.clock.now()
            await world.clock.sleep(seconds)
            name = f"g{self._key.group}m{self._key.member} {what}"
            world.spans.add(world.name, lane, name, start, world.clock.now())


def prompt_ids(task: Task) -> Int32Array:
    return ids(task.row[PROMPT_TOKENS])


def ids(count: int) -> Int32Array:
    """So many tokens that somebody else wrote."""
    return np.full(count, OBSERVATION_ID, np.int32)

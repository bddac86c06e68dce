"""What stands in for environments and the tokenizer: prompts of drawn lengths, turns, waits, crashes, hangs."""

import asyncio
import itertools
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

OBSERVATION_ID: Final = 1
"""Token id of all that is read."""
EVALUATION: Final = 1 << 62
"""Keeps the draws of evaluation apart."""


class SimulatedEnvironments:
    """Makes the episode of a lease."""

    def __init__(self, section: SimulateSection, *, seed: int, group_size: int, clock: Clock) -> None:
        """Raises OSError or ValueError when a file of numbers cannot be read."""
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


class SimulatedEpisode:
    def __init__(self, world: SimulatedEnvironments, key: SamplingKey, prompt: Int32Array) -> None:
        self._world = world
        self._key = key
        self._prompt = prompt
        self._left = max(1, round(world.turns(key)))
        self._turns = itertools.count()

    async def reset(self) -> Int32Array:
        await self._wait(self._world.reset_s(self._key))
        return self._prompt

    async def step(self, answer: GenerateReply) -> Int32Array | None:
        """Raises EnvironmentBroken for a crash; never returns from a hang."""
        world, turn = self._world, next(self._turns)
        key = SamplingKey(self._key.seed, self._key.group, self._key.member, self._key.retry, turn)
        fate = uniform("fate", key) if world.crash_rate or world.hang_rate else 1.0
        if fate < world.hang_rate:
            await asyncio.get_running_loop().create_future()
        await self._wait(world.step_s(key))
        if fate < world.hang_rate + world.crash_rate:
            raise EnvironmentBroken(f"simulate.crash_rate {world.crash_rate:g} had it crash in turn {turn}")
        self._left -= 1
        return ids(round(world.observation_tokens(key))) if self._left else None

    async def _wait(self, seconds: float) -> None:
        if seconds > 0:
            await self._world.clock.sleep(seconds)


def prompt_ids(task: Task) -> Int32Array:
    return ids(task.row[PROMPT_TOKENS])


def ids(count: int) -> Int32Array:
    """So many tokens that somebody else wrote."""
    return np.full(count, OBSERVATION_ID, np.int32)

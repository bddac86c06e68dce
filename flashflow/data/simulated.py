"""Tasks without text: of a prompt only its length is known."""

import math

from flashflow.config.sections import DataSection
from flashflow.config.simulated import SimulatedData
from flashflow.messages import SamplingKey
from flashflow.records import Task
from flashflow.simulate.distributions import Draw, drawer

PROMPT_TOKENS = "prompt_tokens"
"""Column with the length of the prompt; `prompt` is empty."""


class SimulatedStream:
    """A TaskStream. There is no order to shuffle."""

    def __init__(self, section: DataSection, source: SimulatedData, seed: int) -> None:
        """Raises OSError or ValueError when a file of lengths cannot be read."""
        self._end = math.inf if section.epochs is None else section.epochs * source.size
        self._size, self._seed = source.size, seed
        self._train = drawer("prompt", source.prompt_tokens, 1)
        self._held_out = drawer("held-out prompt", source.prompt_tokens, 1)

    def __len__(self) -> int:
        """Tasks in one pass."""
        return self._size

    def task(self, cursor: int) -> Task | None:
        """Raises ValueError for a negative cursor."""
        if cursor < 0:
            raise ValueError(f"cursor {cursor} is negative")
        return self._task(cursor, self._train) if cursor < self._end else None

    def eval_tasks(self, count: int) -> list[Task]:
        return [self._task(cursor, self._held_out) for cursor in range(count)]

    def _task(self, cursor: int, draw: Draw) -> Task:
        length = max(1, round(draw(SamplingKey(self._seed, cursor % self._size, 0, 0, 0))))
        return Task(cursor=cursor, row={"prompt": "", PROMPT_TOKENS: length})

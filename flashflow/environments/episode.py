"""One attempt as the env role plays it, in tokens: an observation, an answer, an observation, ... the end."""

from collections.abc import Callable
from typing import Protocol

from flashflow.messages import GenerateReply, Lease
from flashflow.records import Int32Array


class Episode(Protocol):
    """Both methods raise EnvironmentBroken when the attempt must be tried again."""

    async def reset(self) -> Int32Array:
        """Tokens of the prompt."""
        ...

    async def step(self, answer: GenerateReply) -> Int32Array | None:
        """Tokens that come after the policy's answer; None: the attempt has ended."""
        ...


Episodes = Callable[[Lease], Episode]
"""Makes the episode of a lease."""


class OneAnswer:
    """A prompt, an answer, and that is all."""

    def __init__(self, prompt_ids: Int32Array) -> None:
        self._prompt_ids = prompt_ids

    async def reset(self) -> Int32Array:
        return self._prompt_ids

    async def step(self, answer: GenerateReply) -> Int32Array | None:
        return None

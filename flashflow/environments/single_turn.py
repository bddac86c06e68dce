"""One prompt, one completion, one score: reinforcement learning with verifiable rewards."""

from collections.abc import Awaitable, Callable
from typing import Any

from flashflow.data.chat import prompt_text
from flashflow.environments.base import Observation, StepResult
from flashflow.errors import ContractError, RewardError
from flashflow.messages import ScoreReply

Scorer = Callable[[str, str], Awaitable[ScoreReply]]
"""Asks the reward role: (text of the prompt, completion)."""


class SingleTurn:
    """The prompt is the observation; the first step ends the attempt with what the reward function says."""

    def __init__(self, score: Scorer) -> None:
        self._score = score
        self._prompt: Observation | None = None

    async def reset(self, *, seed: int, prompt: Observation, **row: Any) -> Observation:
        self._prompt = prompt
        return prompt

    async def step(self, action: str) -> StepResult:
        """`info` has the score's `components` and `timed_out`. Raises RewardError when the reward function raised."""
        if self._prompt is None:
            raise ContractError("single_turn: step before reset, or after the end")
        prompt, self._prompt = self._prompt, None
        reply = await self._score(prompt_text(prompt), action)
        if reply.error:
            raise RewardError(f"the reward function raised:\n{reply.error}")
        return "", reply.reward, True, False, {"components": reply.components, "timed_out": reply.timed_out}

import asyncio

import pytest

from flashflow import environment
from flashflow.environments.single_turn import SingleTurn
from flashflow.errors import ContractError, RewardError
from flashflow.messages import ScoreReply


def single_turn(reply: ScoreReply) -> tuple[SingleTurn, list[tuple[str, str]]]:
    asked: list[tuple[str, str]] = []

    async def score(prompt: str, completion: str) -> ScoreReply:
        asked.append((prompt, completion))
        return reply

    return SingleTurn(score), asked


def test_one_turn_shows_the_prompt_and_ends_with_the_score():
    async def scenario():
        env, asked = single_turn(ScoreReply(reward=0.5, components={"format": 1.0}))
        messages = [{"role": "user", "content": "2 + 2?"}]
        assert await env.reset(seed=0, prompt=messages, answer="4") == messages
        result = await env.step("4")
        assert result == ("", 0.5, True, False, {"components": {"format": 1.0}, "timed_out": False})
        assert asked == [("2 + 2?", "4")]

    asyncio.run(scenario())


def test_a_second_step_needs_a_reset():
    async def scenario():
        env, _ = single_turn(ScoreReply(reward=1.0, components={}))
        with pytest.raises(ContractError, match="step before reset"):
            await env.step("4")
        await env.reset(seed=0, prompt="p")
        await env.step("4")
        with pytest.raises(ContractError, match="after the end"):
            await env.step("4")

    asyncio.run(scenario())


def test_a_reward_function_that_raised_stops_the_attempt():
    async def scenario():
        env, _ = single_turn(ScoreReply(reward=None, components={}, error="KeyError: 'x'"))
        await env.reset(seed=0, prompt="p")
        with pytest.raises(RewardError, match="KeyError: 'x'"):
            await env.step("4")

    asyncio.run(scenario())


def test_the_decorator_leaves_the_class_as_it_is():
    @environment
    class Guess:
        async def reset(self, *, seed: int, **row) -> str:
            return "guess"

        async def step(self, action: str):
            return "", 1.0, True, False, {}

    assert asyncio.run(Guess().reset(seed=0)) == "guess"


def test_the_decorator_names_what_is_missing():
    with pytest.raises(TypeError, match=r"environment .*NoStep has no method step"):

        @environment
        class NoStep:
            def reset(self, **row): ...

    with pytest.raises(TypeError, match="NoSeed: reset takes no keyword 'seed'"):

        @environment
        class NoSeed:
            def reset(self): ...
            def step(self, action): ...

    with pytest.raises(TypeError, match="goes on a class, not on a function"):

        @environment
        def step(action): ...

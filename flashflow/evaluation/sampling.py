"""Samples every problem on an engine in this process, all slots busy until the last answers."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from flashflow.engines.base import Engine
from flashflow.messages import Generate, SamplingKey

Int32Array = npt.NDArray[np.int32]


class SamplingPlan(NamedTuple):
    """How every problem is sampled."""

    samples: int
    """Per problem."""
    temperature: float
    """0: greedily."""
    max_new_tokens: int
    stop_ids: list[int]
    stop_strings: list[str]
    seed: int
    """Keys every sampled token."""


class Completion(NamedTuple):
    problem: int
    sample: int
    token_ids: list[int]
    finish_reason: str


def completions(engine: Engine, prompts: Sequence[Sequence[int]], plan: SamplingPlan) -> Iterator[Completion]:
    """Token ids of answers to prompts [P], in the order of finishing; the engine must have its weights and be idle.

    Samples of a problem start together, so that they share its prompt's keys and values.
    """
    names = {}
    tokens: dict[str, list[int]] = {}
    for problem, prompt in enumerate(prompts):
        prompt_ids = np.asarray(prompt, np.int32)
        for sample in range(plan.samples):
            request = _request(problem, sample, prompt_ids, plan, engine.version)
            engine.submit(request)
            names[request.request] = (problem, sample)
            tokens[request.request] = []
    while names:
        for news in engine.step():
            tokens[news.request].append(news.token)
            if news.finish_reason:
                yield Completion(*names.pop(news.request), tokens.pop(news.request), news.finish_reason)


def _request(problem: int, sample: int, prompt_ids: Int32Array, plan: SamplingPlan, version: int) -> Generate:
    name = f"p{problem}s{sample}"
    return Generate(
        request=name,
        session=name,
        key=SamplingKey(plan.seed, problem, sample, 0, 0),
        prompt_ids=prompt_ids,
        generated_ids=np.zeros(0, np.int32),
        max_new_tokens=plan.max_new_tokens,
        temperature=plan.temperature,
        stop_ids=plan.stop_ids,
        stop_strings=plan.stop_strings,
        min_version=version,
    )

"""A tiny model, requests to it, and what an engine answers."""

import copy
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from flashflow.engines.embedded.engine import TorchEngine
from flashflow.messages import Generate, SamplingKey
from flashflow.models import load_model
from tests.tiny_model import make_tiny_model, make_tiny_tokenizer

VOCABULARY = 259
MAX_STEPS = 2000


class Answer(NamedTuple):
    tokens: list[int]
    logprobs: list[float]
    versions: list[int]
    finish_reason: str


def tiny(folder: Path, **options: Any) -> Any:
    return load_model(make_tiny_model(folder, **{"max_positions": 1024, **options}), device="cpu")


def weights_of(model: Any) -> dict[str, torch.Tensor]:
    """Copies, as a trainer stages them: of tied parameters only the first name."""
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def make_engine(model: Any, **options: Any) -> TorchEngine:
    """Serves version 0 of a copy of the model."""
    engine = TorchEngine(
        copy.deepcopy(model),
        **{"slots": 32, "max_context_tokens": 256, "tokenizer": make_tiny_tokenizer(), **options},
    )
    engine.load(0, weights_of(model))
    return engine


def prompt(length: int, seed: int) -> list[int]:
    return np.random.default_rng([seed, length]).integers(3, VOCABULARY, length).tolist()


def request(name: str, prompt_ids: Iterable[int], max_new_tokens: int, **changes: Any) -> Generate:
    """`member` is the request's own number in the sampling key."""
    fields = {
        "session": name,
        "key": SamplingKey(seed=0, group=0, member=changes.pop("member", 0), retry=0, turn=0),
        "generated_ids": np.array(changes.pop("generated_ids", []), dtype=np.int32),
        "temperature": 1.0,
        "stop_ids": [],
        "stop_strings": [],
        "min_version": 0,
    }
    return Generate(
        request=name,
        prompt_ids=np.array(list(prompt_ids), dtype=np.int32),
        max_new_tokens=max_new_tokens,
        **{**fields, **changes},
    )


def mates(count: int) -> list[Generate]:
    """Requests of all lengths and temperatures."""
    return [
        request(
            f"mate-{i}", prompt(2 + 11 * i % 90, i), 3 + 7 * i % 100, member=1 + i, temperature=(1.0, 0.0, 0.6)[i % 3]
        )
        for i in range(count)
    ]


def drain(
    engine: TorchEngine, requests: Iterable[Generate] = (), at_step: Mapping[int, Callable[[], None]] | None = None
) -> dict[str, Answer]:
    """Submit, decode until idle; `at_step[i]` runs before step i, from 0. Everything that ended, by name."""
    for one in requests:
        engine.submit(one)
    answers: dict[str, Answer] = {}
    for step in range(MAX_STEPS):
        if at_step and step in at_step:
            at_step[step]()
        for sampled in engine.step():
            answer = answers.get(sampled.request, Answer([], [], [], ""))
            if sampled.token >= 0:
                answer.tokens.append(sampled.token)
                answer.logprobs.append(sampled.logprob)
                answer.versions.append(sampled.version)
            answers[sampled.request] = answer._replace(finish_reason=sampled.finish_reason)
        if not engine.num_running and not engine.num_waiting and step >= max(at_step or [0]):
            return answers
    raise AssertionError(f"not idle after {MAX_STEPS} steps")


def only(answers: Mapping[str, Answer]) -> Answer:
    (answer,) = answers.values()
    return answer


def plain_logprobs(model: Any, tokens: list[int], *, padded_to: int, temperature: float = 1.0) -> list[float]:
    """Of tokens[1:], each given those before it, by transformers' own attention; float32 as an engine gives them."""
    plain = copy.deepcopy(model)
    plain.set_attn_implementation("sdpa")
    ids = torch.zeros(1, padded_to, dtype=torch.long)
    ids[0, : len(tokens)] = torch.tensor(tokens)
    causal = torch.ones(1, 1, padded_to, padded_to, dtype=torch.bool).tril()
    logits = plain(input_ids=ids, attention_mask=causal, position_ids=torch.arange(padded_to)[None]).logits.detach()
    table = torch.log_softmax(logits[0] / temperature, dim=-1)
    return [table[i, token].item() for i, token in enumerate(tokens[1:])]

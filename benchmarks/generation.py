"""What benchmarks/engine.py compares: the embedded engine and `generate` of transformers, on the same models.

Both sample from the whole distribution at temperature 1, in float32, with nothing that ends an answer early.
"""

import copy
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from flashflow.engines.embedded.engine import TorchEngine
from flashflow.messages import Generate, SamplingKey
from flashflow.models import load_model

PROMPT_TOKENS = 32
SMOLLM2 = "135M"


class Shape(NamedTuple):
    """Of a random Qwen3."""

    vocabulary: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int


SHAPES = {
    "0.13M": Shape(512, 64, 192, 2, 4, 2, 16),
    "0.92M": Shape(2048, 128, 448, 3, 4, 2, 32),
    "8.9M": Shape(4096, 320, 992, 6, 10, 5, 32),
}


class Request(NamedTuple):
    prompt: list[int]
    new_tokens: int


def make_model(size: str, cache: Path) -> Any:
    """Random weights, but for SmolLM2. Raises ConfigError when its packages are missing."""
    if size == SMOLLM2:
        from flashflow.builtin.smollm2 import ensure_model

        return load_model(ensure_model(cache, print), device="cpu")
    from transformers.models.qwen3 import Qwen3Config, Qwen3ForCausalLM

    shape = SHAPES[size]
    config = Qwen3Config(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    return Qwen3ForCausalLM(config).float().eval()


def make_requests(lengths: list[int], vocabulary: int) -> list[Request]:
    """Every prompt another, so that none is shared."""
    random = np.random.default_rng(0)
    return [Request(random.integers(3, vocabulary, PROMPT_TOKENS).tolist(), length) for length in lengths]


def heavy_tailed(count: int, median: int, longest: int) -> list[int]:
    """Lognormal with sigma 1, cut at `longest`, which one of them has."""
    lengths = np.random.default_rng(1).lognormal(np.log(median), 1.0, count)
    lengths[count // 2] = longest
    return np.clip(lengths, 1, longest).astype(int).tolist()


class EngineContestant:
    """Continuous batching; prompts and answers are counted by `generate`'s time as well."""

    def __init__(self, model: Any, slots: int, max_context_tokens: int, **options: Any) -> None:
        self.engine = TorchEngine(copy.deepcopy(model), slots=slots, max_context_tokens=max_context_tokens, **options)
        self.engine.load(0, dict(model.named_parameters()))

    def seconds(self, requests: list[Request]) -> float:
        started = time.perf_counter()
        for number, request in enumerate(requests):
            self.engine.submit(_generate(number, request))
        sampled = 0
        while self.engine.num_running or self.engine.num_waiting:
            sampled += len(self.engine.step())
        assert sampled == sum(request.new_tokens for request in requests)
        return time.perf_counter() - started


def _generate(number: int, request: Request) -> Generate:
    return Generate(
        request=str(number),
        session=str(number),
        key=SamplingKey(seed=0, group=number, member=0, retry=0, turn=0),
        prompt_ids=np.array(request.prompt, dtype=np.int32),
        generated_ids=np.array([], dtype=np.int32),
        max_new_tokens=request.new_tokens,
        temperature=1.0,
        stop_ids=[],
        stop_strings=[],
        min_version=0,
    )


class TransformersContestant:
    """Batch and wait: each batch runs to the longest of its answers. Returns no log-probabilities."""

    def __init__(self, model: Any, batch: int, cache: str | None) -> None:
        """cache: `cache_implementation` of generate; None is its dynamic one."""
        self._model, self._batch = model, batch
        self._options = {} if cache is None else {"cache_implementation": cache, "disable_compile": True}

    @torch.inference_mode()
    def seconds(self, requests: list[Request]) -> float:
        started = time.perf_counter()
        for first in range(0, len(requests), self._batch):
            batch = requests[first : first + self._batch]
            prompts = torch.tensor([request.prompt for request in batch])
            longest = max(request.new_tokens for request in batch)
            answers = self._model.generate(
                input_ids=prompts, attention_mask=torch.ones_like(prompts), do_sample=True, temperature=1.0, top_k=0,
                top_p=1.0, min_new_tokens=longest, max_new_tokens=longest, eos_token_id=None, pad_token_id=0,
                **self._options,
            )  # fmt: skip
            assert answers.shape == (len(batch), PROMPT_TOKENS + longest)
        return time.perf_counter() - started

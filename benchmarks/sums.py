"""What the comparison with TRL trains on: the quickstart's sums, and models of two sizes that half know them."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from flashflow.config.sections import ReasoningGymData
from flashflow.data.chat import render_prompt
from flashflow.data.sources import read_source
from flashflow.engines.embedded.engine import TorchEngine
from flashflow.evaluation.sampling import SamplingPlan, completions
from flashflow.quickstart.recipe import Recipe, cached_folder
from flashflow.quickstart.task import exact_answer
from flashflow.quickstart.warm_start import make_model

SEED = 0
SIZES = {
    "0.13M": Recipe(),
    "8.9M": Recipe(
        hidden=320, layers=8, heads=5, kv_heads=1, head_dim=64, intermediate=896, initializer_range=0.02,
        steps=240, lr=1e-3,
    ),
}  # fmt: skip
MAX_NEW_TOKENS = 40
SOURCE = ReasoningGymData(
    task="chain_sum", options={"min_terms": 2, "max_terms": 2, "min_digits": 2, "max_digits": 2}, size=20_000
)


def model_folder(size: str, cache: Path) -> Path:
    """The warm-started model, made on first use (minutes)."""
    folder = cached_folder(cache, SIZES[size], SEED)
    if not folder.exists():
        make_model(
            folder, SIZES[size], SEED, lambda done, total, loss: print(f"{size}: {done}/{total} loss {loss:.3f}")
        )
    return folder


def training_rows(model: Path) -> list[dict[str, Any]]:
    """`prompt`, rendered as rollout renders it, and `answer`."""
    tokenizer = AutoTokenizer.from_pretrained(model)  # type: ignore[no-untyped-call]
    return [
        {"prompt": tokenizer.decode(render_prompt(tokenizer, row["prompt"], None)), "answer": row["answer"]}
        for row in read_source(SOURCE).train
    ]


class Examiner:
    """Greedy accuracy on held-out sums, by the embedded engine, for whoever trained the weights."""

    def __init__(self, model: Path, problems: int) -> None:
        self._rows: Sequence[Any] = read_source(SOURCE).held_out[:problems]
        self._tokenizer = AutoTokenizer.from_pretrained(model)  # type: ignore[no-untyped-call]
        self._prompts = [render_prompt(self._tokenizer, row["prompt"], None) for row in self._rows]
        policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        self._names = [name for name, _ in policy.named_parameters()]
        self._engine = TorchEngine(policy, slots=64, max_context_tokens=128)
        self._version = -1

    def accuracy(self, weights: dict[str, torch.Tensor]) -> float:
        """weights: name -> float32 tensor; a second name of a tied parameter is passed over."""
        self._version += 1
        self._engine.load(self._version, {name: weights[name] for name in self._names})
        plan = SamplingPlan(
            samples=1, temperature=0.0, max_new_tokens=MAX_NEW_TOKENS, stop_ids=[self._tokenizer.eos_token_id],
            stop_strings=[], seed=SEED,
        )  # fmt: skip
        solved = 0.0
        for completion in completions(self._engine, self._prompts, plan):
            text = self._tokenizer.decode(completion.token_ids, skip_special_tokens=True)
            solved += exact_answer(text, self._rows[completion.problem]["answer"])
        return solved / len(self._rows)

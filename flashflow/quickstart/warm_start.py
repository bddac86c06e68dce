"""Trains the quickstart model from nothing on demonstrations, and saves it as a Hugging Face folder.

Shapes: B problems of a step, T tokens of the longest prompt and completion, N completion tokens of a step.
"""

import random
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import torch
from transformers import PreTrainedTokenizerFast
from transformers.models.qwen3 import Qwen3Config, Qwen3ForCausalLM
from transformers.utils import logging as transformers_logging

from flashflow.data.chat import render_prompt
from flashflow.folders import whole_folder
from flashflow.quickstart import Progress
from flashflow.quickstart.recipe import Recipe
from flashflow.quickstart.task import demonstration, training_problems
from flashflow.quickstart.tokenizer import make_tokenizer

REPORT_EVERY = 25
"""Steps between two calls of the progress callback."""


class Example(NamedTuple):
    """One demonstration in tokens."""

    prompt: list[int]
    completion: list[int]
    """Ends with the end-of-turn token."""


class Batch(NamedTuple):
    ids_BT: torch.Tensor
    """[B, T] int64, padded on the right: with a causal mask the padding changes nothing before it."""
    sampled_BT: torch.Tensor
    """[B, T - 1] bool: position t predicts a completion token at t + 1."""


def make_model(folder: Path, recipe: Recipe, seed: int, progress: Progress | None = None) -> None:
    """Write tokenizer and warm-started model to `folder`, whole or not at all; the caller's random state stays."""
    tokenizer = make_tokenizer(recipe)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = untrained_model(recipe, tokenizer)
    train(model, examples(recipe, tokenizer, seed), recipe, tokenizer.pad_token_id, progress)
    with whole_folder(folder) as partial:
        transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
        model.save_pretrained(partial)
        tokenizer.save_pretrained(partial)


def untrained_model(recipe: Recipe, tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    """Float32, with tied embeddings; drawn from torch's global random state."""
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=recipe.hidden,
        intermediate_size=recipe.intermediate,
        num_hidden_layers=recipe.layers,
        num_attention_heads=recipe.heads,
        num_key_value_heads=recipe.kv_heads,
        head_dim=recipe.head_dim,
        max_position_embeddings=recipe.max_positions,
        tie_word_embeddings=True,
        initializer_range=recipe.initializer_range,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )
    model = Qwen3ForCausalLM(config)
    model.to(torch.float32)  # type: ignore[arg-type]
    return model


def examples(recipe: Recipe, tokenizer: PreTrainedTokenizerFast, seed: int) -> Iterator[list[Example]]:
    """One list of B examples per step. Prompts are rendered as rollout renders them."""
    rng = random.Random(seed)
    problems = training_problems(recipe, seed)
    for step in range(recipe.steps):
        batch = []
        for problem in islice(problems, recipe.batch):
            text = demonstration(problem, recipe.guess_probability(step), rng)
            completion = [*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id]
            batch.append(Example(render_prompt(tokenizer, problem["question"], None), completion))
        yield batch


def train(
    model: Qwen3ForCausalLM, batches: Iterator[list[Example]], recipe: Recipe, pad: int, progress: Progress | None
) -> None:
    """AdamW on the mean negative log-likelihood of the completion tokens of a step."""
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=recipe.lr, betas=recipe.betas, weight_decay=recipe.weight_decay, fused=True
    )
    for step, batch in enumerate(batches):
        optimizer.param_groups[0]["lr"] = recipe.learning_rate(step)
        optimizer.zero_grad()
        loss = completion_loss(model, collate(batch, pad))
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.clip_norm)
        optimizer.step()
        done = step + 1
        if progress is not None and (done % REPORT_EVERY == 0 or done == recipe.steps):
            progress(done, recipe.steps, loss.item())


def collate(batch: list[Example], pad: int) -> Batch:
    longest = max(len(example.prompt) + len(example.completion) for example in batch)
    ids_BT = torch.full((len(batch), longest), pad)
    sampled_BT = torch.zeros(len(batch), longest - 1, dtype=torch.bool)
    for row, (prompt, completion) in enumerate(batch):
        end = len(prompt) + len(completion)
        ids_BT[row, :end] = torch.tensor(prompt + completion)
        sampled_BT[row, len(prompt) - 1 : end - 1] = True
    return Batch(ids_BT, sampled_BT)


def completion_loss(model: Qwen3ForCausalLM, batch: Batch) -> torch.Tensor:
    """Mean over the N completion tokens, in nats. Only they are given logits."""
    hidden_BTH = model.model(input_ids=batch.ids_BT, use_cache=False).last_hidden_state[:, :-1]
    logits_NV = model.lm_head(hidden_BTH[batch.sampled_BT])
    return torch.nn.functional.cross_entropy(logits_NV, batch.ids_BT[:, 1:][batch.sampled_BT])

"""Plain synchronous GRPO in one function: no roles, no queue, no ledger, no cache. The ring at alpha 0 must equal it.

It samples by a whole forward pass per token and writes the loss out; it shares with flashflow the model, the prompts,
the keyed random numbers and the layout of micro-batches, which decides in which order floats are added.
"""

import asyncio
from typing import Any

import numpy as np
import torch

from flashflow.config import Config
from flashflow.data.chat import render_prompt
from flashflow.data.stream import make_stream
from flashflow.engines.uniform import sampling_key_bits, uniforms
from flashflow.messages import SamplingKey
from flashflow.models import load_model
from flashflow.packing import pack
from flashflow.rewards.load import load_reward
from flashflow.shapes import safe_length
from flashflow.tokenizers import load_tokenizer
from flashflow.trainers.logprobs import TokenScorer


@torch.no_grad()
def sample(model: Any, prompt: list[int], key: SamplingKey, config: Config, eos: int) -> list[int]:
    tokens, bits = list(prompt), np.array([sampling_key_bits(key)], np.uint64)
    for position in range(config.sampling.max_new_tokens):
        length = safe_length(len(tokens))
        ids = torch.tensor([tokens + [0] * (length - len(tokens))])
        visible = torch.ones(1, 1, length, length, dtype=torch.bool).tril()
        hidden = model.base_model(input_ids=ids, attention_mask=visible, use_cache=False).last_hidden_state[0]
        logits = model.lm_head(hidden)[len(tokens) - 1]
        cumulative = (logits / config.sampling.temperature).log_softmax(-1).exp().cumsum(-1, dtype=torch.float64)
        uniform = torch.from_numpy(uniforms(bits, np.array([position])))
        tokens.append(int(torch.searchsorted(cumulative, uniform * cumulative[-1], right=True)))
        if tokens[-1] == eos:
            break
    return tokens


def reference_loop(config: Config) -> tuple[list[dict[str, float]], dict[str, torch.Tensor]]:
    """Loss and mean reward of each step, and the final weights."""
    torch.set_num_threads(1)
    tokenizer, stream = load_tokenizer(config.model.path), make_stream(config.data, config.run.seed)
    reward = load_reward(config.reward.function, config.reward.arguments)
    scorer = TokenScorer(load_model(config.model.path, "float32", "cpu"), config.sampling.temperature)
    parameters = list(scorer.model.parameters())
    section, groups, members = config.optimizer, config.batch.groups, config.rollout.group_size
    optimizer = torch.optim.AdamW(
        parameters, lr=section.lr, betas=section.betas, eps=section.eps, weight_decay=section.weight_decay
    )
    history = []
    for step in range(config.run.steps):
        rows, starts, rewards = [], [], []
        for group in range(step * groups, (step + 1) * groups):
            row = stream.task(group).row
            prompt = render_prompt(tokenizer, row["prompt"], None)
            for member in range(members):
                key = SamplingKey(config.run.seed, group, member, 0, 0)
                rows.append(sample(scorer.model, prompt, key, config, tokenizer.eos_token_id))
                starts.append(len(prompt))
                text = tokenizer.decode(rows[-1][len(prompt) :], skip_special_tokens=True)
                rewards.append(asyncio.run(reward.score(row["prompt"], text, row))[0])
        by_group = torch.tensor(rewards, dtype=torch.float64).view(groups, members)
        centred = by_group - by_group.mean(1, keepdim=True)
        advantages = (centred / (by_group.std(1, keepdim=True) + 1e-6)).flatten().float()
        losses = []
        with_signal = [row for row in range(len(rows)) if advantages[row] != 0]  # the others have no gradient
        for micro in pack([len(row) for row in rows], config.batch.micro_batch_tokens, with_signal):
            tokens = torch.tensor([rows[i] + [0] * (micro.length - len(rows[i])) for i in micro.rows])
            ends = torch.tensor([len(rows[i]) for i in micro.rows])[:, None]
            places = torch.arange(micro.length)
            mask = (places >= torch.tensor([starts[i] for i in micro.rows])[:, None]) & (places < ends)
            logprobs, _ = scorer(tokens, mask)
            ratio = (logprobs - logprobs.detach()).exp()
            advantage = advantages[list(micro.rows)][:, None]
            surrogate = torch.maximum(-ratio * advantage, -ratio.clamp(0.8, 1.2) * advantage)
            loss = ((surrogate * mask).sum(1) / mask.sum(1)).sum() / len(rows)
            loss.backward()
            losses.append(loss.item())
        torch.nn.utils.clip_grad_norm_(parameters, section.clip_norm)
        optimizer.step()
        optimizer.zero_grad()
        history.append({"loss": sum(losses), "reward_mean": float(by_group.mean())})
    return history, {name: tensor.detach() for name, tensor in scorer.model.named_parameters()}

"""Training once more, written by hand: one sequence at a time, no padding, no chunks, AdamW from its paper."""

import math
from typing import Any

import numpy as np
import torch

from flashflow.config.sections import OptimizerSection
from flashflow.records import Trajectory


def plain_logprobs(model: Any, row: Trajectory, temperature: float) -> torch.Tensor:
    """[number of sampled tokens]; transformers' own forward with its own causal mask."""
    tokens = torch.from_numpy(row.tokens.astype(np.int64))
    logits = model(input_ids=tokens[None]).logits[0] / temperature
    logits = logits - logits.max(dim=-1, keepdim=True).values
    everything = logits - logits.exp().sum(dim=-1, keepdim=True).log()
    sampled = np.flatnonzero(row.mask)
    return torch.stack([everything[place - 1, tokens[place]] for place in sampled])


class PlainAdamW:
    """Algorithm 2 of 1711.05101, with the gradient clipped to a norm first."""

    def __init__(self, model: Any, section: OptimizerSection) -> None:
        self.parameters, self.section, self.time = list(model.parameters()), section, 0
        self.first = [torch.zeros_like(parameter) for parameter in self.parameters]
        self.second = [torch.zeros_like(parameter) for parameter in self.parameters]

    @torch.no_grad()
    def step(self, gradients: tuple[torch.Tensor, ...]) -> float:
        self.time += 1
        (beta1, beta2), section = self.section.betas, self.section
        norm = math.sqrt(sum(gradient.square().sum().item() for gradient in gradients))
        shrink = min(1.0, section.clip_norm / (norm + 1e-6))
        for place, parameter in enumerate(self.parameters):
            gradient = gradients[place] * shrink
            self.first[place] = beta1 * self.first[place] + (1 - beta1) * gradient
            self.second[place] = beta2 * self.second[place] + (1 - beta2) * gradient**2
            mean = self.first[place] / (1 - beta1**self.time)
            scale = (self.second[place] / (1 - beta2**self.time)).sqrt() + section.eps
            parameter -= section.lr * (mean / scale + section.weight_decay * parameter)
        return norm


def assert_weights_close(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], tolerance: float) -> None:
    assert list(found) == list(expected)
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=tolerance, msg=name)


def assert_same_bits(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert [name for name, tensor in expected.items() if not torch.equal(found[name], tensor)] == []

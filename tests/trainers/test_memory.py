"""What a training pass keeps in memory: the inputs of recomputed layers only, and never the logits of all tokens."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from plain_training import assert_same_bits
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from trainer_cases import VOCABULARY, make_batch, make_model, weights_of

from flashflow.config.sections import CriticSection, FsdpTrainerSection
from flashflow.trainers.backbone import recompute
from flashflow.trainers.fsdp import FsdpTrainer
from flashflow.trainers.logprobs import TokenScorer

MakeTrainer = Callable[..., FsdpTrainer]


@contextmanager
def saved_storages() -> Iterator[dict[int, int]]:
    """Address -> bytes of every storage that a forward pass keeps for the backward one."""
    found: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        found[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        yield found


def forward(model: Any, *, recomputed: bool) -> tuple[int, tuple[torch.Tensor, ...]]:
    """(bytes kept without those of the parameters, gradients)."""
    tokens = torch.randint(0, VOCABULARY, (8, 96), generator=torch.Generator().manual_seed(0))
    mask = torch.arange(96).expand(8, 96) >= 40
    scorer = TokenScorer(model, 1.0)
    if recomputed:
        recompute(scorer.layers)
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    with saved_storages() as kept:
        logprobs, _ = scorer(tokens, mask)
    num_bytes = sum(size for address, size in kept.items() if address not in own)
    return num_bytes, torch.autograd.grad(logprobs.sum(), list(model.parameters()))


def test_recomputed_layers_keep_less_and_give_the_same_gradient_bits() -> None:
    kept, gradients = forward(make_model(), recomputed=False)
    kept_recomputed, gradients_recomputed = forward(make_model(), recomputed=True)
    assert kept_recomputed < kept / 4
    assert all(torch.equal(one, other) for one, other in zip(gradients, gradients_recomputed, strict=True))


@pytest.mark.parametrize("kind", [None, "value_head", "model"])
def test_training_with_recomputed_layers_changes_no_bit(make_trainer: MakeTrainer, kind: Any) -> None:
    critic = None if kind is None else CriticSection(kind=kind, lr=1e-2)
    options = {
        "preset": "grpo" if kind is None else "ppo",
        "critic": critic,
        "optimizer_steps": 2,
        "kl_coefficient": 0.1,
    }
    plain = make_trainer(**options)
    recomputing = make_trainer(section=FsdpTrainerSection(activation_checkpointing=True), **options)
    for step in (1, 2):
        assert plain.train(*make_batch(step)) == recomputing.train(*make_batch(step))
    assert_same_bits(weights_of(recomputing), weights_of(plain))


class Largest(TorchDispatchMode):
    """Elements of the largest float32 tensor that any operation made."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        for result in tree_leaves(results):
            if isinstance(result, torch.Tensor) and result.dtype == torch.float32:
                self.elements = max(self.elements, result.untyped_storage().nbytes() // 4)
        return results


@pytest.mark.parametrize("entropy", [False, True])
def test_no_tensor_of_all_tokens_by_the_vocabulary_is_made_in_forward_or_backward(entropy: bool) -> None:
    tokens = torch.randint(0, VOCABULARY, (8, 128), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(tokens, dtype=torch.bool)
    mask[:, 0] = False
    found = {}
    for chunk in (32, 1 << 20):
        scorer = TokenScorer(make_model(), 0.9, logits_per_chunk=chunk * VOCABULARY)
        with Largest() as largest:
            logprobs, entropies = scorer(tokens, mask, entropy_gradient=entropy)
            (logprobs + entropies).sum().backward()
        found[chunk] = largest.elements
    hidden = tokens.numel() * 96
    """The widest activation of the layers: 1024 tokens by the width of the feed-forward part."""
    assert found[32] <= hidden < 1016 * VOCABULARY <= found[1 << 20], found

"""LoRA: the model is frozen, and low-rank adapters of its linear layers are trained in its place. Needs peft.

The adapters are peft's. Only the forward pass is ours: it runs the merged weight, because that is what engines sample
with. x W'^T equals an engine's product to the last bit, where peft's x W^T + scaling (x A^T) B^T differs in the last
ones in float32, and by the rounding of W' in bfloat16 (docs/lora.md).

Letters: I inputs and O outputs of a linear layer, R rank, M tokens.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
import torch.nn.functional as F
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora.layer import Linear as AdaptedLinear
from torch import nn

from flashflow.config.sections import LoraSection
from flashflow.errors import ConfigError
from flashflow.trainers.checkpoint import Adapters
from flashflow.trainers.merging import DOWN, UP, base_digest, merged
from flashflow.trainers.sharding import full

ADAPTER = "default"
"""peft's own name for the only one."""
WRAPPED = ".base_layer"
"""What peft adds to the names of the weights of a layer that it adapts."""


class MergedProduct(torch.autograd.Function):
    """x W'^T + bias; the gradient reaches x, A and B.

    With G the gradient by the output and s the scaling: dx = G W', dB = s G^T (x A^T), dA = s (G B)^T x, so that dW',
    as large as W, is never made. W' itself is made again in the backward pass: kept, all layers' together would be a
    second model.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight_OI: torch.Tensor,
        down_RI: torch.Tensor,
        up_OR: torch.Tensor,
        bias_O: torch.Tensor | None,
        scaling: float,
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight_OI, down_RI, up_OR)
        ctx.scaling = scaling
        return F.linear(x, merged(weight_OI, down_RI, up_OR, scaling), bias_O)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight_OI, down_RI, up_OR = ctx.saved_tensors
        scaling, gradient_MO, x_MI = ctx.scaling, gradients[0].flatten(0, -2), x.flatten(0, -2)
        grad_x = grad_down_RI = grad_up_OR = None
        if ctx.needs_input_grad[0]:
            grad_x = gradients[0] @ merged(weight_OI, down_RI, up_OR, scaling)
        if ctx.needs_input_grad[2]:
            grad_down_RI = ((gradient_MO @ up_OR.to(x.dtype)).T @ x_MI).to(down_RI.dtype) * scaling
        if ctx.needs_input_grad[3]:
            grad_up_OR = (gradient_MO.T @ (x_MI @ down_RI.to(x.dtype).T)).to(up_OR.dtype) * scaling
        return grad_x, None, grad_down_RI, grad_up_OR, None, None


class MergedLinear(AdaptedLinear):
    """peft's adapted linear layer, run as one product with the merged weight."""

    adapted = True
    """False: runs as the layer below, for a reference."""

    @property
    def matrices(self) -> tuple[torch.Tensor, torch.Tensor]:
        """A [R, I] and B [O, R]."""
        down_RI, up_OR = self.lora_A[ADAPTER].weight, self.lora_B[ADAPTER].weight
        return cast(torch.Tensor, down_RI), cast(torch.Tensor, up_OR)

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        base = cast(nn.Linear, self.base_layer)
        if not self.adapted:
            return F.linear(x, base.weight, base.bias)
        product: torch.Tensor = MergedProduct.apply(  # type: ignore[no-untyped-call]
            x, base.weight, *self.matrices, base.bias, self.scaling[ADAPTER]
        )
        return product


class Lora:
    """The adapters of one model, and what engines and checkpoints are told of them."""

    def __init__(self, model: Any, section: LoraSection, *, seed: int, dtype: torch.dtype) -> None:
        """Adapts the model in place, which is whole and in float32. seed: of A, which is random; B is 0.
        dtype: of the frozen weights from `freeze` on. Raises ConfigError on target modules that cannot be adapted."""
        self._section, self._dtype = section, dtype
        self._base = base_digest(model)
        self.base_parameters = {name: f"float32{list(parameter.shape)}" for name, parameter in model.named_parameters()}
        """As the checkpoint of a whole model describes them."""
        _check_targets(model, section)
        config = LoraConfig(r=section.rank, lora_alpha=section.alpha, target_modules=section.target_modules)
        config._register_custom_module({nn.Linear: MergedLinear})
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed % 2**63)
            inject_adapter_in_model(config, model)
        self._model = model
        self._layers = {name: each for name, each in model.named_modules() if isinstance(each, MergedLinear)}

    def freeze(self) -> None:
        """Gives the frozen weights their dtype: they need no float32 copy, for nothing is ever added to them."""
        for parameter in self._model.parameters():
            if not parameter.requires_grad:
                parameter.data = parameter.data.to(self._dtype)

    def published(self) -> dict[str, torch.Tensor]:
        """The frozen weights, sharded as they are, under the names of the unmodified model."""
        return {
            name.replace(WRAPPED, ""): parameter
            for name, parameter in self._model.named_parameters()
            if not name.endswith((DOWN, UP))
        }

    def gather(self, name: str, weight: torch.Tensor) -> torch.Tensor:
        """One of `published`, whole and merged; a collective of all ranks."""
        layer = self._layers.get(name.removesuffix(".weight")) if name.endswith(".weight") else None
        if layer is None:
            return full(weight)
        down_RI, up_OR = (full(matrix.detach()) for matrix in layer.matrices)
        return merged(full(weight), down_RI, up_OR, layer.scaling[ADAPTER])

    def describe(self) -> Adapters:
        return Adapters(
            rank=self._section.rank,
            alpha=self._section.alpha,
            target_modules=self._targets(),
            dtype=str(self._dtype).removeprefix("torch."),
            base=self._base,
            parameters={
                name: f"float32{list(parameter.shape)}"
                for name, parameter in self._model.named_parameters()
                if name.endswith((DOWN, UP))
            },
        )

    def _targets(self) -> list[str]:
        if not isinstance(self._section.target_modules, str):
            return self._section.target_modules
        return sorted({name.rpartition(".")[2] for name in self._layers})

    @contextmanager
    def switched_off(self) -> Iterator[None]:
        """The model is the one that the run started from."""
        for layer in self._layers.values():
            layer.adapted = False
        try:
            yield
        finally:
            for layer in self._layers.values():
                layer.adapted = True


class BaseScorer(nn.Module):
    """A scorer with its adapters switched off: the reference of a KL term, which costs no memory of its own."""

    def __init__(self, scorer: nn.Module, lora: Lora) -> None:
        super().__init__()
        self._scorer, self._lora = scorer, lora

    def forward(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, ...]:
        with self._lora.switched_off():
            scores: tuple[torch.Tensor, ...] = self._scorer(*args, **kwargs)
            return scores


def _check_targets(model: Any, section: LoraSection) -> None:
    """peft takes any of several targets that exists, and layers that a merged weight cannot stand for."""
    head = model.get_output_embeddings()
    inner = {name for name, each in model.named_modules() if isinstance(each, nn.Linear) and each is not head}
    if not inner:
        raise ConfigError([f"lora: {type(model).__name__} has no linear layer below its head; remove the section"])
    targets = section.target_modules if not isinstance(section.target_modules, str) else []
    wrong = [target for target in targets if not any(f".{name}".endswith(f".{target}") for name in inner)]
    if wrong:
        leaves = ", ".join(sorted({name.rpartition(".")[2] for name in inner}))
        raise ConfigError(
            [f"lora.target_modules: {target!r} is no linear layer of the model; it has {leaves}" for target in wrong]
        )

"""Adapters merged into the weights below them: W' = W + (alpha / rank) B A (LoRA, 2106.09685, eq. 3). Knows no peft.

Letters: I inputs and O outputs of a linear layer, R rank.
"""

import hashlib
from collections.abc import Mapping
from typing import Any

import torch

from flashflow.errors import ConfigError
from flashflow.trainers.checkpoint import Adapters
from flashflow.transport.weights.digest import digest

DOWN, UP = ".lora_A.default.weight", ".lora_B.default.weight"
"""What the name of an adapter's A, and of its B, adds to that of its linear layer; peft's names."""


def merged(weight_OI: torch.Tensor, down_RI: torch.Tensor, up_OR: torch.Tensor, scaling: float) -> torch.Tensor:
    """W + scaling B A in the dtype of W, rounded once; W itself where B is 0. Without gradient.

    Engines are given this, and the trainer computes with it: the same operations, hence the same bits.
    """
    with torch.no_grad():
        return (up_OR @ down_RI).mul_(scaling).add_(weight_OI).to(weight_OI.dtype)


def base_digest(model: torch.nn.Module) -> str:
    """Of all weights, rounded to bfloat16: the same whether the model was loaded in that or in float32."""
    found = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()):
        found.update(f"{name} {list(parameter.shape)} {digest(parameter.to(torch.bfloat16))}\n".encode())
    return found.hexdigest()[:16]


def merge_into(model: Any, adapters: Adapters, tensors: Mapping[str, torch.Tensor]) -> None:
    """Gives the model that the adapters were trained on their merged weights, in its own dtype.

    tensors: by name, of the adapters. Raises ConfigError, before anything changed, when it is another model.
    """
    found = base_digest(model)
    if found != adapters.base:
        raise ConfigError([
            f"model.path: its weights (digest {found}) are not those that the adapters of the checkpoint were trained "
            f"on ({adapters.base}); name the model that the run began with"
        ])  # fmt: skip
    dtype, scaling = getattr(torch, adapters.dtype), adapters.alpha / adapters.rank
    for name, parameter in model.named_parameters():
        # The trainer's frozen weights have its dtype, whatever this model is loaded in.
        parameter.data = parameter.data.to(dtype).to(parameter.dtype)
        layer = name.removesuffix(".weight")
        if layer + DOWN in tensors:
            down_RI, up_OR = (tensors[layer + end].to(parameter.device) for end in (DOWN, UP))
            parameter.data = merged(parameter.data, down_RI, up_OR, scaling)

"""The layers below the head of a transformers causal LM: which are supported, and how they are run.

Letters: B rows, T padded length, D width.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from flashflow.errors import ConfigError
from flashflow.trainers import attention


def prepare(model: Any) -> None:
    """Attention kernel and mode for training, in place. Raises ConfigError on a model the fsdp trainer cannot run."""
    attention.register()
    model.set_attn_implementation(attention.NAME)
    # Dropout would train another policy than the one that sampled.
    model.eval()
    config = model.config.get_text_config()
    windowed = {kind for kind in getattr(config, "layer_types", None) or () if kind != "full_attention"}
    if windowed:
        raise ConfigError(
            [f"model.path: layers of kind {', '.join(sorted(windowed))}; the fsdp trainer needs full attention"]
        )
    if not hasattr(model.base_model, "layers"):
        raise ConfigError([f"model.path: {type(model).__name__} keeps its layers elsewhere than in base_model.layers"])


def recompute(layers: nn.ModuleList) -> None:
    """Each layer keeps only its inputs for the backward pass, and runs again there. In place; bits stay."""
    for layer in layers:
        layer.forward = _recomputed(layer.forward)


def _recomputed(forward: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **options: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **options)
        # Nothing is drawn in a layer: there is no dropout.
        return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, **options)

    return run


def width_of(model: Any) -> int:
    """D of a causal LM."""
    return int(model.config.get_text_config().hidden_size)


def hidden_states(backbone: Any, tokens_BT: torch.Tensor) -> torch.Tensor:
    """[B, T, D] after the last layer and its norm; tokens_BT int64, padded on the right."""
    length = tokens_BT.shape[1]
    visible = attention.causal_mask(length, tokens_BT.device)
    positions_1T = torch.arange(length, device=tokens_BT.device)[None]
    output = backbone(input_ids=tokens_BT, attention_mask=visible, position_ids=positions_1T, use_cache=False)
    hidden: torch.Tensor = output.last_hidden_state
    return hidden

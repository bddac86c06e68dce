"""The trainer's attention: transformers' own `sdpa` kernel over as many keys as its mask has columns.

Sequences are padded to `safe_tokens` and keys to `safe_length`, the length at which the kernel sums as the engine does:
all else in a layer works on each token by itself and needs no more of them. It is registered as `padded_keys`.
"""

from typing import Any

import torch
import torch.nn.functional as F
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from flashflow.shapes import safe_length

NAME = "padded_keys"


def causal_mask(num_tokens: int, device: torch.device) -> torch.Tensor:
    """Bool [1, 1, queries, keys]: which of the keys each of `num_tokens` queries may see."""
    # Explicit, because the kernel's own causal mode sums in another order than the engine's decode steps.
    shape = (num_tokens, safe_length(num_tokens))
    return torch.ones(shape, dtype=torch.bool, device=device).tril()[None, None]


def attention(
    module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
    attention_mask: torch.Tensor | None, **options: Any,
) -> tuple[torch.Tensor, None]:  # fmt: skip
    """transformers' attention interface; query [B, heads, T, head dimension], key and value likewise. Without a mask
    the kernel's own causal mode."""
    padding = 0 if attention_mask is None else attention_mask.shape[-1] - key.shape[-2]
    if padding > 0:
        key, value = F.pad(key, (0, 0, 0, padding)), F.pad(value, (0, 0, 0, padding))
    mixed: tuple[torch.Tensor, None] = ALL_ATTENTION_FUNCTIONS["sdpa"](
        module, query, key, value, attention_mask, **options
    )
    return mixed


def register() -> None:
    """Make the name known to transformers; repeating it changes nothing."""
    ALL_ATTENTION_FUNCTIONS.register(NAME, attention)

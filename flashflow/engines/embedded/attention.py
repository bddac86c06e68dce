"""The attention function under which a transformers model reads and writes the slot cache.

It is registered as `slot_cache`; the pass in progress (Prefill or Decode) travels as a keyword argument through the
model's own forward, so that engine and trainer run the same layers. Shapes follow flashflow/shapes.py.
Letters: N rows (slots), Q query heads, H key/value heads, G = Q / H, T time, D head dimension.
"""

from typing import Any, Protocol

import torch
import torch.nn.functional as F
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from flashflow.engines.embedded.kv_cache import SlotCache
from flashflow.errors import ConfigError
from flashflow.shapes import safe_rows

NAME = "slot_cache"
"""Without "flash" in it, which transformers takes for a flash-attention kernel."""


class Pass(Protocol):
    """One forward pass over the cache."""

    @property
    def capacity(self) -> int:
        """Longest sequence the cache holds."""
        ...

    def attend(
        self, layer: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float
    ) -> torch.Tensor: ...


class Prefill:
    """All tokens of one request into one slot, causal."""

    def __init__(self, cache: SlotCache, slot: int, mask_TT: torch.Tensor) -> None:
        """mask_TT: additive [query tokens, key length]; the key length may exceed the tokens (`cache_length`)."""
        self._cache, self._slot, self._mask_TT = cache, slot, mask_TT
        self.capacity = cache.length

    def attend(
        self, layer: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """queries [1, Q, T, D], keys and values [1, H, T, D] -> [1, T, Q, D]."""
        self._cache.write_prompt(layer, self._slot, keys[0], values[0])
        keys, values = self._cache.view(layer, self._slot, 1, self._mask_TT.shape[1])
        group = queries.shape[1] // keys.shape[1]
        if group > 1:
            keys, values = keys.repeat_interleave(group, dim=1), values.repeat_interleave(group, dim=1)
        mixed = F.scaled_dot_product_attention(queries, keys, values, attn_mask=self._mask_TT, scale=scale)
        return mixed.transpose(1, 2)


class Decode:
    """The next token of the first N slots."""

    def __init__(self, cache: SlotCache, positions_N: torch.Tensor, mask_NT: torch.Tensor) -> None:
        """mask_NT: additive [N, key length]."""
        self._cache, self._positions_N = cache, positions_N
        self._mask_N11T = mask_NT[:, None, None]
        self.capacity = cache.length

    def attend(
        self, layer: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """queries [N, Q, 1, D], keys and values [N, H, 1, D] -> [N, 1, Q, D]."""
        self._cache.write_tokens(layer, self._positions_N, keys[:, :, 0], values[:, :, 0])
        rows, heads, _, head_dim = queries.shape
        keys, values = self._cache.view(layer, 0, rows, self._mask_N11T.shape[3])
        group = heads // keys.shape[1]
        # The query heads that share a key/value head are the rows of one product, padded to a full block of rows.
        queries = queries.reshape(rows, keys.shape[1], group, head_dim)
        padding = safe_rows(group) - group
        if padding:
            queries = F.pad(queries, (0, 0, 0, padding))
        mixed = F.scaled_dot_product_attention(queries, keys, values, attn_mask=self._mask_N11T, scale=scale)
        return mixed[:, :, :group].reshape(rows, 1, heads, head_dim)


def attention(
    module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
    attention_mask: torch.Tensor | None, *, scaling: float | None = None, slot_pass: Pass, **options: Any,
) -> tuple[torch.Tensor, None]:  # fmt: skip
    """transformers' attention interface."""
    _refuse_unsupported(module, options, slot_pass.capacity)
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    layer: int = module.layer_idx  # type: ignore[assignment]
    return slot_pass.attend(layer, query, key, value, scale), None


def _refuse_unsupported(module: torch.nn.Module, options: dict[str, Any], capacity: int) -> None:
    window = options.get("sliding_window")
    lacking = [name for name in ("softcap", "s_aux", "position_bias") if options.get(name) is not None]
    if window is not None and window < capacity:
        lacking.append(f"sliding_window {window} below the context of {capacity} tokens (engine.max_context_tokens)")
    if lacking:
        raise ConfigError([f"engine.kind torch: {type(module).__name__} needs {', '.join(lacking)}; not supported"])


def register() -> None:
    """Make the name known to transformers; repeating it changes nothing."""
    ALL_ATTENTION_FUNCTIONS.register(NAME, attention)

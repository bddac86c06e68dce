"""The attention function under which a transformers model reads and writes the slot cache.

It is registered as `slot_cache`; the pass in progress (Prefill or Decode) travels as a keyword argument through the
model's own forward, so that engine and trainer run the same layers. Shapes follow flashflow/shapes.py.
Letters: N rows (slots), S slots with a cache, Q query heads, H key/value heads, G = Q / H, T time, D head dimension.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

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


@dataclass(frozen=True, slots=True)
class Writing:
    """Where a pass leaves its keys and values."""

    capacity: int
    rows: tuple[torch.Tensor, ...]
    """Of `SlotCache`."""
    places: torch.Tensor
    """`SlotCache.places` of the tokens in the pass."""

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """keys, values: [N, H, T, D]."""
        self.rows[2 * layer].index_copy_(0, self.places, keys.transpose(1, 2).flatten(0, 2))
        self.rows[2 * layer + 1].index_copy_(0, self.places, values.transpose(1, 2).flatten(0, 2))


@dataclass(frozen=True, slots=True)
class Prefill:
    """All tokens of some requests, causal."""

    writing: Writing
    mask_TT: torch.Tensor
    """Additive [tokens, key length]."""
    group: int
    """G."""
    padding: int
    """Key length less tokens (`cache_length`)."""

    @property
    def capacity(self) -> int:
        return self.writing.capacity

    def attend(
        self, layer: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """queries [N, Q, T, D], keys and values [N, H, T, D] -> [N, T, Q, D]."""
        self.writing.write(layer, keys, values)
        if self.group > 1:
            keys, values = keys.repeat_interleave(self.group, dim=1), values.repeat_interleave(self.group, dim=1)
        if self.padding:
            keys, values = F.pad(keys, (0, 0, 0, self.padding)), F.pad(values, (0, 0, 0, self.padding))
        mixed = F.scaled_dot_product_attention(queries, keys, values, attn_mask=self.mask_TT, scale=scale)
        return mixed.transpose(1, 2)


@dataclass(frozen=True, slots=True)
class Decode:
    """The next token of the first N slots."""

    writing: Writing
    views: tuple[torch.Tensor, ...]
    """`SlotCache.views` of S slots."""
    mask_S11T: torch.Tensor
    """Additive, of the key length."""
    group: int
    """G."""
    spare_rows: bool
    """N > S: the last rows have no cache and attend to nothing."""

    @property
    def capacity(self) -> int:
        return self.writing.capacity

    def attend(
        self, layer: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """queries [N, Q, 1, D], keys and values [N, H, 1, D] -> [N, 1, Q, D]."""
        self.writing.write(layer, keys, values)
        keys, values = self.views[2 * layer], self.views[2 * layer + 1]
        mixed = torch.zeros_like(queries.transpose(1, 2)) if self.spare_rows else None
        if self.spare_rows:
            queries = queries[: keys.shape[0]]
        # The query heads that share a key/value head are the rows of one product, padded to a full block of rows.
        queries = queries.reshape(queries.shape[0], -1, self.group, queries.shape[-1])
        queries = F.pad(queries, (0, 0, 0, safe_rows(self.group) - self.group))
        heads = F.scaled_dot_product_attention(queries, keys, values, attn_mask=self.mask_S11T, scale=scale)
        heads = heads[:, :, : self.group].flatten(1, 2)[:, None]
        if mixed is None:
            return heads
        mixed[: keys.shape[0]] = heads
        return mixed


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

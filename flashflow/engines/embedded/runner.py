"""Forward passes of one model over the slot cache, in shapes that keep every row's bits independent of the others'."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from flashflow.engines.embedded import attention
from flashflow.engines.embedded.kv_cache import CacheShape, SlotCache
from flashflow.engines.embedded.traced import Traced
from flashflow.engines.uniform import Int64Array
from flashflow.errors import ConfigError
from flashflow.shapes import cache_length, safe_tokens

UNBLOCKED_TOKENS = 128
"""Up to here every safe number of tokens is a safe key length too."""


class Runner:
    """Takes the model over: its attention is the slot cache's from here on. Call under `torch.inference_mode`."""

    def __init__(
        self, model: Any, slots: int, max_tokens: int, kv_cache_bytes: int | None = None, traced: bool = True
    ) -> None:
        """slots: how many requests at once. max_tokens: longest sequence of one slot. kv_cache_bytes: None is as many
        as `slots` sequences of `max_tokens` need. traced: replay passes where that gives the same bits.

        Raises ConfigError when the model's positions end before max_tokens, or its cache would hold no such sequence.
        """
        attention.register()
        model.set_attn_implementation(attention.NAME)
        model.eval().requires_grad_(False)
        self.model = model
        _check_context(model, max_tokens)
        parameter = next(model.parameters())
        self.dtype, self.device = parameter.dtype, parameter.device
        self.vocab_size = int(model.get_output_embeddings().weight.shape[0])
        shape, self._group = _attention_shape(model, self.dtype)
        longest = cache_length(max_tokens)
        num_tokens = _pool_tokens(shape, slots, max_tokens, kv_cache_bytes)
        self.cache = SlotCache(shape, num_tokens, longest, self.device)
        self._columns = torch.arange(longest, device=self.device)
        self._causal_masks: dict[int, torch.Tensor] = {}
        self.traceable = traced and self.device.type == "cpu" and _positions_are_static(model)
        """Whether passes may be replayed (traced.py)."""
        self._prefill = Traced("prefill", self._prefill_pass(0), self.traceable)
        self._decode = {spare: Traced("decode", self._decode_pass(spare), self.traceable) for spare in (False, True)}

    def prefill(self, slots: Sequence[int], sequences: Sequence[Int64Array]) -> None:
        """Fill the first positions of some slots, each with its tokens: one and more, of one `safe_tokens`.

        Padding beyond them is overwritten by decode steps.
        """
        length = safe_tokens(len(sequences[0]))
        padded = np.zeros((len(slots), length), dtype=np.int64)
        for row, tokens in zip(padded, sequences, strict=True):
            row[: len(tokens)] = tokens
        inputs = (
            torch.from_numpy(padded).to(self.device),
            self._columns[None, :length],
            self.cache.places(np.array(slots), np.arange(length)[None]),
            self._causal_mask(length),
            self.cache.rows,
        )
        if length <= UNBLOCKED_TOKENS:
            self._prefill((len(slots), length), *inputs)
        else:
            self._prefill_pass(cache_length(length) - length)(*inputs)

    def decode(self, tokens_N: Int64Array, positions_N: Int64Array, slots_N: Int64Array) -> torch.Tensor:
        """Logits [S, V] that follow tokens_N, the tokens of the first slots at positions_N; S = min(N, slots).

        N is of `safe_rows`. slots_N: row i's is i, or -1 for a row whose keys and values are kept nowhere.
        """
        length = cache_length(int(positions_N.max()) + 1)
        rows, slots = len(tokens_N), min(len(tokens_N), self.cache.slots)
        traced = self._decode[rows > slots]
        logits = traced(
            (rows, slots, length),
            torch.from_numpy(tokens_N).to(self.device)[:, None],
            torch.from_numpy(positions_N).to(self.device)[:, None],
            self.cache.places(slots_N, positions_N[:, None]),
            self._columns[:length],
            self.cache.rows,
            self.cache.views(slots, length),
        )
        assert isinstance(logits, torch.Tensor)
        return logits

    def _prefill_pass(self, padding: int) -> torch.nn.Module:
        return _PrefillPass(self.model.base_model, len(self._columns), self._group, padding)

    def _decode_pass(self, spare_rows: bool) -> torch.nn.Module:
        return _DecodePass(self.model, len(self._columns), self._group, spare_rows)

    def _causal_mask(self, length: int) -> torch.Tensor:
        """Additive [length, cache_length(length)]; short ones are kept, prompts of a run being alike."""
        mask = self._causal_masks.get(length)
        if mask is None:
            keys = length if length <= UNBLOCKED_TOKENS else cache_length(length)
            mask = _additive(self._columns[:keys], self._columns[:length, None], self.dtype)
            if length <= 1024:
                self._causal_masks[length] = mask
        return mask


class _PrefillPass(torch.nn.Module):
    def __init__(self, model: Any, capacity: int, group: int, padding: int) -> None:
        super().__init__()
        self.model, self._capacity, self._group, self._padding = model, capacity, group, padding

    def forward(
        self, tokens_NT: torch.Tensor, positions_1T: torch.Tensor, places: torch.Tensor, mask_TT: torch.Tensor,
        rows: tuple[torch.Tensor, ...],
    ) -> torch.Tensor:  # fmt: skip
        writing = attention.Writing(self._capacity, rows, places)
        slot_pass = attention.Prefill(writing, mask_TT, self._group, self._padding)
        output = self.model(input_ids=tokens_NT, position_ids=positions_1T, use_cache=False, slot_pass=slot_pass)
        hidden: torch.Tensor = output.last_hidden_state
        return hidden


class _DecodePass(torch.nn.Module):
    def __init__(self, model: Any, capacity: int, group: int, spare_rows: bool) -> None:
        super().__init__()
        self.model, self._capacity, self._group, self._spare_rows = model, capacity, group, spare_rows

    def forward(
        self, tokens_N1: torch.Tensor, positions_N1: torch.Tensor, places: torch.Tensor, columns_T: torch.Tensor,
        rows: tuple[torch.Tensor, ...], views: tuple[torch.Tensor, ...],
    ) -> torch.Tensor:  # fmt: skip
        mask_ST = _additive(columns_T, positions_N1[: views[0].shape[0]], views[0].dtype)
        writing = attention.Writing(self._capacity, rows, places)
        slot_pass = attention.Decode(writing, views, mask_ST[:, None, None], self._group, self._spare_rows)
        output = self.model(input_ids=tokens_N1, position_ids=positions_N1, use_cache=False, slot_pass=slot_pass)
        logits: torch.Tensor = output.logits[: views[0].shape[0], 0]
        return logits


def _additive(columns_T: torch.Tensor, positions_N1: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """[N, T]: 0 up to the position, -inf beyond."""
    hidden = columns_T > positions_N1
    return torch.zeros_like(hidden, dtype=dtype).masked_fill_(hidden, float("-inf"))


def _check_context(model: Any, max_tokens: int) -> None:
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if limit is not None and max_tokens > limit:
        raise ConfigError(
            [f"engine.max_context_tokens: {max_tokens} exceeds the model's max_position_embeddings {limit}; lower it"]
        )


def _positions_are_static(model: Any) -> bool:
    """False where position embeddings change with the longest sequence, which a trace cannot repeat."""
    rope = getattr(model.config.get_text_config(), "rope_parameters", None)
    return not any(kind in str(rope) for kind in ("dynamic", "longrope"))


def _attention_shape(model: Any, dtype: torch.dtype) -> tuple[CacheShape, int]:
    """And the query heads to a key/value head."""
    config = model.config.get_text_config()
    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None)
    kv_heads = getattr(config, "num_key_value_heads", None)
    shape = CacheShape(
        num_layers=config.num_hidden_layers,
        kv_heads=kv_heads if kv_heads is not None else heads,
        head_dim=head_dim if head_dim is not None else config.hidden_size // heads,
        dtype=dtype,
    )
    return shape, heads // shape.kv_heads


def _pool_tokens(shape: CacheShape, slots: int, max_tokens: int, kv_cache_bytes: int | None) -> int:
    """Scratch included. Raises ConfigError when not one sequence of max_tokens would fit."""
    longest = cache_length(max_tokens)
    if kv_cache_bytes is None:
        return slots * longest + 1
    num_tokens = min(slots * longest + 1, kv_cache_bytes // shape.token_bytes)
    if num_tokens <= longest:
        raise ConfigError(
            [
                f"engine.kv_cache_bytes: {kv_cache_bytes} is less than one sequence of engine.max_context_tokens "
                f"{max_tokens} needs: {longest} + 1 tokens of {shape.token_bytes} bytes, "
                f"{(longest + 1) * shape.token_bytes}; raise the first or lower the second"
            ]
        )
    return num_tokens

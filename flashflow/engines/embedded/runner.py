"""Forward passes of one model over the slot cache, in shapes that keep every row's bits independent of the others'."""

from typing import Any

import numpy as np
import torch

from flashflow.engines.embedded import attention
from flashflow.engines.embedded.kv_cache import SlotCache
from flashflow.engines.uniform import Int64Array
from flashflow.errors import ConfigError
from flashflow.shapes import cache_length, safe_rows, safe_tokens


class Runner:
    """Takes the model over: its attention is the slot cache's from here on. Call under `torch.inference_mode`."""

    def __init__(self, model: Any, slots: int, max_tokens: int) -> None:
        """slots: how many requests at once. max_tokens: longest sequence of one slot.

        Raises ConfigError when the model's positions end before max_tokens.
        """
        attention.register()
        model.set_attn_implementation(attention.NAME)
        model.eval().requires_grad_(False)
        self.model = model
        _check_context(model, max_tokens)
        parameter = next(model.parameters())
        self.dtype, self.device = parameter.dtype, parameter.device
        self.vocab_size = int(model.get_output_embeddings().weight.shape[0])
        self.cache = _make_cache(model, slots, cache_length(max_tokens), self.dtype, self.device)
        self._columns = torch.arange(self.cache.length, device=self.device)
        self._causal_masks: dict[int, torch.Tensor] = {}

    def prefill(self, slot: int, tokens: Int64Array) -> None:
        """Fill the first len(tokens) >= 1 positions of a slot; padding beyond them is overwritten by decode steps."""
        length = safe_tokens(len(tokens))
        padded = np.zeros((1, length), dtype=np.int64)
        padded[0, : len(tokens)] = tokens
        self.model.base_model(
            input_ids=torch.from_numpy(padded).to(self.device),
            position_ids=self._columns[None, :length],
            use_cache=False,
            slot_pass=attention.Prefill(self.cache, slot, self._causal_mask(length)),
        )

    def decode(self, tokens_N: Int64Array, positions_N: Int64Array) -> torch.Tensor:
        """Logits [N, V] that follow tokens_N, the tokens of the first N slots at positions_N; N of `safe_rows`."""
        positions = torch.from_numpy(positions_N).to(self.device)
        length = cache_length(int(positions_N.max()) + 1)
        hidden = self._columns[:length] > positions[:, None]
        mask = torch.zeros(hidden.shape, dtype=self.dtype, device=self.device).masked_fill_(hidden, float("-inf"))
        output = self.model(
            input_ids=torch.from_numpy(tokens_N).to(self.device)[:, None],
            position_ids=positions[:, None],
            use_cache=False,
            slot_pass=attention.Decode(self.cache, positions, mask),
        )
        logits: torch.Tensor = output.logits[:, 0]
        return logits

    def _causal_mask(self, length: int) -> torch.Tensor:
        """Additive [length, cache_length(length)]; short ones are kept, prompts of a run being alike."""
        mask = self._causal_masks.get(length)
        if mask is None:
            hidden = self._columns[: cache_length(length)] > self._columns[:length, None]
            mask = torch.zeros(hidden.shape, dtype=self.dtype, device=self.device).masked_fill_(hidden, float("-inf"))
            if length <= 1024:
                self._causal_masks[length] = mask
        return mask


def _check_context(model: Any, max_tokens: int) -> None:
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if limit is not None and max_tokens > limit:
        raise ConfigError(
            [f"engine.max_context_tokens: {max_tokens} exceeds the model's max_position_embeddings {limit}; lower it"]
        )


def _make_cache(model: Any, slots: int, length: int, dtype: torch.dtype, device: torch.device) -> SlotCache:
    config = model.config.get_text_config()
    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None)
    kv_heads = getattr(config, "num_key_value_heads", None)
    return SlotCache(
        num_layers=config.num_hidden_layers,
        slots=safe_rows(slots),
        kv_heads=kv_heads if kv_heads is not None else heads,
        length=length,
        head_dim=head_dim if head_dim is not None else config.hidden_size // heads,
        dtype=dtype,
        device=device,
    )

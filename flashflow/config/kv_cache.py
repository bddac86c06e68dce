"""How much memory the keys and values of running requests take, from a model folder's description alone."""

import json
from pathlib import Path
from typing import Any

from flashflow.config.sections import EngineSection, ModelSection
from flashflow.shapes import cache_length

_ITEM_BYTES = {"float32": 4, "bfloat16": 2}


def token_bytes(model: ModelSection) -> int | None:
    """Of one token; None when no folder in a form known here says."""
    try:
        values: dict[str, Any] = json.loads((Path(model.path) / "config.json").read_bytes())
        values = values.get("text_config", values)
        heads, layers = values["num_attention_heads"], values["num_hidden_layers"]
        kv_heads = _given(values, "num_key_value_heads", heads)
        head_dim = _given(values, "head_dim", values["hidden_size"] // heads)
        return int(2 * layers * kv_heads * head_dim * _ITEM_BYTES[model.dtype])
    except (OSError, ValueError, AttributeError, KeyError, TypeError):
        return None


def pool_tokens(engine: EngineSection, slots: int) -> int:
    """Tokens of a cache in which so many sequences of the longest context run at once; one is scratch."""
    return slots * cache_length(engine.max_context_tokens) + 1


def _given(values: dict[str, Any], name: str, otherwise: int) -> int:
    value = values.get(name)
    return value if value is not None else otherwise

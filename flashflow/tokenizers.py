"""Tokenizers without torch, for processes that handle text only."""

import json
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerFast
from transformers.utils.hub import cached_file

from flashflow.errors import ConfigError


def load_tokenizer(path: Path | str) -> Any:
    """The fast tokenizer of a model folder or hub name. Raises ConfigError when there is none."""
    try:
        return PreTrainedTokenizerFast.from_pretrained(str(path))
    except (OSError, ValueError) as error:
        raise ConfigError([f"model.path: {path} holds no fast tokenizer: {error}"]) from error


def stop_ids(tokenizer: Any, path: Path | str) -> list[int]:
    """Token ids that end an answer: the tokenizer's end of sequence and those of the model's generation_config.json.

    Raises ConfigError when there is none, since every answer would then run to max_new_tokens.
    """
    named = _generation_config(path).get("eos_token_id")
    found = {tokenizer.eos_token_id, *(named if isinstance(named, list) else [named])} - {None}
    if not found:
        raise ConfigError(
            [f"model.path: {path} names no end of sequence: set eos_token in tokenizer_config.json, or eos_token_id "
             "in generation_config.json"]
        )  # fmt: skip
    return sorted(found)


def _generation_config(path: Path | str) -> dict[str, Any]:
    try:
        file = cached_file(str(path), "generation_config.json", _raise_exceptions_for_missing_entries=False)
    except OSError as error:
        raise ConfigError([f"model.path: {path} is neither a folder nor a reachable hub name: {error}"]) from error
    if file is None:
        return {}
    content: dict[str, Any] = json.loads(Path(file).read_text())
    return content

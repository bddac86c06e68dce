"""Causal language models of transformers, and how many threads they may use. (Tokenizers: tokenizers.py.)"""

from pathlib import Path
from typing import Any, Literal

import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from flashflow.errors import ConfigError

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def resolve_device(device: Literal["auto", "cpu", "cuda"]) -> torch.device:
    """`auto` is CUDA where there is a device. Raises ConfigError when `cuda` is asked for and missing."""
    available = torch.cuda.is_available()
    if device == "cuda" and not available:
        raise ConfigError(["model.device: cuda, but torch finds no CUDA device; use auto or cpu"])
    return torch.device("cuda" if device == "cuda" or (device == "auto" and available) else "cpu")


def load_model(
    path: Path | str,
    dtype: Literal["float32", "bfloat16"] = "float32",
    device: Literal["auto", "cpu", "cuda"] = "auto",
) -> Any:
    """A fresh transformers causal LM from a folder or hub name, in eval mode. Raises ConfigError when it is none."""
    target = resolve_device(device)
    # It would draw over the run's own display, and into logs.
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        model: Any = AutoModelForCausalLM.from_pretrained(str(path), dtype=_DTYPES[dtype])
    except (OSError, ValueError) as error:
        raise ConfigError([f"model.path: {path} holds no causal language model: {error}"]) from error
    return model.to(target).eval()


def set_threads(count: int) -> None:
    """Threads of one operation; operations never run beside each other."""
    torch.set_num_threads(count)

"""`flashflow export`: a checkpoint becomes a Hugging Face folder, or one of peft, which any other program loads."""

from pathlib import Path
from typing import Literal

from flashflow import builtin
from flashflow.builtin import Note
from flashflow.config import Config
from flashflow.errors import ConfigError
from flashflow.folders import whole_folder
from flashflow.launch.stored_run import find_checkpoint
from flashflow.trainers.checkpoint import read_description


def export(config: Config, wanted: str, output: Path, dtype: Literal["float32", "bfloat16"], note: Note) -> Path:
    """Write model, config, generation config and tokenizer to `output`, whole or not at all; the checkpoint's folder.

    In float32 every bit is the trainer's, adapters being merged; in bfloat16 it is what engines of that dtype were
    given. Raises ConfigError: no such checkpoint, one of another model, an output that exists.
    """
    folder = _find(config, wanted, output)
    config = builtin.resolve(config, note)

    import torch
    from transformers.utils import logging as transformers_logging

    from flashflow.models import load_model
    from flashflow.tokenizers import load_tokenizer
    from flashflow.trainers.weights import load_weights

    tokenizer = load_tokenizer(config.model.path)
    model = load_model(config.model.path, "float32", "cpu")
    load_weights(model, folder)
    model.to(getattr(torch, dtype))
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    with whole_folder(output.absolute()) as partial:
        model.save_pretrained(partial)
        tokenizer.save_pretrained(partial)
    return folder


def export_adapter(config: Config, wanted: str, output: Path, note: Note) -> Path:
    """Write the adapters of a checkpoint of LoRA to `output` as a folder of peft; the checkpoint's folder.

    Raises ConfigError: no such checkpoint, one without adapters, an output that exists.
    """
    folder = _find(config, wanted, output)
    adapters = read_description(folder).adapters
    if adapters is None:
        raise ConfigError([f"--adapter: {folder} is of a run without the section lora; leave the option out"])
    config = builtin.resolve(config, note)

    from flashflow.trainers.adapter_folder import write_adapter
    from flashflow.trainers.weights import read_weights

    with whole_folder(output.absolute()) as partial:
        write_adapter(partial, adapters, read_weights(folder), config.model.path)
    return folder


def _find(config: Config, wanted: str, output: Path) -> Path:
    folder = find_checkpoint(config.run_folder, wanted)
    if output.exists() and not (output.is_dir() and not any(output.iterdir())):
        raise ConfigError([f"--output: {output} exists; remove it or name another folder"])
    return folder

"""`flashflow export`: a checkpoint becomes a Hugging Face folder, which any other program loads."""

from pathlib import Path
from typing import Literal

from flashflow import builtin
from flashflow.builtin import Note
from flashflow.config import Config
from flashflow.errors import ConfigError
from flashflow.folders import whole_folder
from flashflow.launch.stored_run import find_checkpoint


def export(config: Config, wanted: str, output: Path, dtype: Literal["float32", "bfloat16"], note: Note) -> Path:
    """Write model, config, generation config and tokenizer to `output`, whole or not at all; the checkpoint's folder.

    In float32 every bit is the trainer's; in bfloat16 it is what engines of that dtype were given. Raises ConfigError:
    no such checkpoint, one of another model, an output that exists.
    """
    folder = find_checkpoint(config.run_folder, wanted)
    if output.exists() and not (output.is_dir() and not any(output.iterdir())):
        raise ConfigError([f"--output: {output} exists; remove it or name another folder"])
    config = builtin.resolve(config, note)

    from transformers.utils import logging as transformers_logging

    from flashflow.models import load_model
    from flashflow.tokenizers import load_tokenizer
    from flashflow.trainers.weights import load_weights

    tokenizer = load_tokenizer(config.model.path)
    model = load_model(config.model.path, dtype, "cpu")
    load_weights(model, folder)
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    with whole_folder(output.absolute()) as partial:
        model.save_pretrained(partial)
        tokenizer.save_pretrained(partial)
    return folder

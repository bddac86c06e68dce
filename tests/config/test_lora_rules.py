"""The section lora: what it refuses when a config is loaded, and what it warns of."""

import pytest
import yaml

from flashflow.config import load_config
from flashflow.config.cautions import cautions
from flashflow.config.model_files import matrices
from flashflow.errors import ConfigError
from tests.ring import make_ring


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return make_ring(tmp_path_factory.mktemp("ring"))


def mistakes(path, *overrides):
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    return [mistake.removesuffix(" (command line)") for mistake in caught.value.mistakes]


def test_an_empty_section_adapts_all_linear_layers(path):
    assert load_config(path).lora is None
    section = load_config(path, ["lora={}"]).lora
    assert (section.rank, section.alpha, section.target_modules) == (16, 32, "all-linear")


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("rank: 0", "lora.rank: 0 must be greater than 0"),
        ("alpha: 0", "lora.alpha: 0 must be greater than 0"),
        ("dropout: 0.05", "lora.dropout: 0.05 would train another policy than the one that sampled"),
        ("target_modules: []", "lora.target_modules: [] adapts nothing; name linear layers, or all-linear"),
        ("target_modules: [q_prj]", "lora.target_modules: 'q_prj' is no linear layer below the head"),
        ("target_modules: [q_proj, lm_head]", "lora.target_modules: 'lm_head' is no linear layer below the head"),
        ("target_modules: [q_norm]", "lora.target_modules: 'q_norm' is no linear layer below the head"),
        ("target_modules: all", "lora.target_modules: 'all' must be all-linear, or a list"),
        ("ranks: 4", "lora.ranks: 4 is given to an unknown key; did you mean lora.rank?"),
    ],
)
def test_a_mistake_names_field_value_and_remedy(path, given, says):
    (found,) = mistakes(path, f"lora={{{given}}}")
    assert found.startswith(says)


def test_an_unknown_layer_gets_the_nearest_name(path):
    (found,) = mistakes(path, "lora={target_modules: [q_prj]}")
    assert found.endswith("did you mean q_proj?")


@pytest.mark.parametrize("target", ["q_proj", "self_attn.q_proj", "model.layers.1.mlp.down_proj"])
def test_a_layer_is_named_by_any_end_of_its_name(path, target):
    assert load_config(path, [f"lora={{target_modules: [{target}]}}"]).lora.target_modules == [target]


def test_layers_of_a_model_that_is_not_at_hand_are_left_to_the_trainer(path):
    assert load_config(path, ["model.path=org/name", "lora={target_modules: [anything]}"]).lora is not None


def test_files_that_are_no_safetensors_have_no_layers(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"nothing")
    (tmp_path / "other.safetensors").write_bytes(b"\xff" * 64)
    assert matrices(tmp_path) == set()


def test_the_default_learning_rate_is_a_caution(path, tmp_path):
    def says(*overrides):
        return [caution for caution in cautions(load_config(path, overrides)) if "ten times" in caution]

    assert says("lora={}") == []  # the file gives one
    config = yaml.safe_load(path.read_text())
    del config["optimizer"]
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    (found,) = [each for each in cautions(load_config(tmp_path / "config.yaml", ["lora={}"])) if "ten times" in each]
    assert found.startswith("optimizer.lr: the default 1e-06")


def test_a_simulated_trainer_has_nothing_to_adapt(path):
    overrides = ["trainer={kind: simulated}", "lora={}"]
    assert any(
        mistake.startswith("lora: has no effect with trainer.kind simulated") for mistake in mistakes(path, *overrides)
    )

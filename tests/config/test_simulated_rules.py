"""Simulated parts: what does not go together is said before anything starts."""

import pytest

from flashflow.config import dump_config, load_config
from flashflow.errors import ConfigError
from tests.simulate.simulated_config import simulated_config, write_simulated


def mistakes(path, *overrides):
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    return caught.value.mistakes


def test_a_simulated_config_needs_no_model_and_reads_back(tmp_path):
    config = simulated_config(tmp_path)
    assert config.simulated
    (tmp_path / "again.yaml").write_text(dump_config(config))
    assert load_config(tmp_path / "again.yaml") == config


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("engine={kind: torch}", "engine.kind: torch does not go with trainer.kind simulated"),
        ("trainer={kind: fsdp}", "trainer.kind: fsdp does not go with engine.kind simulated"),
        ("data.source={kind: reasoning_gym, task: chain_sum}", "data.source.kind: reasoning_gym does not go with"),
        ("engine.kind=simulted", "engine.kind: 'simulted' is no kind of engine; did you mean simulated?"),
        ("engine.answer_tokens.kind=lognrmal", "engine.answer_tokens.kind: 'lognrmal' is no kind of answer_tokens"),
        ("engine.decode_tokens_per_s=1", "rollout.turn_deadline_s: 300 ends the longest answers"),
        (
            "simulate.step_s={kind: empirical, path: nowhere}",
            "simulate.step_s.path: 'nowhere' cannot be read: ",
        ),
        ("simulate.crash_rate=2", "simulate.crash_rate: 2 must be at most 1"),
    ],
)
def test_a_mistake_names_path_value_and_remedy(tmp_path, override, says):
    assert any(mistake.startswith(says) for mistake in mistakes(write_simulated(tmp_path), override))


def test_a_real_run_has_nothing_to_say_of_simulated_environments(tmp_path):
    found = mistakes(write_simulated(tmp_path), "trainer={kind: fsdp}", "simulate.crash_rate=0.1")
    assert any(mistake.startswith("simulate.crash_rate: has no effect with trainer.kind fsdp") for mistake in found)

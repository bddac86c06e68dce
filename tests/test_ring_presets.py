"""Every preset trains through the real ring, fresh and stale, and shows what is its own."""

import math
from pathlib import Path

import pytest
import torch

from flashflow.algorithms.presets import PRESETS
from flashflow.config import load_config
from flashflow.observe.metrics import read_metrics
from flashflow.quickstart import ensure_model
from tests.ring import final_weights, make_ring, metrics
from tests.test_ring import in_process, play, play_config

OWN: dict[str, tuple[str, ...]] = {
    "grpo": ("r_mean", "w_mean", "effective_sample_size"),
    "dr_grpo": ("r_mean", "w_mean"),
    "dapo": ("r_mean", "w_mean"),
    "gspo": ("r_mean", "w_mean"),
    "cispo": ("r_mean", "w_mean"),
    "ppo": ("value_loss", "value", "value_clip_fraction", "explained_variance", "critic_grad_norm"),
    "decoupled_ppo": ("value_loss", "value", "value_clip_fraction", "explained_variance", "critic_grad_norm", "w_max"),
    "rloo": ("w_mean",),
    "reinforce_pp": ("r_mean", "w_mean"),
    "tis": ("rho_mean", "rho_max"),
    "topr": ("rho_mean", "rho_max"),
    "weighted_topr": ("rho_mean", "rho_max"),
    "kimi": ("rho_mean", "rho_max"),
    "opmd": ("w_mean",),
    "dppo": ("rho_mean", "rho_max"),
}
ROOT = Path(__file__).resolve().parent.parent
CORRECTED = ("correction_weight", "masked_fraction")
"""Of the presets that are given a correction at alpha > 0."""
CARRY_RHO = {"tis", "topr", "weighted_topr", "dppo", "decoupled_ppo"}


def test_the_table_names_every_preset():
    assert OWN.keys() == PRESETS.keys()


@pytest.mark.slow
@pytest.mark.parametrize("alpha", [0, 2])
@pytest.mark.parametrize("preset", sorted(PRESETS))
def test_a_preset_trains_through_the_ring(tmp_path, preset, alpha):
    overrides = in_process(rollout__alpha=alpha, algorithm__preset=preset)
    path = make_ring(tmp_path, overrides={**overrides, "run.steps": 3, "checkpoint.every_steps": 0})
    play(path, seed=1, virtual=True)
    assert_trained(metrics(path), preset, alpha)


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cache")
    ensure_model(folder, 0)
    return folder


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("alpha", [0, 2])
@pytest.mark.parametrize("preset", sorted(PRESETS))
def test_a_preset_trains_the_quickstart_model(tmp_path, cache, preset, alpha):
    overrides = {
        "run.folder": tmp_path,
        "run.runtime": "in_process",
        "run.steps": 3,
        "optimizer.warmup_steps": 0,
        "model.cache": cache,
        "rollout.alpha": alpha,
        "batch.groups": 4,
        "algorithm.preset": preset,
        "evaluation.every_steps": 0,
        "checkpoint.every_steps": 0,
    }
    config = load_config(ROOT / "configs" / "quickstart.yaml", [f"{path}={value}" for path, value in overrides.items()])
    play_config(config, seed=1, virtual=True)
    assert_trained(read_metrics(config.run_folder / "metrics.jsonl"), preset, alpha)


def assert_trained(lines: list[dict], preset: str, alpha: int) -> None:
    assert [line["step"] for line in lines] == [1, 2, 3]
    expected = OWN[preset] + (CORRECTED if alpha > 0 and preset not in CARRY_RHO else ())
    for line in lines:
        assert line["nonfinite_values"] == 0
        assert math.isfinite(line["loss"])
        assert line["grad_norm"] > 0
        assert [name for name in expected if name not in line] == []
        assert line["staleness_max"] <= alpha
    assert (max(line["staleness_max"] for line in lines) > 0) is (alpha > 0)


FILE = """
def half_clip(terms):
    bounded = terms.r.clamp(1 - terms.config.clip_low, 1 + terms.config.clip_high)
    return (-terms.r * terms.advantages).maximum(-bounded * terms.advantages) / 2
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("algorithm", "critic"),
    [
        ({"preset": "grpo"}, None),
        ({"preset": "tis"}, None),
        ({"preset": "grpo", "anchor": "behaviour"}, None),
        ({"preset": "ppo"}, {"kind": "model", "lr": 1e-3}),
        ({"preset": "grpo", "loss": "FOLDER/my_loss.py:half_clip", "clip_low": 0.2, "clip_high": 0.2}, None),
    ],
)
def test_several_optimizer_steps_a_batch_raise_the_version_by_one(tmp_path, algorithm, critic):
    (tmp_path / "my_loss.py").write_text(FILE)
    overrides = in_process(rollout__alpha=1, batch__optimizer_steps=2, batch__epochs=2)
    overrides |= {
        f"algorithm.{name}": value.replace("FOLDER", str(tmp_path)) if name == "loss" else value
        for name, value in algorithm.items()
    }
    overrides |= {f"critic.{name}": value for name, value in (critic or {}).items()}
    path = make_ring(tmp_path, overrides={**overrides, "run.steps": 3})
    play(path, seed=1, virtual=True)
    for step, line in enumerate(metrics(path), start=1):
        assert (line["step"], line["version"], line["optimizer_steps"]) == (step, step, 4)
        assert line["nonfinite_values"] == 0
        assert ("r_max" in line) is (algorithm["preset"] != "tis")
        assert line.get("r_max", 2) > 1
        assert ("value_loss" in line) is (critic is not None)


@pytest.mark.slow
def test_a_resumed_ppo_run_equals_an_uninterrupted_one(tmp_path):
    """Loss, value loss and gradient norms of every step, and the final weights."""
    options = in_process(algorithm__preset="ppo", batch__epochs=2)
    whole = make_ring(tmp_path / "whole", overrides=options)
    play(whole)
    first = make_ring(tmp_path / "parts", overrides={**options, "run.steps": 2})
    play(first)
    play(make_ring(tmp_path / "parts", overrides=options), resume=True)
    for one, other in zip(metrics(whole), metrics(first), strict=True):
        for name in ("loss", "value_loss", "grad_norm", "critic_grad_norm", "explained_variance", "reward_mean"):
            assert one[name] == other[name], name
    expected, found = final_weights(whole), final_weights(first)
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())

"""Every preset trains through the real ring, fresh and stale, and shows what is its own."""

import math

import pytest

from flashflow.algorithms.presets import PRESETS
from tests.ring import make_ring, metrics
from tests.test_ring import in_process, play

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
    lines = metrics(path)
    assert [line["step"] for line in lines] == [1, 2, 3]
    expected = OWN[preset] + (CORRECTED if alpha > 0 and preset not in CARRY_RHO else ())
    for line in lines:
        assert line["nonfinite_values"] == 0
        assert math.isfinite(line["loss"])
        assert line["grad_norm"] > 0
        assert [name for name in expected if name not in line] == []
        assert line["staleness_max"] <= alpha
    assert (max(line["staleness_max"] for line in lines) > 0) is (alpha > 0)

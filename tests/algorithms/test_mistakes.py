"""What `mistakes` and `resolve` say of a preset and its overrides; needs no torch."""

import subprocess
import sys

import pytest
from pydantic import ValidationError

from flashflow.algorithms.presets import PRESETS, mistakes, resolve
from flashflow.algorithms.settings import CLIP_DEFAULTS, GROUP_BASELINES, SELF_CORRECTING, CorrectionConfig, LossConfig
from flashflow.errors import ConfigError


def found(preset, overrides=None, *, alpha=1.0, group_size=4):
    return mistakes(preset, overrides or {}, alpha=alpha, group_size=group_size)


def paths(*args, **kwargs):
    return [path for path, _ in found(*args, **kwargs)]


def test_the_presets_are_the_table():
    table = {
        "grpo": ("grpo", "clip", "seq_mean_token_mean"),
        "dr_grpo": ("dr_grpo", "clip", "seq_mean_token_sum_norm"),
        "dapo": ("grpo", "clip", "token_mean"),
        "gspo": ("grpo", "gspo", "seq_mean_token_mean"),
        "cispo": ("grpo", "cispo", "token_mean"),
        "ppo": ("gae", "clip", "token_mean"),
        "decoupled_ppo": ("gae", "decoupled", "token_mean"),
        "rloo": ("rloo", "reinforce", "seq_mean_token_sum"),
        "reinforce_pp": ("reinforce_pp", "clip", "seq_mean_token_mean"),
        "tis": ("dr_grpo", "tis", "token_mean"),
        "topr": ("dr_grpo", "topr", "token_mean"),
        "weighted_topr": ("dr_grpo", "weighted_topr", "token_mean"),
        "kimi": ("dr_grpo", "kimi", "token_mean"),
        "opmd": ("opmd", "reinforce", "token_mean"),
        "dppo": ("dr_grpo", "dppo_tv", "token_mean"),
    }
    assert {name: (a.estimator, c.surrogate, c.aggregation) for name, (a, c) in PRESETS.items()} == table
    assert all(c.kl_coefficient == 0 and not c.correction.active and c.anchor == "prox" for _, c in PRESETS.values())


def test_clip_ranges_are_the_papers():
    assert {name: PRESETS[name][1].clip_bounds for name in ("grpo", "dapo", "gspo", "cispo", "decoupled_ppo")} == {
        "grpo": (0.2, 0.2),
        "dapo": (0.2, 0.28),
        "gspo": (3e-4, 4e-4),
        "cispo": (None, 0.2),
        "decoupled_ppo": (0.2, 0.2),
    }


@pytest.mark.parametrize("alpha", [0.0, 1.0])
@pytest.mark.parametrize("preset", sorted(PRESETS))
def test_a_preset_as_it_is_has_no_mistake(preset, alpha):
    assert found(preset, alpha=alpha) == []
    advantage, loss = resolve(preset, {}, alpha=alpha)
    assert advantage == PRESETS[preset][0]
    if alpha == 0:
        assert loss == PRESETS[preset][1]


@pytest.mark.parametrize("preset", sorted(PRESETS))
def test_at_alpha_above_zero_the_default_is_truncation_at_two_where_nothing_else_weights(preset):
    correction = resolve(preset, {}, alpha=0.5)[1].correction
    own = PRESETS[preset][1].surrogate in SELF_CORRECTING
    assert (correction.kind, correction.level) == (("none", "token") if own else ("truncate", "token"))
    assert own or correction.bounds == (0, 2.0)


def test_every_mistake_is_listed_with_its_path():
    assert paths(
        "grpo",
        {"clip_lw": 1, "clip_low": -1, "gamma": 0.9, "kl_estimator": "k3", "correction": {"kind": "cut", "veto": -1}},
        group_size=1,
    ) == ["clip_lw", "clip_low", "correction.kind", "correction.veto", "gamma", "kl_estimator", "estimator"]


def test_resolve_raises_them_all_with_the_section():
    with pytest.raises(ConfigError) as raised:
        resolve("grpo", {"clip_low": -1, "tv_bound": 0.1}, alpha=0)
    assert [line.split(":")[0] for line in raised.value.mistakes] == ["algorithm.clip_low", "algorithm.tv_bound"]


def test_an_unknown_name_brings_the_nearest():
    assert found("gropo") == [("preset", "unknown preset 'gropo': did you mean 'grpo'?")]
    assert found("grpo", {"agregation": "token_mean"}) == [
        ("agregation", "unknown option: did you mean 'aggregation'?")
    ]
    assert "valid are grpo, dr_grpo" in found("xyz")[0][1]


def test_a_bad_value_is_shown():
    assert found("grpo", {"aggregation": "mean"})[0][1].endswith("(got 'mean')")
    assert paths("grpo", {"clip_high": float("nan")}) == ["clip_high"]
    assert paths("grpo", {"dual_clip": 0.5}) == ["dual_clip"]
    assert paths("grpo", {"loss": "no colon"}) == ["loss"]
    assert paths("tis", {"rho_low": 2}) == ["rho_low"]
    assert paths("tis", {"rho_high": 0.5, "rho_low": 0.5}) == ["rho_low"]
    assert paths("grpo", {"correction": 3}) == ["correction"]


def test_scale_is_derived_and_no_option():
    assert found("opmd", {"scale": 1}) == [("scale", "scale follows from opmd_tau: set opmd_tau, or remove it")]
    assert resolve("opmd", {"opmd_tau": 3}, alpha=0)[1].scale == 0.25
    assert resolve("grpo", {"estimator": "opmd"}, alpha=0)[1].scale == 0.5
    assert resolve("opmd", {"estimator": "grpo"}, alpha=0)[1].scale == 1


@pytest.mark.parametrize("preset", sorted(PRESETS))
def test_a_group_of_one_is_refused_where_the_group_is_the_baseline(preset):
    grouped = PRESETS[preset][0].estimator in GROUP_BASELINES
    assert paths(preset, group_size=1) == (["estimator"] if grouped else [])
    if grouped:
        assert "rollout.group_size = 1" in found(preset, group_size=1)[0][1]


@pytest.mark.parametrize("preset", ["decoupled_ppo", "tis", "topr", "weighted_topr", "dppo"])
def test_a_correction_that_would_weight_twice_is_refused(preset):
    for correction in ("truncate", {"kind": "mask"}, {"veto": 1e-4}):
        ((path, message),) = found(preset, {"correction": correction})
        assert path == "correction"
        assert f"surrogate {PRESETS[preset][1].surrogate} weights by the ratio itself" in message
    assert found(preset, {"correction": "none"}) == []
    with pytest.raises(ValidationError, match="weight twice"):
        LossConfig(surrogate=PRESETS[preset][1].surrogate, correction="truncate")


def test_a_correction_besides_anchor_behaviour_is_refused():
    ((path, message),) = found("grpo", {"anchor": "behaviour", "correction": "mask"})
    assert path == "correction"
    assert "w is 1" in message
    assert not resolve("grpo", {"anchor": "behaviour"}, alpha=1)[1].correction.active


@pytest.mark.parametrize("none", ["none", {"kind": "none"}])
def test_none_written_out_is_taken_at_its_word(none):
    assert found("grpo", {"correction": none}) == []
    assert not resolve("grpo", {"correction": none}, alpha=1)[1].correction.active
    assert found("weighted_topr", {"weight_negative": 0, "correction": none}) == []


def test_off_policy_handling_that_handles_nothing_is_a_mistake():
    ((path, message),) = found("weighted_topr", {"weight_negative": 0})
    assert path == "weight_negative"
    assert "correction: none" in message
    assert found("weighted_topr", {"weight_negative": 0}, alpha=0) == []


def test_a_partial_correction_is_laid_over_the_default():
    correction = resolve("grpo", {"correction": {"level": "geometric"}}, alpha=1)[1].correction
    assert correction == CorrectionConfig(kind="truncate", level="geometric")
    veto = resolve("grpo", {"correction": {"veto": 1e-4}}, alpha=1)[1].correction
    assert (veto.kind, veto.veto) == ("truncate", 1e-4)
    assert paths("grpo", {"correction": {"level": "geometric"}}, alpha=0) == ["correction"]


@pytest.mark.parametrize(
    ("correction", "message"),
    [
        ({"kind": "mask", "level": "sequence"}, "needs lower and upper"),
        ({"kind": "reject", "level": "sequence", "lower": 0.1}, "needs lower and upper"),
        ({"kind": "mask", "lower": 3}, "lower = 3.0 must be below upper = 2.0"),
        ({"kind": "truncate", "lower": 0.1}, "no effect with kind truncate"),
        ({"kind": "none", "upper": 3}, "no effect with kind none"),
    ],
)
def test_bounds_that_do_not_fit_the_kind_are_refused(correction, message):
    ((path, text),) = found("grpo", {"correction": correction})
    assert path == "correction"
    assert message in text


def test_default_bounds():
    assert CorrectionConfig(kind="mask").bounds == (0.5, 2)
    assert CorrectionConfig(kind="reject", level="geometric").bounds == (0.999, 1.001)
    assert CorrectionConfig(kind="truncate", level="sequence").bounds == (0, 2)


def test_kl_is_weighted_at_alpha_above_zero_unless_told_otherwise():
    kl = {"kl_coefficient": 0.1}
    assert resolve("grpo", kl, alpha=1)[1].kl_importance
    assert not resolve("grpo", kl, alpha=0)[1].kl_importance
    assert not resolve("grpo", kl | {"kl_importance": False}, alpha=1)[1].kl_importance
    assert not resolve("grpo", kl | {"kl_placement": "reward"}, alpha=1)[1].kl_importance
    assert resolve("grpo", kl, alpha=1)[1].kl_estimator == "k2"


def test_kl_in_the_reward_takes_no_estimator():
    kl = {"kl_coefficient": 0.1, "kl_placement": "reward"}
    assert paths("rloo", kl | {"kl_estimator": "k3"}) == ["kl_estimator"]
    assert paths("rloo", kl | {"kl_importance": True}) == ["kl_importance"]
    assert found("rloo", kl | {"kl_estimator": "k1"}) == []
    assert paths("rloo", {"kl_estimator": "k1"}) == ["kl_estimator"]


def test_another_surrogate_brings_its_own_clip_range():
    assert resolve("dapo", {"surrogate": "gspo"}, alpha=0)[1].clip_bounds == CLIP_DEFAULTS["gspo"]
    assert resolve("dapo", {"surrogate": "gspo", "clip_high": 0.1}, alpha=0)[1].clip_bounds == (3e-4, 0.1)
    assert resolve("dapo", {"surrogate": "clip"}, alpha=0)[1].clip_bounds == (0.2, 0.28)


def test_a_loss_of_ones_own_replaces_the_surrogate():
    assert found("grpo", {"loss": "mine:loss", "clip_low": 0.1, "tv_bound": 0.3}) == []
    assert paths("grpo", {"loss": "mine:loss", "surrogate": "clip"}) == ["surrogate"]
    assert resolve("tis", {"loss": "mine:loss"}, alpha=1)[1].correction.kind == "truncate"


def test_decoupled_ppo_may_drop_the_critic():
    advantage, loss = resolve("decoupled_ppo", {"estimator": "grpo"}, alpha=1)
    assert (advantage.estimator, loss.surrogate) == ("grpo", "decoupled")
    assert paths("decoupled_ppo", {"estimator": "grpo", "lam": 0.9}) == ["lam"]


def test_presets_filters_and_replay_import_no_torch():
    modules = "presets, options, settings, stats, filters, rewards, replay"
    code = f"from flashflow.algorithms import {modules}; import sys; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)

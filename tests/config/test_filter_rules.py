"""Sections filters, overlong and replay: what presets fill in, and what contradicts."""

from pathlib import Path

import pytest

from flashflow.algorithms.presets import PRESETS
from flashflow.algorithms.settings import FilterConfig, ReplayConfig, ShapingConfig
from flashflow.config import load_config
from flashflow.config.cautions import cautions
from flashflow.errors import ConfigError

QUICKSTART = Path(__file__).resolve().parents[2] / "configs" / "quickstart.yaml"
"""grpo; sampling.max_new_tokens 40."""


def load(*overrides):
    return load_config(QUICKSTART, overrides)


@pytest.mark.parametrize("preset", sorted(PRESETS))
def test_only_dapo_filters_and_penalises_of_itself(preset):
    config = load(f"algorithm.preset={preset}")
    assert config.filtering.dynamic is (preset == "dapo")
    assert (config.shaping.budget is not None) is (preset == "dapo")
    assert config.replaying is None


def test_dapo_scales_the_paper_s_lengths_to_the_longest_answer():
    assert load("algorithm.preset=dapo").shaping == ShapingConfig(budget=40, cache=8)
    assert load("algorithm.preset=dapo", "overlong.budget=30").shaping == ShapingConfig(budget=30, cache=6)
    assert load("algorithm.preset=dapo", "sampling.max_new_tokens=4").shaping == ShapingConfig(budget=4, cache=1)


@pytest.mark.parametrize(
    ("overrides", "shaping"),
    [
        (["overlong.cache=10"], ShapingConfig(budget=40, cache=10)),
        (["overlong.penalty=true"], ShapingConfig(budget=40, cache=8)),
        (["overlong.mask_truncated=true"], ShapingConfig(mask_truncated=True)),
        (["algorithm.preset=dapo", "overlong.mask_truncated=true"], ShapingConfig(mask_truncated=True)),
        (["algorithm.preset=dapo", "overlong.penalty=false"], ShapingConfig()),
        (
            ["overlong.penalty=true", "overlong.mask_truncated=true"],
            ShapingConfig(budget=40, cache=8, mask_truncated=True),
        ),
    ],
)
def test_the_overlong_penalty_is_what_is_given_or_the_preset_s(overrides, shaping):
    assert load(*overrides).shaping == shaping


def test_filters_and_replay_are_what_is_given():
    config = load("algorithm.preset=dapo", "filters.dynamic=false", "filters.mean_lower=0.1", "replay.enabled=true")
    assert config.filtering == FilterConfig(mean_lower=0.1)
    assert config.replaying == ReplayConfig()
    assert load("filters.dynamic=true", "filters.max_filtered_fraction=0.5").filtering == FilterConfig(
        dynamic=True, max_filtered_fraction=0.5
    )
    assert load("replay.enabled=true", "replay.capacity=3").replaying == ReplayConfig(capacity=3)


def test_replayed_samples_are_as_old_as_the_algorithm_must_correct():
    assert load("rollout.alpha=0", "replay.enabled=true").trained_staleness == 4
    assert load("rollout.alpha=8", "replay.enabled=true").trained_staleness == 8
    assert load("rollout.alpha=0").trained_staleness == 0


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["filters.mean_lower=0.5", "filters.mean_upper=0.5"], "filters.mean_lower: 0.5 must be below filters.mean_up"),
        (["filters.max_filtered_fraction=0.5"], "filters.max_filtered_fraction: 0.5 has no effect while filters.dyn"),
        (["filters.max_filtered_fraction=1"], "filters.max_filtered_fraction: 1 must be less than 1"),
        (
            ["filters.dynamic=true", "rollout.group_size=1", "algorithm.preset=reinforce_pp"],
            "rollout.group_size: 1 gives no group a signal, so filters.dynamic true replaces all",
        ),
        (
            ["rollout.failures=filter", "rollout.max_failed_fraction=1"],
            "rollout.max_failed_fraction: 1 with rollout.failures filter would",
        ),
        (["rollout.max_failed_fraction=1"], "rollout.max_failed_fraction: 1 with rollout.failures mask would"),
        (["rollout.min_members=99"], "rollout.min_members: 99 is more than rollout.group_size"),
        (["rollout.min_members=1"], "rollout.min_members: 1 has no effect with rollout.straggler_deadline_s null"),
        (["overlong.penalty=false", "overlong.budget=9"], "overlong.budget: 9 has no effect with overlong.penalty fa"),
        (["overlong.cache=41"], "overlong.cache: 41 is more than sampling.max_new_tokens 40"),
        (["overlong.budget=9", "overlong.cache=10"], "overlong.cache: 10 is more than overlong.budget 9"),
        (["overlong.budget=60"], "overlong.budget: 60 less overlong.cache 12 is not below sampling.max_new_tokens 40"),
        (["replay.capacity=3"], "replay.capacity: 3 has no effect with replay.enabled false"),
        (["replay.max_replay_staleness=3"], "replay.max_replay_staleness: 3 has no effect with replay.enabled false"),
        (
            ["replay.enabled=true", "filters.dynamic=true"],
            "replay.enabled: true together with filters.dynamic true: both replace",
        ),
        (
            ["replay.enabled=true", "algorithm.preset=dapo"],
            "replay.enabled: true together with filters.dynamic true (of algorithm.preset dapo)",
        ),
        (
            ["replay.enabled=true", "rollout.group_size=1", "algorithm.preset=reinforce_pp"],
            "replay.enabled: true, but with rollout.group_size 1 no group has a signal",
        ),
        (
            ["rollout.alpha=0", "replay.enabled=true", "algorithm.preset=weighted_topr", "algorithm.weight_negative=0"],
            "algorithm.weight_negative: samples may be 4 versions old",
        ),
    ],
)
def test_what_contradicts_or_does_nothing_is_refused(overrides, says):
    with pytest.raises(ConfigError) as caught:
        load(*overrides)
    assert len(caught.value.mistakes) == 1
    assert caught.value.mistakes[0].startswith(says)


def test_cautions_name_what_leaves_the_unbiased_mode():
    assert not [caution for caution in cautions(load()) if "favours short answers" in caution]
    for override in (
        "algorithm.preset=dapo",
        "filters.mean_lower=0.1",
        "rollout.failures=filter",
        "rollout.redundant_groups=1",
        "rollout.redundant_members=1",
        "rollout.straggler_deadline_s=60",
    ):
        assert [caution for caution in cautions(load(override)) if "favours short answers" in caution], override
    assert [caution for caution in cautions(load("replay.enabled=true")) if caution.startswith("replay.enabled: true")]

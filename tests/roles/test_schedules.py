"""The baselines: what overlaps under which schedule, in the ring on virtual time."""

import pytest

from flashflow.algorithms.settings import FilterConfig
from flashflow.config import load_config
from flashflow.errors import ConfigError
from tests.ring import make_ring
from tests.roles.rollout_ring import lengths, play


def times(played, group_range):
    """(ends of generation, starts of scoring) of the groups."""
    ended = [at for engine in played.engines for at, sample in engine.ended if sample.group in group_range]
    scored = [at for at, sample in played.reward.started if sample.group in group_range]
    return ended, scored


def test_naively_nothing_is_scored_before_the_whole_batch_is_generated(tmp_path):
    played = play(tmp_path, steps=4, alpha=0.0, schedule="sync_naive", length_of=lengths(1))
    for step in range(4):
        ended, scored = times(played, range(2 * step, 2 * step + 2))
        assert len(ended) == len(scored) == 4
        assert min(scored) >= max(ended)
    assert played.leftovers == {}


def test_with_queue_scheduling_a_reward_starts_when_its_own_answer_ends(tmp_path):
    played = play(tmp_path, steps=4, alpha=0.0, schedule="sync_queue", length_of=lengths(1))
    for step in range(4):
        ended, scored = times(played, range(2 * step, 2 * step + 2))
        assert sorted(scored) == pytest.approx(sorted(ended))
    assert {row.initiating_version + 1 == manifest.step for manifest in played.manifests for row in manifest.rows} == {
        True
    }


def test_asynchronously_the_next_batch_is_generated_while_one_is_trained(tmp_path):
    length_of = lengths(1)
    options = {
        "steps": 8,
        "length_of": length_of,
        "fate_of": lambda score: 5.0 if length_of(score.sample) < 10 else 0.5,  # beside the longest answers, or after
    }
    asynchronous = play(tmp_path / "a", **options)
    queued = play(tmp_path / "q", alpha=0.0, schedule="sync_queue", **options)
    naive = play(tmp_path / "n", alpha=0.0, schedule="sync_naive", **options)
    assert asynchronous.taken_at[-1] < queued.taken_at[-1] < naive.taken_at[-1]


def test_naively_crashes_and_filtered_groups_are_made_up_for(tmp_path):
    crashed = set()

    def fate_of(score):
        if score.sample.group % 3 == 0 and score.sample.retry == 0:
            crashed.add(score.sample)
            return None
        return 0.5

    played = play(
        tmp_path,
        steps=5,
        alpha=0.0,
        schedule="sync_naive",
        fate_of=fate_of,
        filters=FilterConfig(dynamic=True),
        reward_of=lambda sample: float(sample.group % 4 == 1 or sample.member),
    )
    assert len(played.manifests) == 5
    assert crashed
    assert played.stats["filtered"] > 0
    assert played.leftovers == {}


def test_without_prompt_replication_a_group_stays_on_one_engine_and_takes_longer(tmp_path):
    options = {"steps": 4, "alpha": 0.0, "groups": 8, "group_size": 8, "num_engines": 4, "slots": 8, "concurrency": 64}
    together = play(tmp_path / "t", replicate_prompts=False, length_of=lengths(2), **options)
    apart = play(tmp_path / "a", length_of=lengths(2), **options)
    assert sum(len(engine.groups) for engine in together.engines) == together.ledger.next_group
    assert sum(len(engine.groups) for engine in apart.engines) > apart.ledger.next_group
    assert apart.taken_at[-1] < together.taken_at[-1]
    assert together.leftovers == {}


def test_without_prompt_replication_crashed_members_are_tried_again_alone(tmp_path):
    def fate_of(score):
        return None if score.sample.member == 1 and score.sample.retry == 0 else 0.5

    played = play(tmp_path, steps=5, replicate_prompts=False, fate_of=fate_of)
    assert len(played.manifests) == 5
    assert {row.sample.retry for manifest in played.manifests for row in manifest.rows} == {0, 1}


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (
            {"rollout.replicate_prompts": False, "rollout.concurrency": 3},
            "rollout.replicate_prompts: false starts the 4",
        ),
        (
            {"rollout.alpha": 1, "rollout.schedule": "sync_queue"},
            "rollout.schedule: sync_queue is synchronous, but rollo",
        ),
        ({"rollout.alpha": 0.5, "rollout.schedule": "sync_naive"}, "but rollout.alpha is 0.5; set alpha to 0"),
        (
            {"rollout.schedule": "sync_naive", "rollout.redundant_groups": 2},
            "rollout.redundant_groups: 2 contradicts rol",
        ),
        (
            {"rollout.schedule": "sync_naive", "rollout.redundant_members": 2},
            "rollout.redundant_members: 2 contradicts",
        ),
        (
            {"rollout.schedule": "sync_naive", "rollout.straggler_deadline_s": 9},
            "rollout.straggler_deadline_s: 9 contra",
        ),
        (
            {"rollout.schedule": "sync_naive", "rollout.concurrency": 15},
            "rollout.concurrency: 15 x placement.env 1 is less",
        ),
    ],
)
def test_a_schedule_refuses_what_contradicts_it(tmp_path, overrides, says):
    with pytest.raises(ConfigError) as caught:
        load_config(make_ring(tmp_path, overrides=overrides))
    assert len(caught.value.mistakes) == 1
    assert says in caught.value.mistakes[0]

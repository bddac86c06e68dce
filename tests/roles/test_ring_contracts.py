"""Contracts 1-3 in the ring of real roles, over random latencies, failures and options, on virtual time."""

import math
import tempfile
from collections import Counter
from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flashflow.algorithms.settings import FilterConfig
from flashflow.errors import RemoteError
from flashflow.ledger import FINAL, WAITING, State
from tests.roles.buffer_fleet import Tasks
from tests.roles.rollout_ring import FOREVER_S, lengths, play

OPTIONS = st.fixed_dictionaries(
    {
        "alpha": st.sampled_from([0.0, 0.25, 0.5, 1.0, 1.5, 2.0]),
        "groups": st.integers(1, 4),
        "group_size": st.integers(1, 4),
        "redundant_groups": st.integers(0, 2),
        "redundant_members": st.integers(0, 2),
        "on_stale": st.sampled_from(["wait", "drop"]),
        "failures": st.sampled_from(["mask", "filter"]),
        "replicate_prompts": st.booleans(),
        "straggler_deadline_s": st.sampled_from([None, 8.0, 30.0]),
        "train_s": st.sampled_from([0.1, 3.0, 20.0]),
        "slots": st.sampled_from([8, 16]),
        "concurrency": st.sampled_from([8, 32]),
        "num_envs": st.integers(1, 2),
    }
)


def ring(**options):
    """Played in a folder of its own."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        return play(Path(folder), **options)


def fates(seed, *, crash, hang, latency_s=2.0):
    """How long the environment of a sample takes: exponential, for ever, or until it crashes."""

    def fate_of(score):
        random = Random(f"{seed}/{score.sample}")
        draw = random.random()
        if draw < hang:
            return FOREVER_S
        return None if draw < hang + crash else random.expovariate(1 / latency_s)

    return fate_of


def check(played, options):
    """What holds of every run."""
    ledger, size = played.ledger, options["group_size"]
    counts = ledger.counts()
    assert set(counts) == {*WAITING, *FINAL}
    assert ledger.submitted == sum(counts.values())
    assert len(played.trained) == len(set(played.trained))
    for manifest in played.manifests:
        groups = Counter(row.sample.group for row in manifest.rows)
        assert len(groups) == options["groups"]
        assert max(groups.values()) <= size
        for row in manifest.rows:
            assert manifest.step - 1 - row.initiating_version <= math.ceil(options["alpha"])
    assert played.leftovers == {}


@settings(max_examples=25, deadline=None)
@given(OPTIONS, st.integers(0, 2**32))
def test_whatever_is_late_crashes_or_hangs_the_run_goes_on_and_every_contract_holds(options, seed):
    if options["failures"] == "filter" and options["group_size"] == 1:
        options["max_failed_fraction"] = 0.9
    played = ring(
        steps=4,
        length_of=lengths(seed),
        fate_of=fates(seed, crash=0.05, hang=0.01),
        trajectory_deadline_s=60.0,
        turn_deadline_s=60.0,
        max_failed_fraction=options.pop("max_failed_fraction", 0.8),
        **options,
    )
    assert len(played.manifests) == 4
    check(played, options)


@settings(max_examples=15, deadline=None)
@given(
    st.sampled_from([0.0, 0.5, 1.0, 2.5]), st.integers(1, 4), st.integers(1, 3), st.booleans(), st.integers(0, 2**32)
)
def test_in_the_unbiased_mode_nothing_expires_and_what_is_generated_is_trained(
    alpha, groups, group_size, replicate, seed
):
    num_tasks = 13
    length_of = lengths(seed)
    played = ring(
        steps=100,
        alpha=alpha,
        groups=groups,
        group_size=group_size,
        replicate_prompts=replicate,
        length_of=length_of,
        fate_of=fates(seed, crash=0, hang=0),
        tasks=Tasks(num_tasks),
    )
    assert played.finished
    assert sorted({sample.group for sample in played.trained}) == list(range(num_tasks))
    assert len(played.trained) == num_tasks * group_size
    trained = Counter(row.num_sampled for manifest in played.manifests for row in manifest.rows)
    generated = Counter(length_of(sample) for engine in played.engines for _, sample in engine.ended)
    assert trained == generated
    assert not any(played.stats[state] for state in ("expired", "surplus", "failed", "filtered", "tokens_wasted"))
    assert played.leftovers == {}


def test_the_same_seed_gives_the_same_run():
    options = {"steps": 4, "redundant_groups": 1, "redundant_members": 1, "fate_of": fates(5, crash=0.1, hang=0.02)}
    first, again = ring(**options, trajectory_deadline_s=60.0), ring(**options, trajectory_deadline_s=60.0)
    assert (first.manifests, first.stats, first.taken_at) == (again.manifests, again.stats, again.taken_at)


SHAPE = {
    "steps": 3,
    "groups": 32,
    "group_size": 8,
    "alpha": 1.0,
    "redundant_groups": 4,  # 36 x 8 for a batch of 256
    "num_engines": 4,
    "slots": 64,
    "num_envs": 4,
    "concurrency": 160,
    "trajectory_deadline_s": 120.0,
    "turn_deadline_s": 120.0,
}


def hung(is_hung):
    return lambda score: FOREVER_S if is_hung(score.sample) else 1.0


def test_one_hung_environment_holds_up_nobody():
    """36 groups of 8, batches of 256, alpha 1: the shape in which a queue that waits for whole groups stands still."""
    played = ring(**SHAPE, fate_of=hung(lambda sample: (sample.group, sample.member, sample.retry) == (0, 3, 0)))
    assert len(played.manifests) == 3
    check(played, SHAPE)
    assert played.taken_at[0] < 120  # not even the deadline of the hung one is waited for


def test_without_redundancy_one_hung_environment_costs_its_deadline_once():
    options = {**SHAPE, "redundant_groups": 0}
    played = ring(**options, fate_of=hung(lambda sample: (sample.group, sample.member, sample.retry) == (0, 3, 0)))
    assert len(played.manifests) == 3
    assert 0 in {sample.group for sample in played.trained}
    assert played.taken_at[-1] < 2 * 120


def test_all_hung_environments_of_a_group_are_given_up_within_the_budget():
    options = {**SHAPE, "redundant_groups": 0, "straggler_deadline_s": 40.0}
    played = ring(**options, fate_of=hung(lambda sample: sample.group == 0))
    assert len(played.manifests) == 3
    assert played.stats["expired"] == 8
    tried = [group.cursor for group in played.ledger.groups.values() if group.retry]
    assert tried == [0]  # its task came back and was trained
    check(played, options)


def test_a_task_that_always_crashes_is_counted_and_replaced():
    def fate_of(score):
        return None if score.row.cursor == 5 else 1.0

    played = ring(**SHAPE, fate_of=fate_of)
    assert len(played.manifests) == 3
    assert played.ledger.counts()[State.FAILED] == 8
    assert 5 not in {sample.group for sample in played.trained}
    check(played, SHAPE)


@pytest.mark.parametrize(
    ("crash", "hang"),
    [
        pytest.param(0.0, 0.01, marks=pytest.mark.slow),
        pytest.param(0.2, 0.0, marks=pytest.mark.slow),
        (0.2, 0.01),
    ],
)
def test_hangs_and_crashes_at_rates_leave_the_run_within_its_budgets(crash, hang):
    options = {**SHAPE, "straggler_deadline_s": 60.0, "min_members": 6}
    played = ring(**options, fate_of=fates(3, crash=crash, hang=hang))
    assert len(played.manifests) == 3
    check(played, options)


@pytest.mark.parametrize("fate", [None, FOREVER_S])
def test_everything_failing_is_an_error_with_the_reason_within_the_configured_seconds(fate):
    """max_attempts 3 of 20 s each, after 20 s of generation at most; the groups of two rounds are enough."""
    options = {**SHAPE, "trajectory_deadline_s": 20.0, "turn_deadline_s": 20.0, "redundant_groups": 0}
    reason = "the game crashed" if fate is None else "turn_deadline|trajectory_deadline|did not answer Score"
    with pytest.raises(RemoteError, match=rf"(?s)BudgetError.*ended without a reward of any member.*({reason})"):
        ring(**options, fate_of=lambda score: fate, within_s=2 * 3 * (20 + 20))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"alpha": 0.0, "redundant_groups": 2},
        {"redundant_groups": 2, "redundant_members": 1},
        {"alpha": 0.0, "schedule": "sync_naive"},
        {"alpha": 2.0, "replicate_prompts": False, "straggler_deadline_s": 20.0},
        {"on_stale": "drop", "redundant_members": 1},
    ],
)
@pytest.mark.parametrize("num_tasks", [1, 7])
def test_a_dataset_that_ends_in_mid_batch_ends_the_run_with_what_is_complete(options, num_tasks):
    played = ring(steps=100, groups=4, tasks=Tasks(num_tasks), length_of=lengths(5), **options)
    assert played.finished
    counts = played.ledger.counts()
    assert not played.ledger.outstanding
    assert counts[State.CONSUMED] == len(played.trained) > 0
    assert {group.cursor for group in played.ledger.groups.values()} == set(range(num_tasks))
    if not options.get("redundant_groups") and not options.get("straggler_deadline_s"):
        assert len({sample.group for sample in played.trained}) == num_tasks - counts[State.EXPIRED] // 2
    assert played.leftovers == {}


@pytest.mark.parametrize("options", [{}, {"redundant_groups": 2, "redundant_members": 1}, {"alpha": 0.0}])
def test_a_stream_in_which_everything_is_filtered_is_an_error_that_names_the_filter_and_the_share(options):
    match = r"BudgetError.*17 groups of 17, by filters.dynamic true, more than filters.max_filtered_fraction = 0.5"
    filters = FilterConfig(dynamic=True, max_filtered_fraction=0.5)
    with pytest.raises(RemoteError, match=match):
        ring(filters=filters, within_s=1000, **options)


def test_what_attempts_wait_for_an_engine_counts_against_no_deadline():
    """64 attempts of 10 s each in two slots: the last waits for five minutes."""
    played = ring(
        steps=2, groups=16, group_size=2, alpha=1.0, num_engines=1, slots=2, num_envs=1, concurrency=64,
        length_of=lambda sample: 100, trajectory_deadline_s=60.0, turn_deadline_s=50.0,
    )  # fmt: skip
    assert len(played.manifests) == 2
    assert (played.ledger.num_retries, played.ledger.num_superseded, played.ledger.tokens_wasted) == (0, 0, 0)


def test_short_waits_count_as_little_as_long_ones_and_deadlines_may_be_shorter_than_a_long_poll():
    """Attempts of 2 s wait for a slot up to a minute; told of only every long poll, they would all time out."""
    played = ring(
        steps=2, groups=16, group_size=4, alpha=0.0, num_engines=1, slots=2, num_envs=1, concurrency=64,
        length_of=lambda sample: 20, long_poll_s=40.0, turn_deadline_s=10.0, trajectory_deadline_s=14.0,
    )  # fmt: skip
    assert len(played.manifests) == 2
    assert played.ledger.num_retries == 0

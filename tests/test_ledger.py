"""The ledger: what holds after any history, and each rule of admission, selection and leases by example."""

import math

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flashflow.admission import capacity, min_version, opening_version, planned_batch
from flashflow.errors import ContractError
from flashflow.ledger import Rules, State
from flashflow.ledger import events as e
from flashflow.ledger.book import EPOCHS_PER_OPENING
from flashflow.records import SampleId
from flashflow.staleness import Aged, last_batch, num_late, select
from tests.ledger_ring import ACTIONS, ALPHAS, SIZES, Ring, play


def rules_of(sizes, alpha, on_stale="wait", max_attempts=3):
    return Rules(group_size=sizes[0], batch_groups=sizes[1], alpha=alpha, on_stale=on_stale, max_attempts=max_attempts)


@settings(max_examples=150, deadline=None)
@given(SIZES, ALPHAS, ACTIONS)
def test_under_wait_nothing_expires_and_every_sample_is_fresh_enough_and_in_one_batch(sizes, alpha, actions):
    ring = Ring(rules_of(sizes, alpha))
    play(ring, actions)
    assert not [event for event in ring.events if isinstance(event, e.GroupExpired)]
    assert len(ring.trained) == len(set(ring.trained))
    check_manifests(ring, alpha)


@settings(max_examples=100, deadline=None)
@given(SIZES, ALPHAS, ACTIONS)
def test_under_drop_every_sample_is_fresh_enough_and_in_one_batch(sizes, alpha, actions):
    ring = Ring(rules_of(sizes, alpha, "drop"))
    play(ring, actions)
    assert len(ring.trained) == len(set(ring.trained))
    check_manifests(ring, alpha)


def check_manifests(ring, alpha):
    manifests = [event.manifest for event in ring.events if isinstance(event, e.Taken)]
    assert [manifest.step for manifest in manifests] == list(range(1, len(manifests) + 1))
    for manifest in manifests:
        assert all(manifest.step - 1 - row.initiating_version <= math.ceil(alpha) for row in manifest.rows)
        assert [row.sample for row in manifest.rows] == sorted(row.sample for row in manifest.rows)
        assert len(manifest.rows) == ring.ledger.rules.batch_groups * ring.ledger.rules.group_size


@settings(max_examples=100, deadline=None)
@given(SIZES, ALPHAS, ACTIONS, st.randoms(use_true_random=False))
def test_whatever_happened_the_ring_goes_on_once_envs_commit(sizes, alpha, actions, random):
    ring = Ring(rules_of(sizes, alpha))
    play(ring, actions)
    goal = ring.ledger.last_manifest + 5
    for _ in range(2000):
        if ring.ledger.last_manifest == goal:
            break
        while ring.lease():
            pass
        ring.commit(random.randrange(1000), random.randrange(4))
        if not ring.next_batch() and not ring.leases:
            ring.publish()
    assert ring.ledger.last_manifest == goal
    check_manifests(ring, alpha)


@settings(max_examples=100, deadline=None)
@given(SIZES, ALPHAS, st.sampled_from(["wait", "drop"]), ACTIONS)
def test_the_same_events_give_the_same_ledger(sizes, alpha, on_stale, actions):
    ring = Ring(rules_of(sizes, alpha, on_stale))
    play(ring, actions)
    assert ring.replayed() == ring.ledger


@settings(max_examples=60, deadline=None)
@given(SIZES, ALPHAS, ACTIONS)
def test_no_more_groups_are_in_flight_than_the_async_ratio_allows(sizes, alpha, actions):
    ring = Ring(rules_of(sizes, alpha))
    play(ring, actions)
    counted = ring.ledger.next_group - len(ring.ledger.voided)
    # Versions are at most as many as batches, and the exact decimal of alpha is at most half a step of float away.
    assert counted <= math.floor((ring.ledger.served + 1 + alpha) * sizes[1] + 1e-9)


@settings(max_examples=60, deadline=None)
@given(SIZES, ACTIONS, st.integers(0, 1000))
def test_a_commit_of_a_superseded_or_already_accepted_lease_changes_nothing(sizes, actions, choice):
    ring = Ring(rules_of(sizes, 1.0))
    play(ring, actions)
    current = {(sample, epoch) for sample, epoch in ring.leases if ring.ledger.judge(sample, epoch) == "accepted"}
    for sample, epoch in ring.leases + ring.accepted:
        if (sample, epoch) in current:
            continue
        assert ring.ledger.judge(sample, epoch) in ("superseded", "duplicate")
        with pytest.raises(ContractError):
            ring.ledger.apply(ring.committed(sample, epoch, 0))
    assert ring.replayed() == ring.ledger


@settings(max_examples=60, deadline=None)
@given(SIZES, st.integers(1, 6), st.randoms(use_true_random=False))
def test_at_alpha_zero_batch_k_is_the_k_th_batch_of_groups_sampled_by_version_k_minus_1(sizes, num_batches, random):
    ring = Ring(rules_of(sizes, 0.0))
    for step in range(1, num_batches + 1):
        while ring.lease():
            pass
        while ring.leases:
            assert not ring.next_batch()
            ring.commit(random.randrange(1000))
        assert ring.next_batch()
        rows = ring.ledger.manifests[step].rows
        first = (step - 1) * sizes[1]
        assert sorted({row.sample.group for row in rows}) == list(range(first, first + sizes[1]))
        assert {row.initiating_version for row in rows} == {step - 1}
        assert not ring.lease()
        assert ring.publish()


def test_capacity_is_the_floor_of_the_decimal_a_person_wrote():
    # floor((V + 1 + alpha) Bg) by hand.
    assert capacity(0, 1.0, 32) == 64
    assert capacity(2, 0.5, 3) == 10
    assert capacity(0, 0.0, 4) == 4
    assert capacity(0, 0.29, 100) == 129
    assert capacity(-1, 0.29, 100) == 29


@given(st.integers(1, 200), ALPHAS, st.integers(1, 16))
def test_the_opening_version_is_the_first_that_lets_a_group_in(ordinal, alpha, batch_groups):
    version = opening_version(ordinal, alpha, batch_groups)
    assert ordinal <= capacity(version, alpha, batch_groups)
    assert version == 0 or ordinal > capacity(version - 1, alpha, batch_groups)
    assert min_version(ordinal, alpha, batch_groups) <= version


def test_the_oldest_allowed_weights_follow_from_the_planned_batch():
    assert [planned_batch(ordinal, 2) for ordinal in (1, 2, 3, 4, 5)] == [1, 1, 2, 2, 3]
    # Batch 3 is handed over at version 2; at alpha 0.5 a sample may be one batch behind.
    assert [min_version(ordinal, 0.5, 2) for ordinal in (1, 3, 5, 7)] == [0, 0, 1, 2]
    assert [min_version(ordinal, 0.0, 2) for ordinal in (1, 3, 5)] == [0, 1, 2]


def test_the_last_batch_of_a_sample_is_where_its_staleness_reaches_the_rounded_up_alpha():
    assert last_batch(4, 0.0) == 5
    assert last_batch(4, 0.5) == 6
    assert last_batch(4, 2.0) == 7


@given(st.lists(st.integers(1, 6), max_size=12), st.integers(0, 3), st.integers(1, 3))
def test_no_group_is_late_exactly_when_every_horizon_has_room(dues, step, batch_groups):
    rest = [Aged(due, group, False) for group, due in enumerate(dues)]
    halls_condition = all(due > step for due in dues) and all(
        sum(due <= j for due in dues) <= (j - step) * batch_groups for j in range(step + 1, 8)
    )
    assert (num_late(rest, step, batch_groups) == 0) == halls_condition


def test_the_batch_waits_for_a_group_that_would_be_too_late_and_takes_it_first():
    groups = [Aged(3, 0, False), Aged(4, 1, True), Aged(4, 2, True)]
    waiting = select(groups, step=3, batch_groups=2, on_stale="wait", ending=False)
    assert waiting.groups == []
    assert waiting.reason == "batch 3 waits for group 0, which is due by batch 3"
    groups[0] = Aged(3, 0, True)
    assert select(groups, step=3, batch_groups=2, on_stale="wait", ending=False).groups == [0, 1]


def test_under_drop_the_batch_waits_for_nobody():
    groups = [Aged(3, 0, False), Aged(4, 1, True), Aged(4, 2, True)]
    assert select(groups, step=3, batch_groups=2, on_stale="drop", ending=False).groups == [1, 2]


def test_the_last_batch_of_the_data_may_be_short_but_leaves_nobody_out():
    left = [Aged(3, 0, True)]
    assert select(left, step=3, batch_groups=2, on_stale="wait", ending=True).groups == [0]
    assert select([*left, Aged(3, 1, False)], step=3, batch_groups=2, on_stale="wait", ending=True).groups == []
    assert select(left, step=3, batch_groups=2, on_stale="wait", ending=False).groups == []


def test_where_waiting_cannot_help_the_batch_goes_out():
    groups = [Aged(3, 0, True), Aged(3, 1, True), Aged(3, 2, True)]
    assert select(groups, step=3, batch_groups=2, on_stale="wait", ending=False).groups == [0, 1]


def test_nothing_is_admitted_before_a_version_is_served():
    ring = Ring(rules_of((1, 1), 0.0))
    ring.ledger.served = None
    assert ring.ledger.closed() == "admission is closed until a first version is served"
    ring.ledger.served = 0
    assert ring.ledger.closed() == ""
    ring.lease()
    assert ring.ledger.closed() == "admission is closed until version 1 is served (now 0)"


def test_an_expired_lease_goes_first_to_the_next_env_under_the_next_epoch_and_the_same_retry():
    ring = Ring(rules_of((2, 2), 0.0))
    for _ in range(3):
        ring.lease()
    ring.record(e.LeaseExpired(0, 1))
    assert ring.ledger.lease() == e.Leased(0, 1, 1, 0)
    assert ring.ledger.groups[0].sample(1) == SampleId(0, 1, 0)


def test_a_broken_attempt_is_retried_until_its_attempts_are_used_up_and_stays_as_a_row_without_reward():
    ring = Ring(rules_of((2, 1), 0.0, max_attempts=2))
    ring.lease()
    ring.fail(0)
    assert (ring.state(0, 0), ring.ledger.groups[0].members[0].retry) == (State.ADMITTED, 1)
    ring.lease()
    ring.fail(0)
    assert ring.state(0, 0) is State.FAILED
    ring.lease()
    ring.commit(0)
    assert ring.next_batch()
    failed, good = ring.ledger.manifests[1].rows
    assert (failed.sample, failed.reward, failed.outcome, failed.num_sampled) == (SampleId(0, 0, 1), None, "failed", 0)
    assert good.reward == 1.0
    assert ring.ledger.counts()[State.FAILED] == ring.ledger.counts()[State.CONSUMED] == 1


def test_a_group_without_any_reward_ends_and_returns_its_capacity():
    ring = Ring(rules_of((1, 1), 0.0, max_attempts=1))
    ring.lease()
    ring.fail(0)
    assert ring.ledger.counts()[State.FAILED] == 1
    assert ring.lease()
    assert ring.ledger.ordinal(1) == 1
    assert ring.ledger.min_version(1) == 0


def test_a_group_that_is_too_old_is_never_handed_out_and_its_task_comes_back_under_a_new_group():
    ring = Ring(rules_of((1, 1), 0.0))
    ring.lease()
    sample, epoch = ring.leases.pop()
    ring.record(e.Served(2))
    ring.record(ring.committed(sample, epoch, 0))
    ring.ledger.last_manifest = 2
    assert ring.ledger.overdue(3) == [e.GroupExpired(0, returned=True)]
    ring.record(e.GroupExpired(0, returned=True))
    assert ring.ledger.tokens_wasted == 2
    assert ring.ledger.select(3, ending=False).groups == []
    assert ring.ledger.admit() == e.Admitted(group=1, cursor=0, retry=1, num_members=1)
    ring.lease()
    assert ring.leases == [(SampleId(1, 0, 1), 0)]
    assert ring.ledger.admit().cursor == 1


def test_a_reopened_ledger_keeps_commits_and_ends_every_lease():
    ring = Ring(rules_of((2, 1), 0.0))
    ring.lease()
    ring.lease()
    ring.commit(0)
    held = ring.leases[0]
    ring.reopen()
    assert [ring.state(0, 0), ring.state(0, 1)] == [State.COMMITTED, State.ADMITTED]
    assert ring.ledger.judge(*held) == "superseded"
    assert ring.ledger.lease() == e.Leased(0, 1, EPOCHS_PER_OPENING, 0)


def test_superseded_commits_are_counted_as_waste():
    ring = Ring(rules_of((1, 1), 0.0))
    ring.record(e.Superseded(0, 0, 7, num_sampled=40))
    ring.record(e.Superseded(0, 0, 7, num_sampled=2))
    assert (ring.ledger.num_superseded, ring.ledger.tokens_wasted) == (2, 42)


def test_a_checkpoint_lets_the_ledger_forget_and_the_counts_stay():
    ring = Ring(rules_of((2, 1), 0.0))
    for _ in range(3):
        while ring.lease():
            pass
        while ring.leases:
            ring.commit(0)
        ring.next_batch()
        ring.publish()
    before = ring.ledger.counts()
    ring.record(e.Covered(2))
    assert ring.ledger.counts() == before
    assert set(ring.ledger.groups) == {2}
    assert set(ring.ledger.manifests) == {3}


@pytest.mark.parametrize(
    "event",
    [
        e.Admitted(5, 0, 0, 2),
        e.Leased(0, 1, 9, 0),
        e.Leased(0, 0, 0, 0),
        e.LeaseExpired(0, 1),
        e.GroupExpired(3, False),
        e.GroupClosed(3),
        e.GroupSurplus(3),
        e.Covered(1),
        e.Opened(e.FORMAT, 0, "run", 0, 2, 1, 0.0),
    ],
)
def test_an_event_that_cannot_have_happened_is_refused_and_changes_nothing(event):
    ring = Ring(rules_of((2, 1), 0.0))
    ring.lease()
    with pytest.raises(ContractError):
        ring.ledger.apply(event)
    assert ring.replayed() == ring.ledger


def test_a_batch_out_of_turn_or_with_a_sample_too_old_is_refused():
    ring = Ring(rules_of((1, 1), 0.0))
    ring.lease()
    ring.commit(0)
    with pytest.raises(ContractError, match="batch 3 asked for, but the last one handed out is 0"):
        ring.ledger.take(3, [0], 0)
    ring.ledger.last_manifest = 1
    with pytest.raises(ContractError, match="g0m0 of version 0 is too old for batch 2"):
        ring.ledger.take(2, [0], 0)


def test_every_event_survives_the_journal_s_encoding():
    ring = Ring(rules_of((1, 1), 0.0))
    ring.lease()
    ring.commit(0)
    ring.next_batch()
    for event in ring.events:
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(event), type=e.AnyEvent) == event

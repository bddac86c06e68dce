"""The ledger with redundant groups and members, a quorum and deadlines: after any history, and by example."""

import math
from collections import Counter
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flashflow.errors import BudgetError, ContractError
from flashflow.ledger import Rules, State
from flashflow.ledger import events as e
from flashflow.records import SampleId
from flashflow.staleness import Aged, num_late, select
from tests.ledger_ring import ACTIONS, ACTIONS_WITH_DEADLINES, ALPHAS, Ring, play

SIZES = st.tuples(st.integers(1, 3), st.integers(1, 4))
REDUNDANCY = st.tuples(st.integers(0, 3), st.integers(0, 2))
ON_STALE = st.sampled_from(["wait", "drop"])
FAILURES = st.sampled_from(["mask", "filter"])


def rules_of(sizes, alpha=0.0, redundancy=(0, 0), **options):
    return Rules(
        group_size=sizes[0],
        batch_groups=sizes[1],
        alpha=alpha,
        redundant_groups=redundancy[0],
        redundant_members=redundancy[1],
        **options,
    )


def manifests(ring):
    return [event.manifest for event in ring.events if isinstance(event, e.Taken)]


@settings(max_examples=150, deadline=None)
@given(SIZES, ALPHAS, REDUNDANCY, ON_STALE, FAILURES, st.integers(1, 3), ACTIONS_WITH_DEADLINES)
def test_every_batch_is_whole_and_fresh_and_no_sample_is_in_two(
    sizes, alpha, redundancy, on_stale, failures, quorum, actions
):
    options = {"on_stale": on_stale, "failures": failures, "min_members": min(quorum, sizes[0])}
    ring = Ring(rules_of(sizes, alpha, redundancy, **options))
    play(ring, actions)
    assert len(ring.trained) == len(set(ring.trained))
    closed = {event.group for event in ring.events if isinstance(event, e.GroupClosed)}
    for manifest in manifests(ring):
        members = Counter(row.sample.group for row in manifest.rows)
        assert len(members) == sizes[1]
        assert all(count == sizes[0] or (group in closed and count < sizes[0]) for group, count in members.items())
        assert all(manifest.step - 1 - row.initiating_version <= math.ceil(alpha) for row in manifest.rows)
    assert ring.replayed() == ring.ledger


@settings(max_examples=100, deadline=None)
@given(SIZES, ALPHAS, REDUNDANCY, ON_STALE, ACTIONS_WITH_DEADLINES)
def test_no_more_groups_are_in_flight_than_the_async_ratio_and_the_redundancy_allow(
    sizes, alpha, redundancy, on_stale, actions
):
    ring = Ring(rules_of(sizes, alpha, redundancy, on_stale=on_stale))
    play(ring, actions)
    counted = ring.ledger.next_group - len(ring.ledger.voided)
    assert counted <= math.floor((ring.ledger.served + 1 + alpha) * sizes[1] + 1e-9) + redundancy[0]


@settings(max_examples=100, deadline=None)
@given(SIZES, ALPHAS, REDUNDANCY, ACTIONS)
def test_under_wait_only_redundant_groups_are_given_up(sizes, alpha, redundancy, actions):
    ring = Ring(rules_of(sizes, alpha, redundancy))
    play(ring, actions)
    assert not [event for event in ring.events if isinstance(event, e.GroupExpired)]
    surplus = [event for event in ring.events if isinstance(event, e.GroupSurplus)]
    assert len(surplus) <= redundancy[0] * ring.ledger.last_manifest


@settings(max_examples=100, deadline=None)
@given(SIZES, ALPHAS, REDUNDANCY, ON_STALE, ACTIONS_WITH_DEADLINES, st.integers(0, 2**32))
def test_whatever_happened_capacity_returns_and_the_ring_goes_on(sizes, alpha, redundancy, on_stale, actions, seed):
    random = Random(seed)
    ring = Ring(rules_of(sizes, alpha, redundancy, on_stale=on_stale))
    play(ring, actions)
    goal = ring.ledger.last_manifest + 5
    for _ in range(4000):
        if ring.ledger.last_manifest == goal:
            break
        while ring.lease():
            pass
        if random.random() < 0.02:
            ring.deadline(random.randrange(1000))
        ring.commit(random.randrange(1000), random.randrange(4))
        if not ring.next_batch() and not ring.leases:
            ring.publish()
    assert ring.ledger.last_manifest == goal


@settings(max_examples=60, deadline=None)
@given(SIZES, ALPHAS, REDUNDANCY, ACTIONS_WITH_DEADLINES)
def test_every_task_is_trained_outstanding_or_counted_with_a_reason(sizes, alpha, redundancy, actions):
    ring = Ring(rules_of(sizes, alpha, redundancy))
    play(ring, actions)
    fates = {}
    for event in ring.events:
        match event:
            case e.Admitted():
                fates[event.cursor] = "outstanding"
                cursor_of = fates.setdefault("cursors", {})
                cursor_of[event.group] = event.cursor
            case e.GroupExpired(returned=True):
                fates[fates["cursors"][event.group]] = "returned"
            case e.GroupExpired() | e.GroupSurplus() | e.GroupFailed():
                fates[fates["cursors"][event.group]] = type(event).__name__
            case e.Taken():
                for row in event.manifest.rows:
                    fates[fates["cursors"][row.sample.group]] = "trained"
    returned = {task.cursor for task in ring.ledger.returned}
    admitted = {cursor for cursor in fates if cursor != "cursors"}
    assert admitted == set(range(ring.ledger.next_cursor))
    assert {cursor for cursor in admitted if fates[cursor] == "returned"} == returned
    outstanding = {group.cursor for group in ring.ledger.outstanding.values()}
    assert {cursor for cursor in admitted if fates[cursor] == "outstanding"} == outstanding


def test_a_redundant_group_starts_at_once_and_may_be_sampled_by_the_version_that_admits_it():
    ring = Ring(rules_of((1, 2), redundancy=(2, 0)))
    for _ in range(4):
        assert ring.lease()
    assert not ring.lease()
    assert [ring.ledger.min_version(group) for group in range(4)] == [0, 0, 0, 0]


def test_at_alpha_zero_late_groups_are_surplus_and_nothing_starts_that_no_batch_could_take():
    ring = Ring(rules_of((1, 2), redundancy=(1, 0)))
    for _ in range(3):
        ring.lease()
    ring.commit(0)
    assert not ring.next_batch()
    ring.commit(-1)
    assert ring.next_batch()
    assert [row.sample.group for row in ring.ledger.manifests[1].rows] == [0, 2]
    assert ring.events[-1] == e.GroupSurplus(1)
    assert ring.state(1, 0) is State.SURPLUS
    assert not ring.lease()
    assert ring.ledger.closed() == "admission is closed until version 1 is served (now 0)"
    ring.publish()
    for _ in range(3):
        assert ring.lease()
    assert not ring.lease()


def test_a_redundant_group_nobody_has_begun_waits_for_the_next_version():
    ring = Ring(rules_of((2, 1), redundancy=(1, 0)))
    for _ in range(2):
        ring.lease()
    ring.record(ring.ledger.admit())
    ring.commit(0)
    ring.commit(0)
    assert ring.next_batch()
    assert ring.state(1, 0) is State.ADMITTED
    assert ring.ledger.lease() is None
    ring.publish()
    assert ring.ledger.lease() == e.Leased(1, 0, 0, 1)


def test_a_late_group_is_kept_while_it_is_fresh_enough():
    ring = Ring(rules_of((1, 1), alpha=1.0, redundancy=(1, 0)))
    for _ in range(3):
        ring.lease()
    ring.commit(1)
    assert ring.next_batch()
    assert ring.state(0, 0) is State.LEASED
    ring.commit(1)
    assert ring.next_batch()  # though group 0 is due by this one
    assert ring.state(0, 0) is State.SURPLUS
    assert ring.ledger.judge(*ring.leases[0]) == "superseded"


def test_the_first_members_with_a_reward_win_and_the_rest_are_surplus():
    rewards = {SampleId(0, 0): None}
    ring = Ring(rules_of((2, 1), redundancy=(0, 2)), lambda sample: rewards.get(sample, 1.0))
    for _ in range(4):
        ring.lease()
    ring.commit(0)  # no reward: it wins only where nobody else does
    ring.commit(1)
    assert not ring.next_batch()
    ring.commit(0)
    assert [ring.state(0, member) for member in range(4)] == [
        State.COMMITTED, State.COMMITTED, State.COMMITTED, State.SURPLUS,
    ]  # fmt: skip
    assert ring.next_batch()
    assert [row.sample.member for row in ring.ledger.manifests[1].rows] == [1, 2]
    assert ring.state(0, 0) is State.SURPLUS
    assert ring.ledger.tokens_wasted == 2  # what member 0 had sampled
    assert ring.ledger.submitted == 4


def test_without_enough_rewards_failed_members_fill_the_group():
    ring = Ring(rules_of((2, 1), redundancy=(0, 1), max_attempts=1))
    for _ in range(3):
        ring.lease()
    ring.fail(0)
    ring.fail(0)
    assert not ring.next_batch()
    ring.commit(0)
    assert ring.next_batch()
    rows = ring.ledger.manifests[1].rows
    assert [(row.sample.member, row.reward) for row in rows] == [(0, None), (2, 1.0)]


def test_under_filter_redundant_members_make_up_for_failed_ones():
    ring = Ring(rules_of((2, 1), redundancy=(0, 1), failures="filter", max_attempts=1))
    for _ in range(3):
        ring.lease()
    ring.fail(0)
    ring.commit(0)
    ring.commit(0)
    assert ring.next_batch()
    for _ in range(3):
        ring.publish()
        ring.lease()
    ring.fail(0)
    ring.fail(0)
    assert ring.events[-1] == e.GroupFailed(1)


def test_at_its_deadline_a_group_with_a_quorum_goes_as_it_is():
    ring = Ring(rules_of((3, 1), min_members=2))
    for _ in range(3):
        ring.lease()
    ring.commit(0)
    ring.commit(0)
    assert ring.ledger.at_deadline(0) == e.GroupClosed(0)
    ring.deadline(0)
    assert ring.ledger.judge(*ring.leases[0]) == "superseded"
    assert ring.next_batch()
    assert [row.sample.member for row in ring.ledger.manifests[1].rows] == [0, 1]
    assert ring.state(0, 2) is State.EXPIRED


def test_without_a_quorum_its_task_comes_back_first_so_often_and_no_oftener():
    ring = Ring(rules_of((2, 1), min_members=2, max_attempts=2))
    for retry in range(2):
        for _ in range(2):
            ring.lease()
        ring.commit(-1)
        assert ring.ledger.at_deadline(retry) == e.GroupExpired(retry, returned=retry == 0, at_deadline=True)
        ring.deadline(0)
    assert ring.ledger.groups[1].cursor == 0
    assert ring.ledger.admit() == e.Admitted(2, 1, 0, 2)
    assert ring.ledger.counts()[State.EXPIRED] == 4
    assert ring.ledger.tokens_wasted == 2 * 2


def test_a_complete_or_ended_group_has_no_deadline():
    ring = Ring(rules_of((1, 2)))
    ring.lease()
    ring.commit(0)
    assert ring.ledger.at_deadline(0) is None
    assert ring.ledger.at_deadline(7) is None
    with pytest.raises(ContractError, match="group 0 is closed, but it is complete"):
        ring.ledger.apply(e.GroupClosed(0))


def test_groups_that_keep_expiring_stop_the_run_at_the_share():
    ring = Ring(rules_of((1, 2), alpha=8.0))
    for expired in range(1, 4):
        ring.lease()
        ring.deadline(0)
        if expired < 3:
            ring.ledger.check_losses("reward", 0.5)
    with pytest.raises(BudgetError, match=r"3 reached rollout.straggler_deadline_s without a quorum, of 3, more than"):
        ring.ledger.check_losses("reward", 0.5)


def test_the_number_of_members_is_the_journal_s_and_not_today_s_config():
    ring = Ring(rules_of((2, 1), redundancy=(0, 2)))
    ring.lease()
    ring.ledger.rules = rules_of((2, 1))
    assert ring.replayed() == ring.ledger
    assert len(ring.ledger.groups[0].members) == 4


def test_the_fewest_late_groups_are_counted():
    rest = [Aged(2, 0, False), Aged(2, 1, False), Aged(2, 2, False), Aged(3, 3, False), Aged(1, 4, False)]
    # Batch 2 has room for one of the three due by it, batch 3 for the one due by it; that due by 1 is too late.
    assert num_late(rest, 1, 1) == 3


def test_a_batch_goes_without_so_many_late_groups_as_are_redundant():
    groups = [Aged(1, 0, False), Aged(1, 1, False), Aged(1, 2, True), Aged(1, 3, True)]
    options = {"step": 1, "batch_groups": 2, "on_stale": "wait", "ending": False}
    assert select(groups, **options, redundant=2).groups == [2, 3]
    assert select(groups, **options, redundant=1).groups == []

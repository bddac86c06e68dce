"""The ledger with filters, filtered failures and replay: what holds after any history, and each rule by example."""

import math
from collections import Counter
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flashflow.algorithms.settings import NO_FILTERS, FilterConfig, ReplayConfig
from flashflow.errors import BudgetError, ContractError
from flashflow.ledger import Rules, State
from flashflow.ledger import events as e
from flashflow.records import Manifest
from tests.ledger_ring import ACTIONS, ALPHAS, Ring, play

SIZES = st.tuples(st.integers(2, 3), st.integers(1, 4))
DYNAMIC = FilterConfig(dynamic=True)
FILTERS = st.sampled_from([DYNAMIC, FilterConfig(mean_lower=0.3), FilterConfig(dynamic=True, mean_upper=0.6)])
REPLAYS = st.builds(
    ReplayConfig,
    capacity=st.integers(1, 5),
    min_std=st.just(0.1),
    min_mean=st.just(0.2),
    max_replay_staleness=st.integers(1, 4),
)


def rules_of(sizes, alpha=0.0, **options):
    return Rules(group_size=sizes[0], batch_groups=sizes[1], alpha=alpha, **options)


def silent_share(share, seed=0):
    """Rewards by sample: so many groups have no signal."""

    def reward_of(sample):
        silent = Random(f"{seed}/{sample.group}").random() < share
        return float(sample.group % 2) if silent else float(sample.member % 2)

    return reward_of


def by_group(*rewards):
    """Rewards by group, then member."""
    return lambda sample: rewards[sample.group][sample.member]


def train_one_batch(ring):
    """All that may be leased is committed until there is a batch; its manifest."""
    while not ring.next_batch():
        assert ring.lease()
        ring.commit(0)
    ring.publish()
    return ring.ledger.manifests[ring.ledger.last_manifest]


@settings(max_examples=150, deadline=None)
@given(SIZES, ALPHAS, FILTERS, st.sampled_from([0.1, 0.5, 0.9]), ACTIONS)
def test_under_wait_filters_let_nothing_expire_and_every_batch_is_full_and_fresh(sizes, alpha, filters, share, actions):
    ring = Ring(rules_of(sizes, alpha, filters=filters), silent_share(share))
    play(ring, actions)
    assert not [event for event in ring.events if isinstance(event, e.GroupExpired)]
    assert len(ring.trained) == len(set(ring.trained))
    filtered = {event.group for event in ring.events if isinstance(event, e.GroupFiltered)}
    for event in ring.events:
        if isinstance(event, e.Taken):
            rows = event.manifest.rows
            assert len(rows) == sizes[0] * sizes[1]
            assert all(event.manifest.step - 1 - row.initiating_version <= math.ceil(alpha) for row in rows)
            assert not filtered.intersection(row.sample.group for row in rows)


@settings(max_examples=100, deadline=None)
@given(SIZES, ALPHAS, FILTERS, ACTIONS)
def test_a_filtered_group_does_not_count_for_admission(sizes, alpha, filters, actions):
    ring = Ring(rules_of(sizes, alpha, filters=filters), silent_share(0.5))
    play(ring, actions)
    counted = ring.ledger.next_group - len(ring.ledger.voided)
    assert counted <= math.floor((ring.ledger.served + 1 + alpha) * sizes[1] + 1e-9)
    assert len(ring.ledger.voided) >= sum(isinstance(event, e.GroupFiltered) for event in ring.events)


@settings(max_examples=100, deadline=None)
@given(SIZES, ALPHAS, ACTIONS, st.integers(0, 2**32))
def test_whatever_was_filtered_or_failed_the_ring_goes_on_once_envs_commit(sizes, alpha, actions, seed):
    random = Random(seed)
    rules = rules_of(sizes, alpha, filters=DYNAMIC, failures="filter", max_attempts=1)
    ring = Ring(rules, silent_share(0.6))
    play(ring, actions)
    goal = ring.ledger.last_manifest + 5
    for _ in range(3000):
        if ring.ledger.last_manifest == goal:
            break
        while ring.lease():
            pass
        if random.random() < 0.05:
            ring.fail(random.randrange(1000))
        else:
            ring.commit(random.randrange(1000), random.randrange(4))
        if not ring.next_batch() and not ring.leases:
            ring.publish()
    assert ring.ledger.last_manifest == goal
    failed = {event.group for event in ring.events if isinstance(event, e.Failed)}
    assert not failed.intersection(sample.group for sample in ring.trained)


@settings(max_examples=150, deadline=None)
@given(SIZES, ALPHAS, REPLAYS, st.sampled_from(["mask", "filter"]), ACTIONS)
def test_every_use_of_a_sample_is_in_one_manifest_and_replay_slots_are_young_enough(
    sizes, alpha, replay, failures, actions
):
    ring = Ring(rules_of(sizes, alpha, replay=replay, failures=failures), silent_share(0.5))
    play(ring, actions)
    assert not [event for event in ring.events if isinstance(event, e.GroupExpired)]
    uses = Counter()
    replaced = set()
    for manifest in [event.manifest for event in ring.events if isinstance(event, e.Taken)]:
        assert len(manifest.rows) == sizes[0] * sizes[1]
        replayed = {row.sample.group for row in manifest.rows if row.use > 1}
        assert len(replayed) == len(manifest.replaced)
        replaced.update(manifest.replaced)
        for row in manifest.rows:
            uses[row.sample] += 1
            assert row.use == uses[row.sample]
            age = manifest.step - 1 - row.initiating_version
            assert age <= (math.ceil(alpha) if row.use == 1 else replay.max_replay_staleness)
    assert not replaced.intersection(sample.group for sample in uses)
    assert len(ring.ledger.stored) <= replay.capacity


@settings(max_examples=100, deadline=None)
@given(SIZES, ALPHAS, REPLAYS, ACTIONS)
def test_what_may_be_replayed_or_redone_is_kept(sizes, alpha, replay, actions):
    ring = Ring(rules_of(sizes, alpha, replay=replay), silent_share(0.5))
    play(ring, actions)
    needed = {row.sample.group for manifest in ring.ledger.manifests.values() for row in manifest.rows}
    assert needed.union(ring.ledger.stored) <= set(ring.ledger.groups)


@settings(max_examples=100, deadline=None)
@given(SIZES, ALPHAS, st.one_of(st.none(), REPLAYS), st.booleans(), st.sampled_from(["mask", "filter"]), ACTIONS)
def test_the_same_events_give_the_same_ledger(sizes, alpha, replay, dynamic, failures, actions):
    filters = DYNAMIC if dynamic else NO_FILTERS
    ring = Ring(rules_of(sizes, alpha, replay=replay, filters=filters, failures=failures), silent_share(0.5))
    play(ring, actions)
    assert ring.replayed() == ring.ledger


def test_a_filtered_group_is_refilled_before_any_further_version_is_served():
    ring = Ring(rules_of((2, 1), filters=DYNAMIC), by_group((1, 1), (0, 0), (0, 1)))
    manifest = train_one_batch(ring)
    assert [row.sample.group for row in manifest.rows] == [2, 2]
    assert {row.initiating_version for row in manifest.rows} == {0}
    assert manifest.num_filtered == 2
    assert ring.ledger.counts()[State.FILTERED] == 4
    assert ring.ledger.tokens_wasted == 4 * 2
    assert ring.ledger.num_filtered == 0


def test_a_stream_in_which_everything_is_filtered_stops_at_the_share():
    ring = Ring(rules_of((2, 20), filters=FilterConfig(dynamic=True, max_filtered_fraction=0.75)), lambda sample: 1.0)
    while len(ring.ledger.voided) <= 60:
        ring.ledger.check_losses("tests:constant", 0.5)
        assert ring.lease()
        ring.commit(0)
    with pytest.raises(BudgetError, match=r"61 groups of 61, .* reward tests:constant tells too few"):
        ring.ledger.check_losses("tests:constant", 0.5)
    assert ring.ledger.counts()[State.FILTERED] == 2 * 61


def test_the_share_counts_from_the_last_batch_and_from_the_last_opening():
    rewards = [(1, 1)] * 10 + [(0, 1)] + [(1, 1)] * 4
    ring = Ring(rules_of((2, 1), filters=DYNAMIC), by_group(*rewards))
    train_one_batch(ring)
    assert ring.ledger.lost[State.FILTERED] == 0
    for _ in range(8):
        ring.lease()
        ring.commit(0)
    assert ring.ledger.lost[State.FILTERED] == 4
    ring.reopen()
    assert (ring.ledger.lost[State.FILTERED], ring.ledger.num_filtered) == (0, 4)


def test_the_mean_filter_keeps_what_is_strictly_within():
    filters = FilterConfig(mean_lower=0.25, mean_upper=0.75)
    ring = Ring(rules_of((2, 1), filters=filters), by_group((0, 0.5), (0.5, 1), (0.5, 0.5)))
    assert [row.sample.group for row in train_one_batch(ring).rows] == [2, 2]


def test_a_failed_member_does_not_count_for_the_signal():
    ring = Ring(rules_of((2, 1), filters=DYNAMIC, max_attempts=1), by_group((0, 1), (0, 1)))
    ring.lease()
    ring.fail(0)
    ring.lease()
    ring.commit(0)
    assert ring.events[-1] == e.GroupFiltered(0)


def test_under_filter_a_group_that_lost_a_member_ends_at_once_and_its_late_members_count_for_nothing():
    ring = Ring(rules_of((3, 1), failures="filter", max_attempts=2), silent_share(0))
    for _ in range(3):
        ring.lease()
    ring.commit(0)
    ring.fail(0)
    ring.lease()
    ring.fail(-1)
    assert ring.events[-2:] == [e.Failed(0, 1, "broken"), e.GroupFailed(0)]
    assert ring.ledger.judge(*ring.leases[0]) == "superseded"
    assert ring.ledger.counts()[State.FAILED] == 3
    assert ring.ledger.lost[State.FAILED] == 1
    ring.leases.clear()
    assert {row.sample.group for row in train_one_batch(ring).rows} == {1}


def test_more_dropped_groups_than_the_share_allows_stop_the_run():
    ring = Ring(rules_of((2, 1), failures="filter", max_attempts=1), silent_share(0))
    while len(ring.ledger.voided) <= 16:
        ring.ledger.check_losses("tests:reward", 0.5)
        assert ring.lease()
        ring.fail(0)
    with pytest.raises(BudgetError, match=r"failures cost 17 groups of 17, .* rollout.max_failed_fraction = 0\.5"):
        ring.ledger.check_losses("tests:reward", 0.5)


REPLAY = ReplayConfig(capacity=2, min_std=0.1, min_mean=0.4, max_replay_staleness=2)


def test_a_group_without_signal_gives_its_place_to_a_stored_one_and_its_capacity_stays_taken():
    ring = Ring(rules_of((2, 1), replay=REPLAY), by_group((0, 1), (1, 1), (0, 0), (1, 1), (1, 1)))
    first, second, third, fourth = (train_one_batch(ring) for _ in range(4))
    assert [(row.sample.group, row.use) for row in first.rows] == [(0, 1), (0, 1)]
    assert [(row.sample.group, row.use) for row in second.rows] == [(0, 2), (0, 2)]
    assert [row.initiating_version for row in second.rows] == [0, 0]
    assert (second.replaced, third.replaced) == ([1], [2])
    assert [(row.sample.group, row.use) for row in third.rows] == [(0, 3), (0, 3)]
    # At version 3 group 0, of version 0, is past max_replay_staleness: the silent group is trained itself.
    assert [(row.sample.group, row.use) for row in fourth.rows] == [(3, 1), (3, 1)]
    assert fourth.replaced == []
    assert ring.ledger.stored == {}
    assert ring.ledger.voided == []
    assert ring.ledger.counts()[State.FILTERED] == 4
    assert ring.ledger.tokens_wasted == 4 * 2


def test_a_covered_group_is_kept_while_it_is_stored_and_counted_once():
    ring = Ring(rules_of((2, 1), replay=REPLAY), by_group((0, 1), (1, 1), (1, 1), (1, 1)))
    train_one_batch(ring)
    before = ring.ledger.counts()
    ring.record(e.Covered(1))
    assert ring.ledger.counts() == before
    assert ring.ledger.segments() == {0}
    for _ in range(3):
        train_one_batch(ring)
    ring.record(e.Covered(4))
    assert ring.ledger.groups == {}
    assert ring.ledger.counts() == {**before, State.CONSUMED: 4, State.FILTERED: 4}


def test_the_draw_follows_from_the_key_of_the_batch():
    def played(key):
        replay = ReplayConfig(min_mean=0.4, max_replay_staleness=9)
        ring = Ring(rules_of((2, 4), replay=replay), silent_share(0))
        train_one_batch(ring)
        ring.reward_of = lambda sample: 1.0
        for _ in range(8):
            ring.lease()
            ring.commit(0)
        return [row.sample.group for row in ring.ledger.take(2, [4, 5], key).manifest.rows[::2]]

    draws = {tuple(played(key)) for key in range(100)}
    assert len(draws) == 12  # ordered pairs of 4
    assert played(7) == played(7)


def test_a_replay_of_what_is_not_stored_is_refused_and_changes_nothing():
    ring = Ring(rules_of((2, 1), replay=REPLAY), silent_share(0))
    train_one_batch(ring)
    rows = ring.ledger.groups[0].rows(2, use=3)
    manifest = Manifest(step=2, rows=rows, group_size=2, rng_key=0)
    for event in (e.Taken(manifest), e.Taken(Manifest(step=2, rows=[], group_size=2, rng_key=0), stored=[5])):
        with pytest.raises(ContractError, match="replays or stores groups that are not there"):
            ring.ledger.apply(event)
    assert ring.replayed() == ring.ledger


def test_only_a_complete_group_is_filtered():
    ring = Ring(rules_of((2, 1), filters=DYNAMIC))
    ring.lease()
    with pytest.raises(ContractError, match="group 0 is filtered, but it is not complete"):
        ring.ledger.apply(e.GroupFiltered(0))


def test_the_new_events_survive_the_journal_s_encoding():
    ring = Ring(rules_of((2, 1), replay=REPLAY), by_group((0, 1), (1, 1)))
    train_one_batch(ring)
    train_one_batch(ring)
    ring.record(e.Superseded(0, 0, 9, 1))
    assert ring.replayed() == ring.ledger

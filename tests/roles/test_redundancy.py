"""Redundant groups and members, deadlines and revoked leases, at the buffer and in the ring, on virtual time."""

import asyncio

import pytest

from flashflow.errors import BudgetError
from flashflow.messages import AwaitRevoked, EnginesPaused, Evaluate, JournalStatusRequest, LeaseName, NextBatch
from flashflow.records import SampleId
from flashflow.transport.channel import Peer
from tests.roles.buffer_fleet import ENV, LONG_POLL_S, OTHER_ENV, run
from tests.roles.rollout_ring import lengths, play


def now():
    return asyncio.get_running_loop().time()


async def counts(fleet):
    return (await fleet.ask(JournalStatusRequest())).counts


async def revoked(fleet, peer=ENV):
    return [(lease.sample, lease.lease_epoch) for lease in (await fleet.ask(AwaitRevoked(), peer)).leases]


def test_the_holder_of_a_surplus_member_is_told_at_once_and_once_and_what_it_sampled_is_waste(tmp_path):
    async def scenario(fleet):
        await fleet.serve(0)
        leases = [await fleet.lease(), await fleet.lease(), await fleet.lease(OTHER_ENV)]
        waiting = asyncio.create_task(revoked(fleet, OTHER_ENV))
        await asyncio.sleep(1)
        await fleet.commit(leases[0])
        await fleet.commit(leases[1])
        assert await waiting == [(SampleId(0, 2), 0)]
        assert now() == pytest.approx(1)
        assert await revoked(fleet, OTHER_ENV) == []
        assert now() == pytest.approx(1 + LONG_POLL_S)
        assert await fleet.fail(leases[2], OTHER_ENV, sampled=7) == "superseded"
        reply = await fleet.ask(NextBatch(step=1))
        assert [row.sample.member for row in reply.manifest.rows] == [0, 1]
        assert (reply.stats["surplus"], reply.stats["tokens_wasted"]) == (1, 7)

    run(tmp_path, scenario, groups=1, redundant_members=1)


def test_the_tokens_of_a_failed_attempt_are_waste(tmp_path):
    async def scenario(fleet):
        await fleet.serve(0)
        await fleet.fail(await fleet.lease(), sampled=11)
        await fleet.roll_out(4)
        assert (await fleet.ask(NextBatch(step=1))).stats["tokens_wasted"] == 11

    run(tmp_path, scenario)


def test_at_alpha_zero_the_late_group_is_revoked_when_its_batch_is_made(tmp_path):
    async def scenario(fleet):
        await fleet.serve(0)
        late = [await fleet.lease() for _ in range(2)]
        await fleet.roll_out(4)
        assert {row.sample.group for row in (await fleet.batch(1)).rows} == {1, 2}
        assert await revoked(fleet) == [(lease.sample, lease.lease_epoch) for lease in late]
        assert (await counts(fleet))["surplus"] == 2

    run(tmp_path, scenario, redundant_groups=1)


def test_at_its_deadline_a_group_without_quorum_expires_and_its_task_is_the_next(tmp_path):
    async def scenario(fleet):
        await fleet.serve(0)
        hung, done = await fleet.lease(), await fleet.lease()
        await fleet.commit(done)
        await asyncio.sleep(3)
        other = [await fleet.lease(), await fleet.lease()]
        assert await revoked(fleet) == []  # 3 + 5 s
        assert await revoked(fleet) == [(hung.sample, 0)]
        assert now() == pytest.approx(10)
        again = await fleet.lease()
        assert (again.task.cursor, again.sample) == (0, SampleId(2, 0, retry=1))
        assert (await counts(fleet))["expired"] == 2
        assert await fleet.commit(other[0]) == "accepted"

    run(tmp_path, scenario, straggler_deadline_s=10.0)


def test_with_a_quorum_the_group_goes_as_it_is_and_the_batch_comes_at_the_deadline(tmp_path):
    async def scenario(fleet):
        await fleet.serve(0)
        leases = [await fleet.lease() for _ in range(3)]
        await fleet.commit(leases[0])
        await fleet.commit(leases[2])
        manifest = await fleet.batch(1)
        assert now() == pytest.approx(4)
        assert [row.sample.member for row in manifest.rows] == [0, 2]
        assert await revoked(fleet) == [(SampleId(0, 1), 0)]

    run(tmp_path, scenario, groups=1, group_size=3, min_members=2, straggler_deadline_s=4.0)


def test_the_deadline_stands_still_while_engines_are_paused(tmp_path):
    async def scenario(fleet):
        await fleet.serve(0)
        await fleet.lease()
        await asyncio.sleep(1)
        await fleet.ask(EnginesPaused(paused=True))
        await asyncio.sleep(100)
        await fleet.ask(EnginesPaused(paused=True))
        await fleet.serve(0)  # a version served ends the pause
        assert await revoked(fleet) == [(SampleId(0, 0), 0)]
        assert now() == pytest.approx(100 + 4)

    run(tmp_path, scenario, straggler_deadline_s=4.0)


def test_groups_that_keep_expiring_stop_the_run_with_the_reason(tmp_path):
    async def scenario(fleet):
        await fleet.serve(0)
        waiting = asyncio.create_task(fleet.batch(1))
        for _ in range(3):
            await fleet.lease()
            await revoked(fleet)
        with pytest.raises(BudgetError, match=r"3 reached rollout.straggler_deadline_s without a quorum"):
            await waiting
        assert now() == pytest.approx(3 * 1)

    run(tmp_path, scenario, groups=1, max_failed_fraction=0.7, straggler_deadline_s=1.0)


def test_the_next_process_knows_what_is_surplus_and_what_went_with_a_quorum(tmp_path):
    options = {"group_size": 3, "groups": 1, "min_members": 2, "straggler_deadline_s": 4.0, "redundant_members": 1}

    async def first(fleet):
        await fleet.serve(0)
        leases = [await fleet.lease() for _ in range(4)]
        await fleet.commit(leases[0])
        await fleet.commit(leases[3])
        await asyncio.sleep(5)
        return await counts(fleet)

    before = run(tmp_path, first, **options)
    assert (before["committed"], before["expired"]) == (2, 2)

    async def second(fleet):
        assert await counts(fleet) == before
        assert [row.sample.member for row in (await fleet.batch(1)).rows] == [0, 3]

    run(tmp_path, second, **options)


def test_what_an_evaluation_no_longer_waits_for_is_revoked(tmp_path):
    async def scenario(fleet):
        evaluating = asyncio.create_task(fleet.ask(Evaluate(version=0)))
        await asyncio.sleep(1)
        late = await fleet.lease()
        await evaluating
        reply = await fleet.ask(AwaitRevoked(), ENV)
        assert reply.leases == [LeaseName(late.sample, late.lease_epoch, "eval")]

    run(tmp_path, scenario, problems=1)


def test_a_lost_env_that_speaks_again_is_told_that_its_leases_have_gone_to_others(tmp_path):
    async def scenario(fleet):
        await fleet.serve(0)
        lease = await fleet.lease(OTHER_ENV)
        fleet.buffer.peer_lost(OTHER_ENV)
        assert await revoked(fleet, OTHER_ENV) == [(lease.sample, 0)]
        lost = await fleet.lease(OTHER_ENV)
        fleet.buffer.peer_lost(OTHER_ENV)
        assert await revoked(fleet, Peer("env", 1, 1)) == []
        assert await revoked(fleet, OTHER_ENV) == []  # a newer incarnation has spoken
        assert (await fleet.lease()).sample == lost.sample

    run(tmp_path, scenario)


@pytest.mark.parametrize("alpha", [0.0, 1.0])
def test_in_the_ring_losers_free_their_slots_and_leave_nothing_behind(tmp_path, alpha):
    played = play(tmp_path, steps=6, alpha=alpha, redundant_groups=1, redundant_members=1, length_of=lengths(3))
    assert len(played.manifests) == 6
    assert played.stats["surplus"] > 0
    assert played.leftovers == {}
    # Every token that was sampled is in a batch, waits for one, or is counted as waste.
    in_batches = sum(row.num_sampled for manifest in played.manifests for row in manifest.rows)
    waiting = sum(
        member.result.num_sampled
        for group in played.ledger.outstanding.values()
        for member in group.members
        if member.result is not None
    )
    assert sum(engine.sampled for engine in played.engines) == in_batches + waiting + played.ledger.tokens_wasted


def test_redundancy_shortens_the_steps(tmp_path):
    plain = play(tmp_path / "plain", steps=8, alpha=0.0, length_of=lengths(1))
    redundant = play(tmp_path / "redundant", steps=8, alpha=0.0, length_of=lengths(1), redundant_groups=2)
    assert redundant.taken_at[-1] < plain.taken_at[-1]


def test_redundant_members_that_are_not_needed_are_no_failures(tmp_path):
    async def scenario(fleet):
        await fleet.serve(0)
        leases = [await fleet.lease() for _ in range(16)]
        for lease in leases:
            if lease.sample.member < 2:
                assert await fleet.commit(lease) == "accepted"
        assert len((await fleet.batch(1)).rows) == 4

    run(tmp_path, scenario, redundant_members=6, max_failed_fraction=0.1)

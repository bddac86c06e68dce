"""The buffer as its callers see it: leases, commits, batches, recovery and evaluation, on virtual time."""

import asyncio

import pytest

from flashflow.clock import LoopClock
from flashflow.config.sections import (
    BatchSection,
    EvalSection,
    JournalSection,
    NetworkSection,
    RolloutSection,
    RunSection,
)
from flashflow.errors import BudgetError, ContractError
from flashflow.messages import (
    Ack,
    AcquireLease,
    AwaitRevoked,
    Checkpointed,
    Evaluate,
    FetchRows,
    Finish,
    JournalStatus,
    JournalStatusRequest,
    LeaseName,
    NextBatch,
    NoLease,
    ServingVersion,
)
from flashflow.records import SampleId, Task
from flashflow.roles.bookkeeper import rng_key
from flashflow.roles.buffer import Buffer
from flashflow.transport.channel import Peer
from tests.roles.buffer_fleet import CONTROLLER, ENV, LONG_POLL_S, OTHER_ENV, Fleet, Tasks, run


def test_a_lease_waits_for_the_first_version_and_comes_as_soon_as_it_is_served(tmp_path):
    async def scenario(fleet):
        waiting = asyncio.create_task(fleet.lease())
        await asyncio.sleep(1)
        assert not waiting.done()
        await fleet.serve(0)
        lease = await waiting
        assert asyncio.get_running_loop().time() == pytest.approx(1)
        assert (lease.sample, lease.purpose, lease.min_version) == (SampleId(0, 0), "train", 0)
        assert lease.task == Task(cursor=0, row={"prompt": "train 0"})

    run(tmp_path, scenario)


def test_without_a_lease_the_reason_comes_after_the_long_poll(tmp_path):
    async def scenario(fleet):
        reply = await fleet.ask(AcquireLease(), ENV)
        assert reply == NoLease(reason="no version is served yet")
        assert asyncio.get_running_loop().time() == pytest.approx(LONG_POLL_S)
        await fleet.serve(0)
        await fleet.roll_out(4)
        reply = await fleet.ask(AcquireLease(), ENV)
        assert reply == NoLease(reason="admission is closed until version 1 is served (now 0)")

    run(tmp_path, scenario)


def test_at_alpha_zero_batches_and_groups_go_in_lockstep(tmp_path):
    async def scenario(fleet):
        for step in range(1, 5):
            await fleet.serve(step - 1)
            await fleet.roll_out(4)
            manifest = await fleet.batch(step)
            assert [str(row.sample) for row in manifest.rows] == [
                f"g{group}m{member}" for group in (2 * step - 2, 2 * step - 1) for member in (0, 1)
            ]
            assert {row.initiating_version for row in manifest.rows} == {step - 1}
            assert (manifest.step, manifest.group_size, manifest.redone) == (step, 2, False)
            assert manifest.rng_key == rng_key(5, step)

    run(tmp_path, scenario)


def test_keys_of_batches_differ_and_fit_in_64_bits():
    keys = {rng_key(seed, step) for seed in range(4) for step in range(50)}
    assert len(keys) == 200
    assert max(keys).bit_length() <= 64


def test_a_batch_comes_as_soon_as_its_last_sample_is_committed(tmp_path):
    async def scenario(fleet):
        await fleet.serve(0)
        waiting = asyncio.create_task(fleet.batch(1))
        await asyncio.sleep(1)
        await fleet.roll_out(3)
        await asyncio.sleep(1)
        assert not waiting.done()
        await fleet.roll_out(1)
        assert len((await waiting).rows) == 4
        assert asyncio.get_running_loop().time() == pytest.approx(2)

    run(tmp_path, scenario)


def test_without_a_batch_the_reason_comes_after_the_long_poll(tmp_path):
    async def scenario(fleet):
        await fleet.serve(0)
        await fleet.roll_out(2)
        reply = await fleet.ask(NextBatch(step=1))
        assert (reply.manifest, reply.reason) == (None, "batch 1 has 1 of 2 complete groups")
        assert not reply.finished
        assert asyncio.get_running_loop().time() == pytest.approx(LONG_POLL_S)

    run(tmp_path, scenario)


def test_statistics_are_the_ledger_s_at_hand_over(tmp_path):
    async def scenario(fleet):
        await fleet.serve(0)
        broken = await fleet.lease()
        await fleet.fail(broken)
        await fleet.roll_out(6)
        await fleet.commit(broken, sampled=5)
        await fleet.lease()
        reply = await fleet.ask(NextBatch(step=1))
        assert reply.stats == {
            "admitted": 1.0,
            "leased": 1.0,
            "committed": 2.0,
            "consumed": 4.0,
            "filtered": 0.0,
            "failed": 0.0,
            "expired": 0.0,
            "surplus": 0.0,
            "submitted": 8.0,
            "buffer_fill": 0.5,
            "tokens_wasted": 5.0,
            "superseded": 1.0,
            "retries": 1.0,
        }

    run(tmp_path, scenario, alpha=1.0)


def test_rows_are_what_was_committed_in_the_order_asked(tmp_path):
    async def scenario(fleet):
        await fleet.serve(0)
        await fleet.roll_out(4, reward=0.5)
        await fleet.batch(1)
        samples = [SampleId(1, 1), SampleId(0, 0)]
        rows = await fleet.ask(FetchRows(step=1, samples=samples), Peer("trainer", 0, 0, generation=1))
        assert [row.sample for row in rows.trajectories] == samples
        assert rows.trajectories[0].tokens.tolist() == [1, 2, 3, 4, 5]
        assert rows.trajectories[0].reward == 0.5
        with pytest.raises(ContractError, match="batch 1 has no sample g7m0"):
            await fleet.ask(FetchRows(step=1, samples=[SampleId(7, 0)]))
        with pytest.raises(ContractError, match="rows of batch 2: the last batch handed out is 1"):
            await fleet.ask(FetchRows(step=2, samples=[]))

    run(tmp_path, scenario)


def test_a_batch_asked_for_again_is_the_same_also_by_the_next_process(tmp_path):
    async def first(fleet):
        await fleet.serve(0)
        await fleet.roll_out(4)
        manifest = await fleet.batch(1)
        again = await fleet.batch(1)
        assert (manifest.redone, again.redone) == (False, True)
        assert again.rows == manifest.rows
        return manifest

    manifest = run(tmp_path, first)

    async def second(fleet):
        status = await fleet.ask(JournalStatusRequest())
        assert isinstance(status, JournalStatus)
        assert (status.last_manifest, status.counts["consumed"]) == (1, 4)
        again = await fleet.batch(1)
        assert (again.rows, again.rng_key, again.redone) == (manifest.rows, manifest.rng_key, True)
        samples = [row.sample for row in manifest.rows]
        rows = await fleet.ask(FetchRows(step=1, samples=samples))
        assert [row.sample for row in rows.trajectories] == samples
        with pytest.raises(ContractError, match="batch 3: the last batch handed out is 1"):
            await fleet.batch(3)

    run(tmp_path, second)


def test_the_next_process_keeps_commits_gives_leases_out_again_and_goes_on_in_the_data(tmp_path):
    async def first(fleet):
        await fleet.serve(0)
        await fleet.roll_out(1)
        return [await fleet.lease(), await fleet.lease()]

    held = run(tmp_path, first)

    async def second(fleet):
        assert await fleet.commit(held[0]) == "superseded"
        idle = await fleet.ask(AcquireLease(), ENV)  # the journal names a version, but its engines may be gone
        assert isinstance(idle, NoLease)
        assert idle.reason == "no version is served yet"
        await fleet.serve(0)
        leases = [await fleet.lease() for _ in range(3)]
        assert [lease.sample for lease in leases] == [SampleId(0, 1), SampleId(1, 0), SampleId(1, 1)]
        assert [lease.task.cursor for lease in leases] == [0, 1, 1]
        assert leases[0].lease_epoch != held[0].lease_epoch
        for lease in leases:
            assert await fleet.commit(lease) == "accepted"
        assert len((await fleet.batch(1)).rows) == 4

    run(tmp_path, second)


def test_a_commit_sent_again_is_a_duplicate_also_to_the_next_process(tmp_path):
    async def first(fleet):
        await fleet.serve(0)
        lease = await fleet.lease()
        assert await fleet.commit(lease) == "accepted"
        assert await fleet.commit(lease) == "duplicate"
        return lease

    lease = run(tmp_path, first)

    async def second(fleet):
        assert await fleet.commit(lease) == "duplicate"

    run(tmp_path, second)


def test_leases_of_a_lost_env_go_to_another_at_once_and_its_late_commit_counts_for_nothing(tmp_path):
    async def scenario(fleet):
        await fleet.serve(0)
        lost = [await fleet.lease() for _ in range(4)]
        waiting = asyncio.create_task(fleet.lease(OTHER_ENV))
        await asyncio.sleep(1)
        fleet.buffer.peer_lost(ENV)
        lease = await waiting
        assert asyncio.get_running_loop().time() == pytest.approx(1)
        assert lease.sample == lost[0].sample
        assert lease.lease_epoch == lost[0].lease_epoch + 1
        assert await fleet.commit(lost[0]) == "superseded"
        assert await fleet.commit(lease, OTHER_ENV) == "accepted"
        assert await fleet.commit(lost[0]) == "superseded"

    run(tmp_path, scenario)


def test_a_lost_env_that_still_waits_gets_no_lease_until_it_speaks_again(tmp_path):
    async def scenario(fleet):
        ghost = asyncio.create_task(fleet.ask(AcquireLease(), ENV))
        await asyncio.sleep(1)
        fleet.buffer.peer_lost(ENV)
        await fleet.serve(0)
        assert (await fleet.lease(OTHER_ENV)).sample == SampleId(0, 0)
        assert isinstance(await ghost, NoLease)
        assert (await fleet.lease(ENV)).sample == SampleId(0, 1)

    run(tmp_path, scenario)


def test_a_newer_incarnation_of_an_env_ends_what_the_older_one_holds_and_says(tmp_path):
    async def scenario(fleet):
        await fleet.serve(0)
        held = await fleet.lease(ENV)
        newer = Peer("env", 0, 1)
        lease = await fleet.lease(newer)
        assert (lease.sample, lease.lease_epoch) == (held.sample, held.lease_epoch + 1)
        assert await fleet.commit(held, ENV) == "superseded"
        assert await fleet.fail(held, ENV) == "superseded"
        assert (await fleet.ask(AcquireLease(), ENV)).finished
        assert await fleet.commit(lease, newer) == "accepted"

    run(tmp_path, scenario)


def test_a_gang_of_an_older_generation_is_refused(tmp_path):
    async def scenario(fleet):
        await fleet.ask(JournalStatusRequest(), Peer("controller", 0, 1, generation=2))
        with pytest.raises(ContractError, match="superseded by incarnation 1"):
            await fleet.ask(NextBatch(step=1), CONTROLLER)
        with pytest.raises(ContractError, match="gang generation 1 is superseded by 2"):
            await fleet.ask(FetchRows(step=1, samples=[]), Peer("trainer", 0, 0, generation=1))

    run(tmp_path, scenario)


def test_versions_served_never_go_back_but_for_a_new_gang(tmp_path):
    async def scenario(fleet):
        await fleet.serve(0)
        await fleet.roll_out(4)
        await fleet.batch(1)
        await fleet.serve(1)
        await fleet.serve(1)
        with pytest.raises(ContractError, match="version 0 is served after 1"):
            await fleet.serve(0)
        await fleet.ask(ServingVersion(version=0), Peer("controller", 0, 1, generation=2))
        assert isinstance(await fleet.ask(AcquireLease(), ENV), NoLease)

    run(tmp_path, scenario)


def test_a_broken_attempt_is_tried_again_and_in_the_end_is_a_row_without_reward(tmp_path):
    async def scenario(fleet):
        await fleet.serve(0)
        for retry in range(2):
            lease = await fleet.lease()
            assert lease.sample == SampleId(0, 0, retry)
            assert await fleet.fail(lease) == "accepted"
        await fleet.roll_out(3)
        manifest = await fleet.batch(1)
        row = manifest.rows[0]
        assert (row.sample, row.reward, row.outcome, row.num_tokens) == (SampleId(0, 0, 1), None, "failed", 1)
        rows = await fleet.ask(FetchRows(step=1, samples=[row.sample]))
        assert (rows.trajectories[0].num_tokens, rows.trajectories[0].num_sampled) == (1, 0)
        assert rows.trajectories[0].outcome == "failed"

    run(tmp_path, scenario, max_attempts=2)


def test_a_group_whose_every_member_breaks_is_replaced(tmp_path):
    async def scenario(fleet):
        await fleet.serve(0)
        for _ in range(2):
            await fleet.fail(await fleet.lease())
        await fleet.roll_out(4)
        assert [row.sample.group for row in (await fleet.batch(1)).rows] == [1, 1, 2, 2]

    run(tmp_path, scenario, max_attempts=1)


def test_when_every_member_of_more_groups_than_allowed_breaks_the_run_stops_with_the_last_traceback(tmp_path):
    async def scenario(fleet):
        await fleet.serve(0)
        waiting = asyncio.create_task(fleet.batch(1))
        for _ in range(6):  # 3 groups; at a share of one half a batch of 2 may cost 2
            await fleet.fail(await fleet.lease())
        with pytest.raises(
            BudgetError, match=r"(?s)3 groups ended without a reward of any member.*the game crashed.*GameError"
        ):
            await waiting
        assert "the run stops" in (await fleet.ask(AcquireLease(), ENV)).reason

    run(tmp_path, scenario, max_attempts=1)

    async def resumed(fleet):
        await fleet.serve(0)
        await fleet.roll_out(4)
        assert [row.sample.group for row in (await fleet.batch(1)).rows] == [3, 3, 4, 4]

    run(tmp_path, resumed, max_attempts=1)


def test_more_failures_in_a_batch_than_allowed_stop_the_run(tmp_path):
    async def scenario(fleet):
        await fleet.serve(0)
        await fleet.fail(await fleet.lease())
        await fleet.roll_out(3)
        with pytest.raises(BudgetError, match=r"1 of 4 samples have no reward, over rollout.max_failed_fraction 0.2"):
            await fleet.batch(1)

    run(tmp_path, scenario, max_attempts=1, max_failed_fraction=0.2)


def test_the_trainer_waits_for_a_straggler_that_would_grow_too_old(tmp_path):
    async def scenario(fleet):
        await fleet.serve(0)
        straggler = await fleet.lease()
        await fleet.roll_out(1)
        await fleet.batch(1)
        await fleet.serve(1)
        await fleet.roll_out(1)
        reply = await fleet.ask(NextBatch(step=2))
        assert reply.reason == "batch 2 waits for group 0, which is due by batch 2"
        await fleet.commit(straggler)
        assert [row.sample.group for row in (await fleet.batch(2)).rows] == [0]

    run(tmp_path, scenario, alpha=1.0, group_size=1, groups=1)


def test_under_drop_the_straggler_expires_and_its_place_is_refilled(tmp_path):
    async def scenario(fleet):
        await fleet.serve(0)
        straggler = await fleet.lease()
        await fleet.roll_out(1)
        await fleet.batch(1)
        await fleet.serve(1)
        await fleet.roll_out(1)
        assert [row.sample.group for row in (await fleet.batch(2)).rows] == [2]
        assert await fleet.commit(straggler) == "superseded"
        counts = (await fleet.ask(JournalStatusRequest())).counts
        assert counts["expired"] == 1
        await fleet.roll_out(1)

    run(tmp_path, scenario, alpha=1.0, group_size=1, groups=1, on_stale="drop")


def test_the_data_ends_with_what_is_left(tmp_path):
    async def scenario(fleet):
        await fleet.serve(0)
        await fleet.roll_out(4)
        await fleet.batch(1)
        await fleet.serve(1)
        await fleet.roll_out(2)
        assert await fleet.ask(AcquireLease(), ENV) == NoLease(reason="the data has ended")
        assert {row.sample.group for row in (await fleet.batch(2)).rows} == {2}
        reply = await fleet.ask(NextBatch(step=3))
        assert (reply.manifest, reply.finished) == (None, True)

    run(tmp_path, scenario, tasks=Tasks(3))


def test_after_finish_envs_may_leave(tmp_path):
    async def scenario(fleet):
        waiting = asyncio.create_task(fleet.ask(AcquireLease(), ENV))
        await asyncio.sleep(1)
        assert await fleet.ask(Finish()) == Ack()
        assert await waiting == NoLease(reason="the run is over", finished=True)
        assert (await fleet.ask(NextBatch(step=1))).finished

    run(tmp_path, scenario)


def test_a_checkpoint_lets_the_buffer_forget_payloads_and_manifests(tmp_path):
    async def scenario(fleet):
        for step in range(1, 21):
            await fleet.serve(step - 1)
            await fleet.roll_out(4)
            await fleet.batch(step)
        before = len(list(tmp_path.glob("payload-*.log")))
        assert await fleet.ask(Checkpointed(step=19)) == Ack()
        assert len(list(tmp_path.glob("payload-*.log"))) < before / 2
        samples = [row.sample for row in (await fleet.batch(20)).rows]
        assert len((await fleet.ask(FetchRows(step=20, samples=samples))).trajectories) == 4
        with pytest.raises(ContractError, match="batch 19: the checkpoint of step 19 covers it"):
            await fleet.batch(19)
        assert (await fleet.ask(JournalStatusRequest())).counts["consumed"] == 80
        with pytest.raises(ContractError, match="a checkpoint of step 21 cannot be"):
            await fleet.ask(Checkpointed(step=21))

    run(tmp_path, scenario)

    async def resumed(fleet):
        assert (await fleet.ask(JournalStatusRequest())).counts["consumed"] == 80
        assert len((await fleet.batch(20)).rows) == 4

    run(tmp_path, resumed)


def test_a_lease_nobody_ends_counts_as_a_broken_attempt_after_twice_its_deadline(tmp_path):
    async def scenario(fleet):
        await fleet.serve(0)
        forgotten = await fleet.lease()
        await asyncio.sleep(25)
        lease = await fleet.lease()
        assert lease.sample == SampleId(forgotten.sample.group, forgotten.sample.member, retry=1)
        assert (await fleet.ask(AwaitRevoked(), ENV)).leases == [named(forgotten)]
        assert await fleet.commit(forgotten) == "superseded"

    run(tmp_path, scenario, trajectory_deadline_s=10.0)


def named(lease):
    return LeaseName(lease.sample, lease.lease_epoch, lease.purpose)


def test_a_lease_that_its_env_names_again_and_again_is_not_forgotten(tmp_path):
    async def scenario(fleet):
        await fleet.serve(0)
        waiting = await fleet.lease()
        for _ in range(10):
            assert (await fleet.ask(AwaitRevoked(late=[named(waiting)]), ENV)).leases == []
        assert asyncio.get_running_loop().time() >= 50
        assert await fleet.commit(waiting) == "accepted"

    run(tmp_path, scenario, trajectory_deadline_s=10.0)


def test_the_description_says_who_holds_what_for_how_long_and_why_nothing_moves(tmp_path):
    async def scenario(fleet):
        await fleet.serve(0)
        await fleet.lease()
        await fleet.lease(OTHER_ENV)
        waiting = asyncio.create_task(fleet.ask(NextBatch(step=1)))
        await asyncio.sleep(3)
        text = fleet.buffer.describe()
        assert "g0m0 epoch 0: env-0-0 for 3.0 s" in text
        assert "g0m1 epoch 0: env-1-0 for 3.0 s" in text
        assert "batch 1 has 0 of 2 complete groups" in text
        assert "2 samples submitted (2 leased)" in text
        await waiting

    run(tmp_path, scenario)


def test_an_evaluation_goes_before_training_pins_its_version_and_never_enters_the_ledger(tmp_path):
    async def scenario(fleet):
        await fleet.serve(4)
        train = await fleet.lease()
        evaluating = asyncio.create_task(fleet.ask(Evaluate(version=4)))
        await asyncio.sleep(1)
        leases = [await fleet.lease() for _ in range(3)]
        assert [(lease.purpose, lease.pin_version, lease.min_version) for lease in leases] == [("eval", 4, 4)] * 3
        assert [lease.task.row["prompt"] for lease in leases] == ["held out 0", "held out 1", "held out 2"]
        assert (await fleet.lease()).purpose == "train"
        assert await fleet.commit(leases[0], reward=1.0, sampled=2) == "accepted"
        assert await fleet.commit(leases[0], reward=1.0, sampled=2) == "duplicate"
        for attempt in range(1, 4):  # rollout.max_attempts
            assert await fleet.fail(leases[1]) == "accepted"
            if attempt < 3:
                leases[1] = await fleet.lease()
                assert (leases[1].purpose, leases[1].task.row["prompt"]) == ("eval", "held out 1")
        assert not evaluating.done()
        assert await fleet.commit(leases[2], reward=0.5, sampled=4) == "accepted"
        reply = await evaluating
        assert (reply.version, reply.num_problems, reply.num_failed) == (4, 3, 1)
        assert reply.accuracy == pytest.approx((1.0 + 0.0 + 0.5) / 3)
        assert reply.mean_response_tokens == pytest.approx((2 + 4) / 2)
        assert reply.seconds == pytest.approx(1.0)
        assert (await fleet.ask(JournalStatusRequest())).counts["leased"] == 2
        assert await fleet.commit(train, version=4) == "accepted"

    run(tmp_path, scenario)


def test_an_evaluation_lease_of_a_lost_env_is_given_out_again(tmp_path):
    async def scenario(fleet):
        evaluating = asyncio.create_task(fleet.ask(Evaluate(version=0)))
        await asyncio.sleep(1)
        lost = await fleet.lease(ENV)
        fleet.buffer.peer_lost(ENV)
        lease = await fleet.lease(OTHER_ENV)
        assert (lease.sample, lost.lease_epoch != lease.lease_epoch) == (lost.sample, True)
        assert await fleet.commit(lost) == "superseded"
        assert await fleet.commit(lease, OTHER_ENV) == "accepted"
        assert (await evaluating).accuracy == 1.0

    run(tmp_path, scenario, problems=1)


def test_an_evaluation_past_its_deadline_names_how_many_are_missing(tmp_path):
    async def scenario(fleet):
        evaluating = asyncio.create_task(fleet.ask(Evaluate(version=0)))
        await asyncio.sleep(1)
        late = await fleet.lease()
        await fleet.commit(await fleet.lease())
        reply = await evaluating
        assert (reply.num_missing, reply.num_problems) == (2, 3)
        assert await fleet.commit(late) == "superseded"
        assert isinstance(await fleet.ask(AcquireLease(), ENV), NoLease)

    run(tmp_path, scenario)


def test_one_evaluation_at_a_time_and_a_new_gang_s_takes_the_place_of_the_old(tmp_path):
    async def scenario(fleet):
        first = asyncio.create_task(fleet.ask(Evaluate(version=1)))
        await asyncio.sleep(1)
        late = await fleet.lease()
        with pytest.raises(ContractError, match="version 1 is still being evaluated"):
            await fleet.ask(Evaluate(version=2))
        second = asyncio.create_task(fleet.ask(Evaluate(version=2), Peer("controller", 0, 1, generation=2)))
        await asyncio.sleep(1)
        with pytest.raises(ContractError, match="is superseded"):
            await first
        assert await fleet.commit(late) == "superseded"
        for _ in range(3):
            await fleet.commit(await fleet.lease())
        assert (await second).version == 2

    run(tmp_path, scenario)


def test_a_cancelled_evaluation_leaves_no_leases_behind(tmp_path):
    async def scenario(fleet):
        evaluating = asyncio.create_task(fleet.ask(Evaluate(version=1)))
        await asyncio.sleep(1)
        evaluating.cancel()
        await asyncio.wait({evaluating})
        assert isinstance(await fleet.ask(AcquireLease(), ENV), NoLease)

    run(tmp_path, scenario)


def test_the_buffer_runs_on_real_time_with_its_disk_calls_in_threads(tmp_path):
    async def scenario():
        buffer = Buffer(
            run=RunSection(),
            rollout=RolloutSection(group_size=2, alpha=0.0),
            batch=BatchSection(groups=1),
            journal=JournalSection(),
            evaluation=EvalSection(),
            network=NetworkSection(),
            tasks=Tasks(),
            folder=tmp_path,
            clock=LoopClock(),
        )
        await buffer.start()
        fleet = Fleet(buffer)
        await fleet.serve(0)
        await fleet.roll_out(2)
        manifest = await fleet.batch(1)
        rows = await fleet.ask(FetchRows(step=1, samples=[row.sample for row in manifest.rows]))
        await buffer.close()
        return rows.trajectories

    assert len(asyncio.run(scenario())) == 2


def test_a_message_no_edge_leads_to_the_buffer_is_refused(tmp_path):
    async def scenario(fleet):
        with pytest.raises(ContractError, match="sent Ack, which the buffer does not serve"):
            await fleet.ask(Ack())

    run(tmp_path, scenario)

"""The buffer with filters, filtered failures and replay: on disk, over restarts, and towards its callers."""

import asyncio

import pytest

from flashflow.algorithms.settings import FilterConfig, ReplayConfig
from flashflow.errors import BudgetError
from flashflow.messages import AcquireLease, Checkpointed, FetchRows, JournalStatusRequest, NextBatch, NoLease
from flashflow.metrics import manifest_metrics
from tests.roles.buffer_fleet import ENV, LONG_POLL_S, Tasks, run

DYNAMIC = FilterConfig(dynamic=True)
REPLAY = ReplayConfig(min_std=0.1, min_mean=0.4, max_replay_staleness=50)


async def roll_out(fleet, *rewards):
    """One group of two after another; each pair of rewards is a group's."""
    for pair in rewards:
        leases = [await fleet.lease(), await fleet.lease()]
        for lease, reward in zip(leases, pair, strict=True):
            assert await fleet.commit(lease, reward=reward) == "accepted"


async def counts(fleet):
    return (await fleet.ask(JournalStatusRequest())).counts


def test_a_filtered_group_s_capacity_goes_at_once_to_an_env_that_waits(tmp_path):
    async def scenario(fleet):
        await fleet.serve(0)
        first = [await fleet.lease() for _ in range(4)]
        waiting = asyncio.create_task(fleet.ask(AcquireLease(), ENV))
        await asyncio.sleep(1)
        assert not waiting.done()
        for lease in first[:2]:
            await fleet.commit(lease, reward=1.0)
        refill = await waiting
        assert asyncio.get_running_loop().time() == pytest.approx(1)
        assert (refill.sample.group, refill.task.cursor) == (2, 2)
        for lease, reward in ((first[2], 0.0), (first[3], 1.0), (refill, 0.0)):
            await fleet.commit(lease, reward=reward)
        await fleet.commit(await fleet.lease(), reward=1.0)
        reply = await fleet.ask(NextBatch(step=1))
        assert [row.sample.group for row in reply.manifest.rows] == [1, 1, 2, 2]
        assert (reply.stats["filtered"], reply.stats["consumed"], reply.stats["tokens_wasted"]) == (2, 4, 6)
        assert manifest_metrics(reply.manifest)["filtered_groups"] == 1

    run(tmp_path, scenario, filters=DYNAMIC)


def test_everything_filtered_ends_with_an_error_that_names_the_reward_function_and_never_hangs(tmp_path):
    async def scenario(fleet):
        await fleet.serve(0)
        waiting = asyncio.create_task(fleet.batch(1))
        await roll_out(fleet, *[(1.0, 1.0)] * 17)
        with pytest.raises(BudgetError, match=r"17 groups of 17, .*max_filtered_fraction = 0.5 .* reward tests:reward"):
            await waiting
        assert asyncio.get_running_loop().time() < LONG_POLL_S
        reply = await fleet.ask(AcquireLease(), ENV)
        assert isinstance(reply, NoLease)
        assert "the run stops: since the last batch the filters dropped 17" in reply.reason

    filters = FilterConfig(dynamic=True, max_filtered_fraction=0.5)
    run(tmp_path, scenario, filters=filters)

    async def resumed_with_a_better_reward(fleet):
        await fleet.serve(0)
        await roll_out(fleet, (1.0, 1.0), (0.0, 1.0), (0.0, 1.0))
        manifest = await fleet.batch(1)
        assert [row.sample.group for row in manifest.rows] == [18, 18, 19, 19]
        assert manifest.num_filtered == 18

    run(tmp_path, resumed_with_a_better_reward, filters=filters)


def test_data_that_ends_in_filtered_groups_ends_the_run(tmp_path):
    async def scenario(fleet):
        await fleet.serve(0)
        await roll_out(fleet, (1.0, 1.0), (0.0, 1.0), (0.0, 0.0))
        assert {row.sample.group for row in (await fleet.batch(1)).rows} == {1}
        assert (await fleet.ask(NextBatch(step=2))).finished

    run(tmp_path, scenario, filters=DYNAMIC, tasks=Tasks(3))


def test_the_next_process_filters_what_the_one_before_had_no_time_to(tmp_path):
    async def first(fleet):
        await fleet.serve(0)
        await roll_out(fleet, (1.0, 1.0), (0.0, 1.0))

    run(tmp_path, first)

    async def second(fleet):
        assert (await counts(fleet))["filtered"] == 2
        await fleet.serve(0)
        await roll_out(fleet, (0.0, 1.0))
        assert [row.sample.group for row in (await fleet.batch(1)).rows] == [1, 1, 2, 2]

    run(tmp_path, second, filters=DYNAMIC)


def test_a_commit_without_reward_is_tried_again_under_filter_and_its_tokens_are_wasted(tmp_path):
    async def scenario(fleet):
        await fleet.serve(0)
        lease = await fleet.lease()
        assert await fleet.commit(lease, reward=None) == "accepted"
        again = await fleet.lease()
        assert (again.sample.group, again.sample.member, again.sample.retry) == (0, 0, 1)
        assert await fleet.commit(again, reward=None) == "accepted"
        assert (await counts(fleet))["failed"] == 2
        await fleet.roll_out(4)
        reply = await fleet.ask(NextBatch(step=1))
        assert [row.sample.group for row in reply.manifest.rows] == [1, 1, 2, 2]
        assert reply.stats["tokens_wasted"] == 6

    run(tmp_path, scenario, failures="filter", max_attempts=2)


def test_under_filter_an_environment_that_always_breaks_stops_the_run(tmp_path):
    async def scenario(fleet):
        await fleet.serve(0)
        waiting = asyncio.create_task(fleet.batch(1))
        for _ in range(17):
            await fleet.fail(await fleet.lease())
        with pytest.raises(BudgetError, match=r"(?s)failures cost 17 groups of 17.*last failure.*GameError"):
            await waiting

    run(tmp_path, scenario, failures="filter", max_attempts=1)


def test_a_replay_slot_s_payload_outlives_checkpoints_and_the_process_and_the_draw_is_redone(tmp_path):
    async def first(fleet):
        await fleet.serve(0)
        await roll_out(fleet, (0.0, 1.0), (0.0, 1.0))
        await fleet.batch(1)
        for step in range(2, 30):
            await fleet.serve(step - 1)
            await roll_out(fleet, (1.0, 1.0), (0.2, 0.3))
            manifest = await fleet.batch(step)
            assert [(row.sample.group, row.use > 1) for row in manifest.rows[::2]] == [
                (2 * step - 1, False),
                (manifest.rows[2].sample.group, True),
            ]
        await fleet.ask(Checkpointed(step=28))
        assert len(list(tmp_path.glob("payload-*.log"))) < 10
        return manifest

    manifest = run(tmp_path, first, replay=REPLAY)
    figures = manifest_metrics(manifest)
    assert (figures["staleness_max"], figures["staleness_histogram"]) == (0, {"0": 2})
    assert (figures["replay_groups"], figures["replay_staleness_max"], figures["replay_reward_mean"]) == (1, 28, 0.5)
    assert figures["replay_uses_mean"] == manifest.rows[2].use

    async def second(fleet):
        again = await fleet.batch(29)
        assert (again.rows, again.replaced) == (manifest.rows, manifest.replaced)
        samples = [row.sample for row in manifest.rows]
        rows = (await fleet.ask(FetchRows(step=29, samples=samples))).trajectories
        assert [row.sample for row in rows] == samples
        assert [row.reward for row in rows] == [0.2, 0.3, 0.0, 1.0]
        assert [row.initiating_version for row in rows] == [28, 28, 0, 0]
        await fleet.serve(29)
        await roll_out(fleet, (1.0, 1.0), (1.0, 1.0))
        both = await fleet.batch(30)
        assert sorted({row.sample.group for row in both.rows}) == [0, 1]
        assert manifest_metrics(both)["staleness_max"] == 0
        assert (await counts(fleet))["consumed"] == 4 + 28 * 2

    run(tmp_path, second, replay=REPLAY)


def test_replay_may_be_turned_on_and_off_between_processes(tmp_path):
    async def without(fleet):
        await fleet.serve(0)
        await roll_out(fleet, (0.0, 1.0), (0.0, 1.0))
        await fleet.batch(1)
        await fleet.ask(Checkpointed(step=1))

    run(tmp_path, without)

    async def with_replay(fleet):
        await fleet.serve(1)
        await roll_out(fleet, (1.0, 1.0), (0.0, 1.0))
        assert [row.use for row in (await fleet.batch(2)).rows] == [1] * 4
        await fleet.serve(2)
        await roll_out(fleet, (1.0, 1.0), (0.0, 1.0))
        assert [row.sample.group for row in (await fleet.batch(3)).rows] == [5, 5, 3, 3]

    run(tmp_path, with_replay, replay=REPLAY)

    async def without_again(fleet):
        assert len((await fleet.batch(3)).rows) == 4
        await fleet.serve(3)
        await roll_out(fleet, (1.0, 1.0), (0.0, 1.0))
        assert [row.use for row in (await fleet.batch(4)).rows] == [1] * 4

    run(tmp_path, without_again)

"""A buffer in a folder, and what talks to it as envs and as the controller, on virtual time."""

import numpy as np

from flashflow.algorithms.settings import NO_FILTERS
from flashflow.clock import LoopClock
from flashflow.config.sections import (
    BatchSection,
    EvalSection,
    JournalSection,
    NetworkSection,
    RolloutSection,
    RunSection,
)
from flashflow.journal import in_place
from flashflow.messages import Ack, AcquireLease, AttemptFailed, Commit, Lease, NextBatch, ServingVersion
from flashflow.records import Task, Trajectory
from flashflow.roles.buffer import Buffer
from flashflow.simulate.clock import run_virtual
from flashflow.transport.channel import Peer

ENV, OTHER_ENV = Peer("env", 0, 0), Peer("env", 1, 0)
CONTROLLER = Peer("controller", 0, 0, generation=1)
LONG_POLL_S = 5.0


class Tasks:
    """`size` training tasks and ten held-out ones."""

    def __init__(self, size: int = 10**9) -> None:
        self.size = size

    def task(self, cursor: int) -> Task | None:
        return Task(cursor=cursor, row={"prompt": f"train {cursor}"}) if cursor < self.size else None

    def eval_tasks(self, count: int) -> list[Task]:
        return [Task(cursor=index, row={"prompt": f"held out {index}"}) for index in range(count)]


async def ignore(message):
    raise AssertionError(f"the buffer streams nothing, but sent {message}")


class Fleet:
    """Talks to one buffer as envs and as the controller."""

    def __init__(self, buffer):
        self.buffer = buffer

    async def ask(self, message, peer=CONTROLLER):
        return await self.buffer.handle(message, peer, ignore)

    async def lease(self, peer=ENV):
        lease = await self.ask(AcquireLease(), peer)
        assert isinstance(lease, Lease), lease
        return lease

    async def commit(self, lease, peer=ENV, *, version=None, reward=1.0, sampled=3):
        if version is None:
            version = lease.min_version
        trajectory = Trajectory(
            sample=lease.sample,
            tokens=np.arange(2 + sampled, dtype=np.int32) + lease.task.cursor,
            mask=np.array([0, 0] + [1] * sampled, np.uint8),
            logprobs=np.full(2 + sampled, -1.0, np.float32),
            versions=np.array([-1, -1] + [version] * sampled, np.int32),
            num_turns=1,
            outcome="completed" if reward is not None else "failed",
            reward=reward,
            reward_components={},
            finish_reason="stop",
            seconds=1.0,
        )
        commit = Commit(lease_epoch=lease.lease_epoch, purpose=lease.purpose, trajectory=trajectory)
        return (await self.ask(commit, peer)).status

    async def fail(self, lease, peer=ENV, *, sampled=0):
        failed = AttemptFailed(
            sample=lease.sample,
            lease_epoch=lease.lease_epoch,
            purpose=lease.purpose,
            reason="the game crashed",
            traceback="Traceback: GameError",
            num_sampled=sampled,
        )
        return (await self.ask(failed, peer)).status

    async def serve(self, version):
        assert await self.ask(ServingVersion(version=version)) == Ack()

    async def roll_out(self, count, **options):
        """Leases and commits `count` samples."""
        leases = [await self.lease() for _ in range(count)]
        for lease in leases:
            assert await self.commit(lease, **options) == "accepted"

    async def batch(self, step):
        reply = await self.ask(NextBatch(step=step))
        assert reply.manifest is not None, reply
        return reply.manifest


def make_buffer(
    folder,
    *,
    tasks=None,
    alpha=0.0,
    group_size=2,
    groups=2,
    problems=3,
    seed=5,
    filters=NO_FILTERS,
    replay=None,
    **rollout,
):
    return Buffer(
        run=RunSection(seed=seed),
        rollout=RolloutSection(group_size=group_size, alpha=alpha, **rollout),
        batch=BatchSection(groups=groups),
        journal=JournalSection(segment_bytes=1000),
        evaluation=EvalSection(problems=problems, deadline_s=60),
        network=NetworkSection(long_poll_s=LONG_POLL_S),
        tasks=tasks or Tasks(),
        folder=folder,
        clock=LoopClock(),
        filters=filters,
        replay=replay,
        reward_name="tests:reward",
        offload=in_place,
    )


def run(folder, scenario, **options):
    """Plays `scenario(fleet)` against a buffer in `folder`, on virtual time; closes the buffer."""

    async def play():
        buffer = make_buffer(folder, **options)
        await buffer.start()
        try:
            return await scenario(Fleet(buffer))
        finally:
            await buffer.close()

    return run_virtual(play())

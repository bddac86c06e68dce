"""Writes what happens: every event goes to the ledger and to the journal, or the buffer stops."""

import hashlib
import math
from collections.abc import Callable
from typing import assert_never

import numpy as np

from flashflow.data.base import TaskStream
from flashflow.errors import BudgetError, ContractError
from flashflow.journal import EventLog
from flashflow.ledger import Ledger
from flashflow.ledger import events as e
from flashflow.ledger.group import PLACEHOLDER_TOKENS
from flashflow.messages import Commit
from flashflow.records import SampleId, Task, Trajectory
from flashflow.roles.signal import Signal


class Bookkeeper:
    """Ledger and journal as one. Its methods have no await: nobody sees one of them ahead of the other."""

    def __init__(
        self, ledger: Ledger, journal: EventLog, tasks: TaskStream, *, reward_name: str, max_failed_fraction: float
    ) -> None:
        """Settles what the process before left unsettled."""
        self.ledger = ledger
        self.journal = journal
        self.lease_news = Signal()
        """There may be something to lease."""
        self.on_ended: Callable[[int], None] = lambda group: None
        """Told of every group of which attempts under way may have ended."""
        self.engines_serve = False
        """Whether the gang has said so to this process: a journal's word may be of engines that are gone."""
        self.batch_news = Signal()
        """There may be a batch, or a reason to stop."""
        self.fatal = ""
        """Why the run must stop (a BudgetError); empty while all is well."""
        self._tasks = tasks
        self._reward_name = reward_name
        self._max_failed_fraction = max_failed_fraction
        self._upcoming: tuple[int, Task | None] = (-1, None)
        self._broken = False
        for group in list(ledger.outstanding):
            self._settle(group)

    def record(self, event: e.AnyEvent) -> None:
        """Raises ContractError, having changed nothing, for an impossible event; OSError when the disk refuses."""
        if self._broken:
            raise ContractError("the journal could not be written; what the buffer holds in memory is ahead of it")
        self.ledger.apply(event)
        try:
            self.journal.append(event)
        except BaseException:
            self._broken = True
            raise
        self._tell(event)

    def lease(self) -> tuple[e.Leased, Task] | None:
        """Leases the oldest free attempt, admitting a group when there is none and admission is open."""
        if not self.ledger.queue and not self.ledger.closed() and not self.data_ended():
            self.record(self.ledger.admit())
        leased = self.ledger.lease()
        if leased is None:
            return None
        task = self._task(leased.group)
        self.record(leased)
        return leased, task

    def data_ended(self) -> bool:
        """No task is left to admit. Looks one task ahead, once."""
        cursor = self.ledger.next_task().cursor
        if self._upcoming[0] != cursor:
            self._upcoming = (cursor, self._tasks.task(cursor))
        return self._upcoming[1] is None

    def commit(self, commit: Commit) -> None:
        """An accepted one. Under `failures: filter` one without a usable reward counts as a failed attempt."""
        trajectory, sample = commit.trajectory, commit.trajectory.sample
        if self.ledger.rules.failures == "filter" and not _scored(trajectory):
            self.fail(sample, f"no reward ({trajectory.finish_reason})", trajectory.num_sampled)
            return
        version = trajectory.initiating_version
        if version is None:
            version = self.ledger.groups[sample.group].members[sample.member].served
        self.record(
            e.Committed(
                sample.group,
                sample.member,
                commit.lease_epoch,
                initiating_version=version,
                num_tokens=trajectory.num_tokens,
                num_sampled=trajectory.num_sampled,
                reward=trajectory.reward,
                outcome=trajectory.outcome,
                payload=self.journal.payloads.append(trajectory),
            )
        )
        self._settle(sample.group)

    def fail(self, sample: SampleId, reason: str, num_sampled: int = 0) -> None:
        """The attempt of the current lease failed, having sampled so many tokens."""
        self.record(self.ledger.fail(sample, reason, num_sampled))
        self._settle(sample.group)

    def expire_overdue(self, step: int) -> None:
        """Ends groups no batch from `step` on may take."""
        for event in self.ledger.overdue(step):
            self.record(event)

    def end_straggler(self, group: int) -> None:
        """The group's deadline has come."""
        event = self.ledger.at_deadline(group)
        if event is None:
            return
        self.record(event)
        if isinstance(event, e.GroupClosed):
            self._settle(group)
        else:
            self._check_losses(failed=True)

    def durable(self, groups: list[int]) -> bool:
        """Every payload of them is known to be on the disk."""
        return all(
            self.journal.payloads.durable(member.result.payload)
            for group in groups
            for member in self.ledger.groups[group].members
            if member.result is not None
        )

    def take(self, step: int, groups: list[int], seed: int) -> None:
        """Makes the batch, and ends groups that came too late for it and every later one."""
        self.record(self.ledger.take(step, groups, rng_key(seed, step)))
        for event in self.ledger.late(step + 1):
            self.record(event)

    def locate(self, sample: SampleId) -> e.Location | None:
        """Where a consumed sample's payload lies; None for a member that left no trajectory."""
        member = self.ledger.member(sample)
        if member is None or member.retry != sample.retry:
            raise ContractError(f"sample {sample} is unknown, or no longer kept since a checkpoint covers it")
        return member.result.payload if member.result is not None else None

    def _task(self, group: int) -> Task:
        cursor = self.ledger.groups[group].cursor
        task = self._upcoming[1] if self._upcoming[0] == cursor else self._tasks.task(cursor)
        if task is None:
            raise ContractError(
                f"data: no task at cursor {cursor}, which group {group} is about; was the data changed?"
            )
        return task

    def _settle(self, group: int) -> None:
        """Ends the group if it is not to be trained, and the run if too many are not."""
        event = self.ledger.settle(group)
        if event is not None:
            self.record(event)
            self._check_losses(failed=isinstance(event, e.GroupFailed))

    def _check_losses(self, *, failed: bool) -> None:
        try:
            self.ledger.check_losses(self._reward_name, self._max_failed_fraction)
        except BudgetError as error:
            reason = self.ledger.last_failure or "none of an environment: rewards are missing, or nothing came in time"
            self.fatal = f"{error}; last failure: {reason}" if failed else str(error)
            self.batch_news.notify()

    def _tell(self, event: e.AnyEvent) -> None:
        match event:
            case e.Opened() | e.Admitted() | e.Leased() | e.Superseded() | e.Covered():
                return
            case e.Committed() | e.Failed() | e.GroupClosed():
                if event.group in self.ledger.complete:
                    self.batch_news.notify()
                    self.on_ended(event.group)
            case e.Served() | e.LeaseExpired() | e.PayloadLost() | e.Retried() | e.Taken():
                self.lease_news.notify()
                self.batch_news.notify()
            case e.GroupFailed() | e.GroupFiltered() | e.GroupExpired() | e.GroupSurplus():
                self.lease_news.notify()
                self.batch_news.notify()
                self.on_ended(event.group)
            case _:
                assert_never(event)


def _scored(trajectory: Trajectory) -> bool:
    reward = trajectory.reward
    return trajectory.outcome != "failed" and reward is not None and math.isfinite(reward)


def placeholder(sample: SampleId) -> Trajectory:
    """Stands for a member whose environment broke too often: one token that nobody sampled, and no reward."""
    return Trajectory(
        sample=sample,
        tokens=np.zeros(PLACEHOLDER_TOKENS, np.int32),
        mask=np.zeros(PLACEHOLDER_TOKENS, np.uint8),
        logprobs=np.zeros(PLACEHOLDER_TOKENS, np.float32),
        versions=np.full(PLACEHOLDER_TOKENS, -1, np.int32),
        num_turns=0,
        outcome="failed",
        reward=None,
        reward_components={},
        finish_reason="environment",
        seconds=0.0,
    )


def rng_key(seed: int, step: int) -> int:
    """64 bits: blake2b of the run's seed and the batch's number."""
    digest = hashlib.blake2b(f"{seed}/{step}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")

"""The buffer's side towards envs: leases, their ends, and what becomes of those whose holder is gone."""

import asyncio
import itertools

from flashflow.clock import Clock
from flashflow.config.sections import EvalSection, NetworkSection, RolloutSection
from flashflow.data.base import TaskStream
from flashflow.errors import ContractError
from flashflow.ledger import Verdict
from flashflow.ledger import events as e
from flashflow.ledger.book import EPOCHS_PER_OPENING
from flashflow.messages import AttemptFailed, Commit, EvalReply, Lease, LeaseName, NoLease, Revoked, ScoringReply
from flashflow.records import SampleId, Task
from flashflow.roles.bookkeeper import Bookkeeper
from flashflow.roles.evaluation import Evaluation
from flashflow.roles.membership import Holding, Leases, Membership
from flashflow.roles.revocations import Revocations
from flashflow.roles.stragglers import Stragglers
from flashflow.transport.channel import Peer

LONG_POLLS = 2
"""A lease that its env has not named for so long past rollout.trajectory_deadline_s, or for twice that, got lost on its
way: an env ends it by then, or says in each of its long polls that it still waits for an engine."""
REASON_CHARACTERS = 4000
"""How much of a failure is journalled: its end, where the exception is."""


class Leasing:
    def __init__(
        self,
        *,
        books: Bookkeeper,
        members: Membership,
        tasks: TaskStream,
        rollout: RolloutSection,
        evaluation: EvalSection,
        network: NetworkSection,
        clock: Clock,
    ) -> None:
        self._books = books
        self._members = members
        self._tasks = tasks
        self._rollout = rollout
        self._evaluation = evaluation
        self._long_poll_s = network.long_poll_s
        self._clock = clock
        self._leases = Leases()
        self._revocations = Revocations()
        self.stragglers = Stragglers(rollout.straggler_deadline_s, clock, books.end_straggler)
        books.on_ended = self._group_ended
        self._eval_tasks: list[Task] = []
        self._eval_epochs = itertools.count(books.ledger.opening * EPOCHS_PER_OPENING)
        self._evaluating: Evaluation | None = None
        self._over = False

    async def acquire(self, peer: Peer) -> Lease | NoLease:
        """A lease as soon as there is one; after the long poll the reason why not."""
        until = self._clock.now() + self._long_poll_s
        while True:
            if self._members.fenced(peer):
                return NoLease(reason=f"{peer} is superseded by a newer incarnation", finished=True)
            if self._over:
                return NoLease(reason="the run is over", finished=True)
            lease = self._lease(peer)
            if lease is not None:
                return lease
            remaining_s = until - self._clock.now()
            if remaining_s <= 0:
                return NoLease(reason=self.idle_reason())
            await self._books.lease_news.wait(remaining_s)

    async def revoked(self, peer: Peer, late: list[LeaseName]) -> Revoked:
        """Leases of `peer` that ended under it, as soon as there is one; none after the long poll. late: it has these
        still."""
        now = self._clock.now()
        for lease in late:
            if lease.purpose == "train":
                self._leases.renew(lease.sample, lease.lease_epoch, now)
            elif self._evaluating is not None:
                self._evaluating.leases.renew(lease.sample, lease.lease_epoch, now)
        return await self._revocations.of(peer, self._long_poll_s)

    async def may_score(self, sample: SampleId, epoch: int) -> ScoringReply:
        """Whether every attempt of the batch has its tokens by now; waited for as long as a long poll."""
        self._leases.generated(sample, epoch)
        until = self._clock.now() + self._long_poll_s
        while not self._generation_ended():
            remaining_s = until - self._clock.now()
            if remaining_s <= 0:
                return ScoringReply(score=False)
            await self._leases.news.wait(remaining_s)
        return ScoringReply(score=True)

    def commit(self, commit: Commit) -> Verdict:
        sample, epoch = commit.trajectory.sample, commit.lease_epoch
        if commit.purpose == "eval":
            return self._eval_commit(commit)
        verdict = self._books.ledger.judge(sample, epoch)
        self._leases.end(sample, epoch)
        if verdict == "accepted":
            self._books.commit(commit)
        elif verdict == "superseded":
            wasted = commit.trajectory.num_sampled
            self._books.record(e.Superseded(sample.group, sample.member, epoch, wasted))
        return verdict

    def attempt_failed(self, failed: AttemptFailed) -> Verdict:
        if failed.purpose == "eval":
            evaluation = self._evaluating
            verdict: Verdict = "superseded"
            if evaluation is not None:
                verdict = evaluation.judge(failed.sample, failed.lease_epoch)
            if evaluation and verdict == "accepted":
                evaluation.fail(failed.sample, failed.lease_epoch)
                self._books.lease_news.notify()
            return verdict
        verdict = self._books.ledger.judge(failed.sample, failed.lease_epoch)
        self._leases.end(failed.sample, failed.lease_epoch)
        if verdict == "accepted":
            self._fail(failed.sample, f"{failed.reason}\n{failed.traceback}", failed.num_sampled)
        elif verdict == "superseded":
            sample, epoch = failed.sample, failed.lease_epoch
            self._books.record(e.Superseded(sample.group, sample.member, epoch, failed.num_sampled))
        return verdict

    async def evaluate(self, version: int, asked_by: Peer) -> EvalReply:
        """What is scored by evaluation.deadline_s. Raises ContractError when the asker already has one running."""
        if self._evaluating is not None:
            if self._evaluating.asked_by == asked_by:
                raise ContractError(f"{asked_by}: version {self._evaluating.version} is still being evaluated")
            self._evaluating.abandon()
            self._revoke_evaluation(self._evaluating)
        if not self._eval_tasks:
            self._eval_tasks = self._tasks.eval_tasks(self._evaluation.problems)
        evaluation = self._evaluating = Evaluation(
            version, self._eval_tasks, self._eval_epochs, asked_by, self._rollout.max_attempts
        )
        self._books.lease_news.notify()
        started = self._clock.now()
        try:
            async with asyncio.timeout(self._evaluation.deadline_s):
                await evaluation.ended()
        except TimeoutError:
            pass  # the reply says how many are missing; training must not end for it
        finally:
            if self._evaluating is evaluation:
                self._evaluating = None
                self._revoke_evaluation(evaluation)
        return evaluation.reply(self._clock.now() - started)

    def take_back_orphans(self) -> None:
        """Leases whose holder is lost or superseded go to others: next epoch, same retry."""
        for held in self._leases:
            if not self._members.may_hold(held.peer):
                self._revocations.add(held, "train")  # it may speak again
                self._leases.end(held.sample, held.epoch)
                if self._current(held):
                    self._books.record(e.LeaseExpired(held.sample.group, held.sample.member))
        if self._evaluating is not None:
            for held in self._evaluating.leases:
                if not self._members.may_hold(held.peer):
                    self._evaluating.take_back(held)
                    self._revocations.add(held, "eval")
                    self._books.lease_news.notify()
        self._revocations.forget(self._members.fenced)

    def take_back_forgotten(self) -> None:
        """Leases held past any deadline of their env count as broken attempts; should one live, it is to end."""
        deadline_s = self._rollout.trajectory_deadline_s
        limit_s = deadline_s + max(deadline_s, LONG_POLLS * self._long_poll_s)
        before = self._clock.now() - limit_s
        for held in self._leases.older_than(before):
            self._revocations.add(held, "train")
            self._leases.end(held.sample, held.epoch)
            if self._current(held):
                self._fail(held.sample, f"{held.peer} neither committed nor failed it within {limit_s:g} s")
        if self._evaluating is not None:
            for held in self._evaluating.leases.older_than(before):
                self._revocations.add(held, "eval")
                self._evaluating.fail(held.sample, held.epoch)
                self._books.lease_news.notify()

    def finish(self) -> None:
        """Nothing is leased any more."""
        self._over = True
        self._books.lease_news.notify()
        self._leases.news.notify()

    def idle_reason(self) -> str:
        """Why there is nothing to lease."""
        if self._books.fatal:
            return "the run stops: " + self._books.fatal.splitlines()[0]
        if not self._books.engines_serve:
            return "no version is served yet"
        closed = self._books.ledger.closed()
        if closed or self._books.ledger.queue:
            return closed or "attempts wait for an env"
        return "the data has ended" if self._books.data_ended() else "a group waits to be admitted"

    def describe(self) -> list[str]:
        """Who holds what for how long, oldest first."""
        now = self._clock.now()
        lines = [
            f"  {held.sample} epoch {held.epoch}: {held.peer} for {now - held.since:.1f} s" for held in self._leases
        ]
        if self._evaluating is not None:
            evaluation = self._evaluating
            lines.append(f"  evaluation of version {evaluation.version}: {evaluation.num_missing} problems missing")
            lines += [
                f"  problem {held.sample.group}: {held.peer} for {now - held.since:.1f} s" for held in evaluation.leases
            ]
        return lines

    def _lease(self, peer: Peer) -> Lease | None:
        if not self._members.may_hold(peer):
            return None
        now = self._clock.now()
        if self._evaluating is not None and (lease := self._evaluating.lease(peer, now)) is not None:
            return lease
        open_ = self._books.engines_serve and not self._books.fatal
        given = self._books.lease() if open_ else None
        if given is None:
            return None
        leased, task = given
        ledger = self._books.ledger
        sample = ledger.groups[leased.group].sample(leased.member)
        self._leases.give(Holding(peer, sample, leased.epoch, now))
        self.stragglers.start(leased.group)
        return Lease(
            sample=sample,
            lease_epoch=leased.epoch,
            purpose="train",
            task=task,
            min_version=ledger.min_version(leased.group),
            block_size=self._block_size(leased),
        )

    def _block_size(self, leased: e.Leased) -> int:
        """An attempt that is tried again has no others to go with."""
        group = self._books.ledger.groups[leased.group]
        together = not self._rollout.replicate_prompts and group.members[leased.member].retry == group.retry
        return len(group.members) if together else 1

    def _generation_ended(self) -> bool:
        """Nothing generates, and nothing is about to."""
        idle = not self._books.ledger.queue and (bool(self._books.ledger.closed()) or self._books.data_ended())
        return self._over or bool(self._books.fatal) or (idle and self._leases.all_generated)

    def _eval_commit(self, commit: Commit) -> Verdict:
        evaluation = self._evaluating
        if evaluation is None:
            return "superseded"
        verdict = evaluation.judge(commit.trajectory.sample, commit.lease_epoch)
        if verdict == "accepted":
            evaluation.score(commit.trajectory, commit.lease_epoch)
        return verdict

    def _current(self, held: Holding) -> bool:
        """False once the group ended under its holder."""
        return self._books.ledger.judge(held.sample, held.epoch) == "accepted"

    def _fail(self, sample: SampleId, reason: str, num_sampled: int = 0) -> None:
        self._books.fail(sample, reason[-REASON_CHARACTERS:], num_sampled)

    def _group_ended(self, group: int) -> None:
        """It is complete or void: what its members still do is for nothing."""
        self.stragglers.forget(group)
        for held in self._leases.of_group(group, len(self._books.ledger.groups[group].members)):
            if not self._current(held):
                self._leases.end(held.sample, held.epoch)
                self._revocations.add(held, "train")

    def _revoke_evaluation(self, evaluation: Evaluation) -> None:
        for held in evaluation.leases:
            self._revocations.add(held, "eval")

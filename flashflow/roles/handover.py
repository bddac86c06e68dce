"""The buffer's side towards the gang: batches, their rows, versions served, checkpoints."""

import msgspec

from flashflow.clock import Clock
from flashflow.config.sections import NetworkSection, RolloutSection
from flashflow.errors import BudgetError, ContractError
from flashflow.ledger import events as e
from flashflow.messages import Ack, BatchReply, FetchRows, Rows
from flashflow.records import Manifest, SampleId, Trajectory
from flashflow.roles.bookkeeper import Bookkeeper, placeholder
from flashflow.roles.membership import Membership
from flashflow.transport.channel import Peer


class Handover:
    def __init__(
        self,
        *,
        books: Bookkeeper,
        members: Membership,
        rollout: RolloutSection,
        network: NetworkSection,
        seed: int,
        clock: Clock,
    ) -> None:
        self._books = books
        self._ledger = books.ledger
        self._members = members
        self._rollout = rollout
        self._long_poll_s = network.long_poll_s
        self._seed = seed
        self._clock = clock
        self._served_generation = -1
        self._over = False
        self.waiting_for = ""
        """What the batch asked for lacks; empty when none is asked for."""

    async def next_batch(self, step: int, peer: Peer) -> BatchReply:
        """Batch `step`, the same whenever it is asked for; without a manifest after the long poll.

        Raises ContractError for a step out of turn or of a superseded gang; BudgetError when failures stop the run.
        """
        until = self._clock.now() + self._long_poll_s
        if self._past(step) is None:
            self._books.expire_overdue(step)
        try:
            while True:
                self._members.check(peer)
                if (past := self._past(step)) is not None:
                    return await self._hand_over(past)
                self._check_budget()
                if self._over or (not self._ledger.outstanding and self._books.data_ended()):
                    reason = "the run is over" if self._over else "the data has ended"
                    return BatchReply(manifest=None, reason=reason, finished=True, stats=self.stats())
                groups = self._select(step)
                if groups and self._books.durable(groups):
                    return await self._hand_over(self._take(step, groups))
                remaining_s = until - self._clock.now()
                if groups:
                    await self._books.journal.sync()
                elif remaining_s > 0:
                    await self._books.batch_news.wait(remaining_s)
                else:
                    return BatchReply(manifest=None, reason=self.waiting_for, stats=self.stats())
        finally:
            self.waiting_for = ""

    async def fetch(self, request: FetchRows) -> Rows:
        """Payloads from the disk. Raises ContractError for samples not in the manifest."""
        manifest = self._ledger.manifests.get(request.step)
        if manifest is None:
            raise ContractError(f"rows of batch {request.step}: {self._why_none(request.step)}")
        strangers = set(request.samples).difference(row.sample for row in manifest.rows)
        if strangers:
            raise ContractError(f"batch {request.step} has no sample {', '.join(map(str, sorted(strangers)))}")
        places = [(sample, self._books.locate(sample)) for sample in request.samples]
        return Rows(trajectories=await self._books.journal.offload(self._read, places))

    def serving(self, version: int, peer: Peer) -> Ack:
        """Raises ContractError for a version below the last, unless a new gang redoes it."""
        served = self._ledger.served
        if served is not None and version < served and peer.generation <= self._served_generation:
            raise ContractError(f"version {version} is served after {served}: versions never go back")
        self._served_generation = peer.generation
        if version != served:
            self._books.record(e.Served(version))
        if not self._books.engines_serve:
            self._books.engines_serve = True
            self._books.lease_news.notify()
        return Ack()

    async def checkpointed(self, step: int) -> Ack:
        """Forgets what a durable checkpoint covers. Raises ContractError for a step never handed out."""
        if step > self._ledger.covered:
            self._books.record(e.Covered(step))
            await self._books.journal.sync()
            self._books.journal.payloads.keep_only(self._ledger.segments())
        return Ack()

    def finish(self) -> None:
        """No batch is handed out any more."""
        self._over = True
        self._books.batch_news.notify()

    def stats(self) -> dict[str, float]:
        """Of the ledger, now: samples per state and `submitted`; `buffer_fill`, complete groups left over over groups
        per batch; since the start: `tokens_wasted`, sampled and never to be trained, `superseded`, `retries`."""
        ledger = self._ledger
        return {
            **{state.value: float(count) for state, count in ledger.counts().items()},
            "submitted": float(ledger.submitted),
            "buffer_fill": len(ledger.complete) / ledger.rules.batch_groups,
            "tokens_wasted": float(ledger.tokens_wasted),
            "superseded": float(ledger.num_superseded),
            "retries": float(ledger.num_retries),
        }

    def _past(self, step: int) -> Manifest | None:
        """The manifest handed out before. Raises ContractError when there can be none."""
        last = self._ledger.last_manifest
        if step == last + 1:
            return None
        manifest = self._ledger.manifests.get(step)
        if manifest is None:
            raise ContractError(f"batch {step}: {self._why_none(step)}")
        return msgspec.structs.replace(manifest, redone=True)

    def _why_none(self, step: int) -> str:
        last, covered = self._ledger.last_manifest, self._ledger.covered
        if step <= covered:
            return f"the checkpoint of step {covered} covers it and its payloads are gone; resume from that checkpoint"
        return f"the last batch handed out is {last}"

    def _select(self, step: int) -> list[int]:
        complete = len(self._ledger.complete)
        ending = complete == len(self._ledger.outstanding) and self._books.data_ended()
        if complete >= self._ledger.rules.batch_groups or ending:
            self._books.expire_overdue(step)
        selection = self._ledger.select(step, ending=ending)
        self.waiting_for = selection.reason
        return selection.groups

    def _take(self, step: int, groups: list[int]) -> Manifest:
        self._check_failed(step, groups)
        self._books.take(step, groups, self._seed)
        return self._ledger.manifests[step]

    async def _hand_over(self, manifest: Manifest) -> BatchReply:
        """Only once the manifest is on the disk."""
        stats = self.stats()
        await self._books.journal.sync()
        return BatchReply(manifest=manifest, stats=stats)

    def _check_budget(self) -> None:
        if self._books.fatal:
            raise BudgetError(self._books.fatal)

    def _check_failed(self, step: int, groups: list[int]) -> None:
        outstanding = [self._ledger.outstanding[group] for group in groups]
        members = [group.members[index] for group in outstanding for index in group.chosen]
        failed, limit = sum(not member.has_reward for member in members), self._rollout.max_failed_fraction
        if failed > limit * len(members):
            raise BudgetError(
                f"batch {step}: {failed} of {len(members)} samples have no reward, over rollout.max_failed_fraction "
                f"{limit}; last failure: {self._ledger.last_failure or 'none of an environment: rewards are missing'}"
            )

    def _read(self, places: list[tuple[SampleId, e.Location | None]]) -> list[Trajectory]:
        read = self._books.journal.payloads.read
        return [read(location) if location is not None else placeholder(sample) for sample, location in places]

"""The ledger: what may happen next to which sample. It decides by returning an event; only apply() changes anything."""

from bisect import bisect_left
from typing import Literal

from flashflow import admission, staleness
from flashflow.errors import ContractError
from flashflow.ledger import events as e
from flashflow.ledger.book import Book
from flashflow.ledger.group import State
from flashflow.records import Manifest, SampleId

Verdict = Literal["accepted", "duplicate", "superseded"]


class Ledger(Book):
    """The one state machine of every sample (contract 3)."""

    def ordinal(self, group: int) -> int:
        """1-based position of a group among those that count for admission."""
        return group + 1 - bisect_left(self.voided, group)

    def min_version(self, group: int) -> int:
        """Oldest weights that may sample for it."""
        return admission.min_version(self.ordinal(group), self.rules.alpha, self.rules.batch_groups)

    def closed(self) -> str:
        """Why no group may be admitted now; empty when one may."""
        if self.served is None:
            return "admission is closed until a first version is served"
        ordinal = self.next_group - len(self.voided) + 1
        alpha, batch_groups = self.rules.alpha, self.rules.batch_groups
        if ordinal <= admission.capacity(self.served, alpha, batch_groups):
            return ""
        opening = admission.opening_version(ordinal, alpha, batch_groups)
        return f"admission is closed until version {opening} is served (now {self.served})"

    def lease(self) -> e.Leased | None:
        """The oldest attempt nobody holds."""
        if not self.queue or self.served is None:
            return None
        group, member = self.queue[0]
        return e.Leased(group, member, self.groups[group].members[member].epoch, self.served)

    def judge(self, sample: SampleId, epoch: int) -> Verdict:
        """Whether an attempt's end counts."""
        member = self.member(sample)
        if member is None:
            return "superseded"
        if member.result is not None and member.result.epoch == epoch:
            return "duplicate"
        current = member.state is State.LEASED and (member.epoch, member.retry) == (epoch, sample.retry)
        return "accepted" if current else "superseded"

    def fail(self, sample: SampleId, reason: str) -> e.Retried | e.Failed:
        """The current lease's environment broke."""
        member = self._member(sample.group, sample.member, State.LEASED)
        if member.retry - self.groups[sample.group].retry + 1 < self.rules.max_attempts:
            return e.Retried(sample.group, sample.member, reason)
        return e.Failed(sample.group, sample.member, reason)

    def overdue(self, step: int) -> list[e.GroupExpired]:
        """Groups no batch from `step` on may take; under `wait` none while versions and batches advance together."""
        waits = self.rules.on_stale == "wait"
        return [
            e.GroupExpired(group.id, returned=waits and group.retry + 1 < self.rules.max_attempts)
            for group in self.outstanding.values()
            if group.too_old(step, self.rules.alpha, certainly=waits)
        ]

    def select(self, step: int, *, ending: bool) -> staleness.Selection:
        """Groups of batch `step`; `ending`: no further group can come."""
        rules, served = self.rules, self.served if self.served is not None else 0
        if len(self.complete) < rules.batch_groups and not ending:
            return staleness.too_few(step, len(self.complete), rules.batch_groups)
        aged = [
            staleness.Aged(group.due(served, rules.alpha), group.id, group.id in self.complete)
            for group in self.outstanding.values()
        ]
        return staleness.select(
            aged, step=step, batch_groups=rules.batch_groups, on_stale=rules.on_stale, ending=ending
        )

    def take(self, step: int, groups: list[int], rng_key: int) -> e.Taken:
        """Raises ContractError when `step` is out of turn or a sample is too old."""
        if step != self.last_manifest + 1:
            raise ContractError(f"batch {step} asked for, but the last one handed out is {self.last_manifest}")
        rows = [row for group in sorted(groups) for row in self.outstanding[group].rows(step)]
        for row in rows:
            if staleness.last_batch(row.initiating_version, self.rules.alpha) < step:
                raise ContractError(
                    f"sample {row.sample} of version {row.initiating_version} is too old for batch {step} "
                    f"at rollout.alpha {self.rules.alpha}"
                )
        return e.Taken(Manifest(step=step, rows=rows, group_size=self.rules.group_size, rng_key=rng_key))

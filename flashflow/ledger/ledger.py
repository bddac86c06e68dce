"""The ledger: what may happen next to which sample. It decides by returning an event; only apply() changes anything."""

from bisect import bisect_left
from typing import Literal

from flashflow import admission, staleness
from flashflow.algorithms.filters import (
    check_failed_fraction,
    check_filtered_fraction,
    check_whole_losses,
    keeps,
)
from flashflow.algorithms.replay import ReplayBuffer, ReplayGroup, fill
from flashflow.errors import ContractError
from flashflow.ledger import events as e
from flashflow.ledger.book import Book
from flashflow.ledger.group import Group, State
from flashflow.records import Manifest, SampleId

Verdict = Literal["accepted", "duplicate", "superseded"]


class Ledger(Book):
    """The one state machine of every sample (contract 3)."""

    def ordinal(self, group: int) -> int:
        """1-based position of a group among those that count for admission."""
        return group + 1 - bisect_left(self.voided, group)

    def min_version(self, group: int) -> int:
        """Oldest weights that may sample for it."""
        rules = self.rules
        return admission.min_version(self.ordinal(group), rules.alpha, rules.batch_groups, rules.redundant_groups)

    def closed(self) -> str:
        """Why no group may be admitted now; empty when one may."""
        if self.served is None:
            return "admission is closed until a first version is served"
        ordinal = self.next_group - len(self.voided) + 1
        rules = self.rules
        opening = max(
            admission.opening_version(ordinal, rules.alpha, rules.batch_groups, rules.redundant_groups),
            admission.oldest_useful_version(self.last_manifest, rules.alpha),
        )
        if opening <= self.served:
            return ""
        return f"admission is closed until version {opening} is served (now {self.served})"

    def lease(self) -> e.Leased | None:
        """The oldest attempt nobody holds; none while the weights served are too old for any batch to come."""
        oldest = admission.oldest_useful_version(self.last_manifest, self.rules.alpha)
        if not self.queue or self.served is None or self.served < oldest:
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

    def fail(self, sample: SampleId, reason: str, num_sampled: int = 0) -> e.Retried | e.Failed:
        """The current lease's attempt failed, having sampled so many tokens."""
        member = self._member(sample.group, sample.member, State.LEASED)
        if member.retry - self.groups[sample.group].retry + 1 < self.rules.max_attempts:
            return e.Retried(sample.group, sample.member, reason, num_sampled)
        return e.Failed(sample.group, sample.member, reason, num_sampled)

    def settle(self, group: int) -> e.GroupFailed | e.GroupFiltered | None:
        """What becomes of a group whose member ended, if it is not to be trained; for every group, once complete."""
        found = self.outstanding[group]
        if found.hopeless or (self.rules.failures == "filter" and found.spoilt):
            return e.GroupFailed(group)
        if found.complete and not keeps(self.rules.filters, found.rewards):
            return e.GroupFiltered(group)
        return None

    def check_losses(self, reward_name: str, max_failed_fraction: float) -> None:
        """Raises BudgetError when, since the last batch, filters, failures or the deadline cost too many groups."""
        num_kept, batch_groups = len(self.complete), self.rules.batch_groups
        check_filtered_fraction(
            self.rules.filters,
            num_filtered=self.lost[State.FILTERED],
            num_kept=num_kept,
            batch_groups=batch_groups,
            reward_name=reward_name,
        )
        if self.rules.failures == "filter":
            check_failed_fraction(
                num_failed=self.lost[State.FAILED],
                num_kept=num_kept,
                batch_groups=batch_groups,
                max_fraction=max_failed_fraction,
            )
        check_whole_losses(
            num_hopeless=self.lost[State.FAILED] if self.rules.failures == "mask" else 0,
            num_expired=self.lost[State.EXPIRED],
            num_kept=num_kept,
            batch_groups=batch_groups,
            max_fraction=max_failed_fraction,
        )

    def at_deadline(self, group: int) -> e.GroupClosed | e.GroupExpired | None:
        """What becomes of a group at its deadline: with a quorum it goes as is. None: it has ended already."""
        found = self.outstanding.get(group)
        if found is None or group in self.complete:
            return None
        if found.num_usable >= self.rules.quorum:
            return e.GroupClosed(group)
        return e.GroupExpired(group, returned=self._may_return(found), at_deadline=True)

    def late(self, step: int) -> list[e.GroupSurplus | e.GroupExpired]:
        """Groups that, as leases tell, no batch from `step` on may take: redundant ones, and all others under `drop`.

        To be asked for just after the batch before `step` is taken.
        """
        rules = self.rules
        late = sorted(
            (group.due(step, rules.alpha), group.id)
            for group in self.outstanding.values()
            if group.too_old(step, rules.alpha, certainly=False)
        )
        events: list[e.GroupSurplus | e.GroupExpired] = [
            e.GroupSurplus(group) for _, group in late[: rules.redundant_groups]
        ]
        if rules.on_stale == "drop":
            events += [e.GroupExpired(group, returned=False) for _, group in late[rules.redundant_groups :]]
        return events

    def overdue(self, step: int) -> list[e.GroupExpired]:
        """Groups no batch from `step` on may take; under `wait` none while versions and batches advance together."""
        waits = self.rules.on_stale == "wait"
        return [
            e.GroupExpired(group.id, returned=waits and self._may_return(group))
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
            aged,
            step=step,
            batch_groups=rules.batch_groups,
            on_stale=rules.on_stale,
            ending=ending,
            redundant=rules.redundant_groups,
        )

    def take(self, step: int, groups: list[int], rng_key: int) -> e.Taken:
        """Raises ContractError when `step` is out of turn or a sample is too old.

        With a replay buffer, groups without signal give their place to stored ones, drawn by `rng_key`.
        """
        if step != self.last_manifest + 1:
            raise ContractError(f"batch {step} asked for, but the last one handed out is {self.last_manifest}")
        fresh, drawn, stored = self._replay(step, sorted(groups), rng_key)
        rows = [row for group in fresh for row in self.outstanding[group].rows(step)]
        for row in rows:
            if staleness.last_batch(row.initiating_version, self.rules.alpha) < step:
                raise ContractError(
                    f"sample {row.sample} of version {row.initiating_version} is too old for batch {step} "
                    f"at rollout.alpha {self.rules.alpha}"
                )
        rows += [row for group, use in drawn.items() for row in self.groups[group].rows(step, use)]
        manifest = Manifest(
            step=step,
            rows=rows,
            group_size=self.rules.group_size,
            rng_key=rng_key,
            replaced=sorted(set(groups).difference(fresh)),
            num_filtered=self.num_filtered,
        )
        return e.Taken(manifest, stored)

    def _may_return(self, group: Group) -> bool:
        """Its task has been admitted less than `max_attempts` times."""
        return group.retry + 1 < self.rules.max_attempts

    def _replay(self, step: int, groups: list[int], rng_key: int) -> tuple[list[int], dict[int, int], list[int]]:
        """(groups trained fresh, groups replayed and their uses, groups stored afterwards)."""
        if self.rules.replay is None:
            return groups, {}, []
        stored = tuple(self._replay_group(group, step, uses) for group, uses in self.stored.items())
        batch = [self._replay_group(group, step, 1) for group in groups]
        after, filled = fill(ReplayBuffer(self.rules.replay, stored), batch, version=step - 1, key=rng_key)
        fresh = [group.group for group in filled if group.uses == 1]
        drawn = {group.group: group.uses for group in filled if group.uses > 1}
        return fresh, drawn, [group.group for group in after.groups]

    def _replay_group(self, group: int, step: int, uses: int) -> ReplayGroup[None]:
        found = self.groups[group]
        oldest = found.oldest_token
        return ReplayGroup(group, oldest if oldest is not None else step - 1, found.rewards, None, uses)

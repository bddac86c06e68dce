"""The ledger's state, and apply(event), the only thing that changes it: replaying the journal gives it back.

    admitted -> leased -> committed -> consumed        leased -> admitted  (lease expired, attempt retried)
        any waiting state -> failed | expired | filtered | surplus

Never: knows a clock, a socket, a file or who holds a lease.
"""

from bisect import bisect_left, insort
from collections import Counter
from typing import Literal, assert_never

import msgspec

from flashflow.algorithms.settings import NO_FILTERS, FilterConfig, ReplayConfig
from flashflow.errors import ContractError
from flashflow.ledger import events as e
from flashflow.ledger.group import RUNNING, Group, Member, State
from flashflow.records import Manifest, SampleId

EPOCHS_PER_OPENING = 1 << 20
"""Lease epochs one opening may use per member; keeps a lease that a dying host forgot apart from any new one."""


class Rules(msgspec.Struct, frozen=True):
    """What of the config the ledger decides by."""

    group_size: int
    batch_groups: int
    alpha: float
    on_stale: Literal["wait", "drop"] = "wait"
    max_attempts: int = 3
    failures: Literal["mask", "filter"] = "mask"
    filters: FilterConfig = NO_FILTERS
    replay: ReplayConfig | None = None
    redundant_groups: int = 0
    redundant_members: int = 0
    min_members: int | None = None
    """Usable rewards that are a quorum at the deadline; None: the group size."""

    @property
    def quorum(self) -> int:
        return self.min_members if self.min_members is not None else self.group_size


class Returned(msgspec.Struct, frozen=True):
    """A task whose group expired, to be admitted again."""

    cursor: int
    retry: int


class Book:
    def __init__(self, rules: Rules) -> None:
        self.rules = rules
        self.opening = -1
        self.served: int | None = None
        """Lowest version served; None before the first."""
        self.next_group = 0
        self.submitted = 0
        """Samples ever admitted."""
        self.next_cursor = 0
        """Of the next task never admitted."""
        self.returned: list[Returned] = []
        self.groups: dict[int, Group] = {}
        """Outstanding and taken ones, until a checkpoint covers them."""
        self.outstanding: dict[int, Group] = {}
        self.complete: set[int] = set()
        """Outstanding groups in which nothing is missing that could still come."""
        self.queue: list[tuple[int, int]] = []
        """Admitted (group, member), oldest first: what is given out again stands at the head by its age."""
        self.voided: list[int] = []
        """Ids, ascending, of groups that do not count for admission."""
        self.stored: dict[int, int] = {}
        """Groups that may be replayed, oldest first, and how often each was trained."""
        self.num_filtered = 0
        """Groups filtered since the last batch."""
        self.lost: Counter[State] = Counter()
        """Groups that a filter, a failure or the deadline ended since the last batch or opening: what the budgets look
        at."""
        self.manifests: dict[int, Manifest] = {}
        """Those no checkpoint covers."""
        self.last_manifest = 0
        self.covered = 0
        self.retired: Counter[State] = Counter()
        """States of members of groups no longer kept."""
        self.num_superseded = 0
        self.num_retries = 0
        self.tokens_wasted = 0
        self.last_failure = ""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Book) and vars(self) == vars(other)

    __hash__ = None  # type: ignore[assignment]  # mutable

    def counts(self) -> Counter[State]:
        """Members in each state; their sum is `submitted`."""
        counts = Counter({state: self.retired[state] for state in State})
        counts.update(member.state for group in self.groups.values() for member in group.members)
        return counts

    def next_task(self) -> Returned:
        """The task to admit next: a returned one first."""
        return self.returned[0] if self.returned else Returned(self.next_cursor, 0)

    def admit(self) -> e.Admitted:
        task = self.next_task()
        num_members = self.rules.group_size + self.rules.redundant_members
        return e.Admitted(self.next_group, task.cursor, task.retry, num_members)

    def member(self, sample: SampleId) -> Member | None:
        """The member `sample` names, in whatever retry; None when it never was or is no longer kept."""
        group = self.groups.get(sample.group)
        return group.members[sample.member] if group and 0 <= sample.member < len(group.members) else None

    def segments(self) -> set[int]:
        """Payload segments something still needs."""
        return {
            member.result.payload.segment
            for group in self.groups.values()
            for member in group.members
            if member.result is not None and member.state in (State.COMMITTED, State.CONSUMED)
        }

    def apply(self, event: e.AnyEvent) -> None:
        """Raises ContractError, and changes nothing, when the event cannot happen in the present state."""
        match event:
            case e.Opened():
                self._open(event.opening)
            case e.Served():
                self.served = event.version
            case e.Admitted():
                self._admit(event)
            case e.Leased():
                self._lease(event)
            case e.LeaseExpired():
                self._requeue(self._member(event.group, event.member, State.LEASED), event.group, event.member)
            case e.Committed():
                self._commit(event)
            case e.PayloadLost():
                self._requeue(self._member(event.group, event.member, State.COMMITTED), event.group, event.member)
            case e.Retried():
                self._retry(event)
            case e.Failed():
                self._fail(event)
            case e.GroupFailed():
                self._void(event.group, State.FAILED)
                self.lost[State.FAILED] += 1
            case e.GroupFiltered():
                self._filter(event)
            case e.GroupExpired():
                self._expire(event)
            case e.GroupClosed():
                self._close(event.group)
            case e.GroupSurplus():
                self._void(event.group, State.SURPLUS)
            case e.Superseded():
                self.num_superseded += 1
                self.tokens_wasted += event.num_sampled
            case e.Taken():
                self._take(event.manifest, event.stored)
            case e.Covered():
                self._cover(event.step)
            case _:
                assert_never(event)

    def _open(self, opening: int) -> None:
        if opening <= self.opening:
            raise ContractError(f"opening {opening} after {self.opening}: the journal's files are out of order")
        self.opening = opening
        self.lost.clear()
        for group in self.outstanding.values():
            for index, member in enumerate(group.members):
                if member.state is State.LEASED:
                    self._requeue(member, group.id, index)
                if member.state is State.ADMITTED:
                    member.epoch = opening * EPOCHS_PER_OPENING

    def _admit(self, event: e.Admitted) -> None:
        task = self.next_task()
        if (event.group, event.cursor, event.retry) != (self.next_group, task.cursor, task.retry):
            raise ContractError(f"{event} is out of turn, {self.admit()} is next")
        if event.retry:
            del self.returned[0]
        else:
            self.next_cursor += 1
        epoch = self.opening * EPOCHS_PER_OPENING
        members = [Member(State.ADMITTED, epoch, event.retry) for _ in range(event.num_members)]
        group = Group(event.group, event.cursor, event.retry, self.rules.group_size, members)
        self.groups[group.id] = self.outstanding[group.id] = group
        self.queue.extend((group.id, index) for index in range(len(members)))
        self.next_group += 1
        self.submitted += event.num_members

    def _lease(self, event: e.Leased) -> None:
        member = self._member(event.group, event.member, State.ADMITTED)
        self._check_epoch(member, event)
        del self.queue[bisect_left(self.queue, (event.group, event.member))]
        member.state, member.served = State.LEASED, event.served

    def _commit(self, event: e.Committed) -> None:
        member = self._member(event.group, event.member, State.LEASED)
        self._check_epoch(member, event)
        member.state, member.result = State.COMMITTED, event
        self._note_complete(event.group)

    def _fail(self, event: e.Failed) -> None:
        self._member(event.group, event.member, State.LEASED).state = State.FAILED
        self.tokens_wasted += event.num_sampled
        self.last_failure = event.reason
        self._note_complete(event.group)

    def _note_complete(self, group: int) -> None:
        found = self.outstanding[group]
        if found.complete:
            self.complete.add(group)
            self._end_running(found, State.SURPLUS)

    def _requeue(self, member: Member, group: int, index: int) -> None:
        member.state, member.result = State.ADMITTED, None
        member.epoch += 1
        self.complete.discard(group)
        insort(self.queue, (group, index))

    def _retry(self, event: e.Retried) -> None:
        member = self._member(event.group, event.member, State.LEASED)
        self._requeue(member, event.group, event.member)
        member.retry += 1
        self.num_retries += 1
        self.tokens_wasted += event.num_sampled
        self.last_failure = event.reason

    def _filter(self, event: e.GroupFiltered) -> None:
        if event.group not in self.complete:
            raise ContractError(f"group {event.group} is filtered, but it is not complete")
        self._void(event.group, State.FILTERED)
        self.num_filtered += 1
        self.lost[State.FILTERED] += 1

    def _expire(self, event: e.GroupExpired) -> None:
        group = self._void(event.group, State.EXPIRED)
        self.lost[State.EXPIRED] += event.at_deadline
        if event.returned:
            self.returned.append(Returned(group.cursor, group.retry + 1))

    def _close(self, group_id: int) -> None:
        group = self._outstanding(group_id)
        if group_id in self.complete:
            raise ContractError(f"group {group_id} is closed, but it is complete")
        self._end_running(group, State.EXPIRED)
        self.complete.add(group_id)

    def _end_running(self, group: Group, state: State) -> None:
        """What its members still out may bring is not waited for."""
        for index, member in enumerate(group.members):
            if member.state is State.ADMITTED:
                del self.queue[bisect_left(self.queue, (group.id, index))]
            if member.state in RUNNING:
                member.state = state

    def _void(self, group_id: int, state: State) -> Group:
        """Ends a group that no batch will take; its capacity returns."""
        group = self._outstanding(group_id)
        self._end_running(group, state)
        for member in group.members:
            if member.state is State.COMMITTED:
                self._waste(member, state)
        insort(self.voided, group_id)
        self.complete.discard(group_id)
        del self.outstanding[group_id]
        return group

    def _take(self, manifest: Manifest, stored: list[int]) -> None:
        uses = {row.sample.group: row.use for row in manifest.rows}
        fresh = [self._outstanding(group) for group, use in uses.items() if use == 1]
        replaced = [self._outstanding(group) for group in manifest.replaced]
        if manifest.step != self.last_manifest + 1 or not all(g.id in self.complete for g in fresh + replaced):
            raise ContractError(f"manifest {manifest.step} after {self.last_manifest}, or of an incomplete group")
        kept = {group: uses.get(group, self.stored.get(group, 0)) for group in stored}
        replayed = {group: use for group, use in uses.items() if use > 1}
        if not all(kept.values()) or any(self.stored.get(group) != use - 1 for group, use in replayed.items()):
            raise ContractError(f"manifest {manifest.step} replays or stores groups that are not there")
        rows = {(row.sample.group, row.sample.member) for row in manifest.rows}
        for group in fresh:
            for index, member in enumerate(group.members):
                if member.state is State.COMMITTED and (group.id, index) in rows:
                    member.state = State.CONSUMED
            self._end_of_outstanding(group, manifest.step, State.SURPLUS)
        for group in replaced:
            self._end_of_outstanding(group, manifest.step, State.FILTERED)
        self.stored = kept
        self.num_filtered = 0
        self.lost.clear()
        self.manifests[manifest.step] = manifest
        self.last_manifest = manifest.step

    def _waste(self, member: Member, state: State) -> None:
        """Nobody will train what it committed."""
        member.state = state
        self.tokens_wasted += member.result.num_sampled if member.result is not None else 0

    def _end_of_outstanding(self, group: Group, step: int, state: State) -> None:
        """A batch took its place, which is not returned; commits without a row end as `state`."""
        group.taken_by = step
        for member in group.members:
            if member.state is State.COMMITTED:
                self._waste(member, state)
        self.complete.discard(group.id)
        del self.outstanding[group.id]

    def _cover(self, step: int) -> None:
        if not self.covered <= step <= self.last_manifest:
            raise ContractError(
                f"a checkpoint of step {step} cannot be: {self.covered} is covered, {self.last_manifest} handed out"
            )
        self.covered = step
        for done in [number for number in self.manifests if number <= step]:
            del self.manifests[done]
        needed = {row.sample.group for manifest in self.manifests.values() for row in manifest.rows}
        needed.update(self.outstanding, self.stored)
        for group in list(self.groups.values()):
            if group.id not in needed and (group.taken_by is None or group.taken_by <= step):
                self.retired.update(member.state for member in group.members)
                del self.groups[group.id]

    def _outstanding(self, group: int) -> Group:
        if group not in self.outstanding:
            raise ContractError(f"group {group} is not outstanding")
        return self.outstanding[group]

    def _member(self, group: int, member: int, state: State) -> Member:
        found = self.member(SampleId(group, member))
        if found is None or found.state is not state:
            raise ContractError(f"g{group}m{member} is {found.state if found else 'unknown'}, not {state}")
        return found

    def _check_epoch(self, member: Member, event: e.Leased | e.Committed) -> None:
        if member.epoch != event.epoch:
            raise ContractError(
                f"g{event.group}m{event.member}: lease epoch {event.epoch} is not the current {member.epoch}"
            )

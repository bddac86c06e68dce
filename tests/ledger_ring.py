"""The ring round a ledger, in as few lines as keep it honest: leases, commits, batches and versions in any order."""

from collections.abc import Callable
from random import Random

import msgspec
from hypothesis import strategies as st

from flashflow.ledger import FINAL, WAITING, Ledger, Rules, State
from flashflow.ledger import events as e
from flashflow.records import SampleId

MAX_LAG = 2
"""Batch k is asked for only when version k - 2 is served: a version is staged once the one before is served."""


ALPHAS = st.one_of(
    st.sampled_from([0.0, 0.5, 1.0, 2.0]), st.floats(0, 3.5).map(lambda alpha: round(alpha, 3)), st.floats(0, 3.5)
)
SIZES = st.tuples(st.integers(1, 3), st.integers(1, 4))
WEIGHTS = {"lease": 8, "commit": 8, "batch": 6, "publish": 4, "expire": 0.5, "fail": 0.3, "reopen": 0.1, "cover": 0.3}


def history(seed, length, starving, deadlines=0.0):
    """Actions with a choice and an age each. `starving`: envs finish the newest lease first, mostly."""
    random = Random(seed)
    weights = {**WEIGHTS, "deadline": deadlines}
    for action in random.choices(list(weights), list(weights.values()), k=length):
        newest = random.random() < (0.9 if starving else 0.1)
        yield action, -1 if newest else random.randrange(1000), random.choice([0, 0, 1, 2])


ACTIONS = st.builds(history, st.integers(0, 2**32), st.sampled_from([20, 100, 400]), st.booleans())
ACTIONS_WITH_DEADLINES = st.builds(
    history, st.integers(0, 2**32), st.sampled_from([20, 100, 400]), st.booleans(), st.just(1.0)
)


def play(ring, actions):
    for action, choice, age in actions:
        match action:
            case "lease":
                ring.lease()
            case "commit":
                ring.commit(choice, age)
            case "batch":
                ring.next_batch()
            case "publish":
                ring.publish()
            case "expire":
                ring.expire(choice)
            case "fail":
                ring.fail(choice)
            case "deadline":
                ring.deadline(choice)
            case "reopen":
                ring.reopen()
            case "cover":
                ring.record(e.Covered(max(ring.ledger.covered, choice % (ring.ledger.last_manifest + 1))))


class Ring:
    """Every event goes through `record`, which checks what must hold at every moment."""

    def __init__(self, rules: Rules, reward_of: Callable[[SampleId], float | None] = lambda sample: 1.0) -> None:
        self.ledger = Ledger(rules)
        self.reward_of = reward_of
        self.events: list[e.AnyEvent] = []
        self.leases: list[tuple[SampleId, int]] = []
        self.accepted: list[tuple[SampleId, int]] = []
        self.trained: list[SampleId] = []
        self.record(e.Opened(e.FORMAT, 0, "run", 0, rules.group_size, rules.batch_groups, rules.alpha))
        self.record(e.Served(0))

    def record(self, event: e.AnyEvent) -> None:
        self.ledger.apply(event)
        self.events.append(event)
        counts = self.ledger.counts()
        assert self.ledger.submitted == sum(counts.values())
        assert set(counts) == {*WAITING, *FINAL}
        assert self.ledger.complete == {group.id for group in self.ledger.outstanding.values() if group.complete}

    def lease(self) -> bool:
        """False when nothing may start."""
        if not self.ledger.queue and not self.ledger.closed():
            self.record(self.ledger.admit())
        leased = self.ledger.lease()
        if leased is None:
            return False
        self.record(leased)
        self.leases.append((self.ledger.groups[leased.group].sample(leased.member), leased.epoch))
        return True

    def commit(self, choice: int, age: int = 0) -> None:
        """The oldest token was sampled by any version served since the lease."""
        if not self.leases:
            return
        sample, epoch = self.leases.pop(choice % len(self.leases))
        if self.ledger.judge(sample, epoch) != "accepted":
            return
        leased_at = self.ledger.groups[sample.group].members[sample.member].served
        version = leased_at + age % (self.ledger.served - leased_at + 1)
        self.record(self.committed(sample, epoch, version, self.reward_of(sample)))
        self.accepted.append((sample, epoch))
        self.settle(sample.group)

    def committed(self, sample: SampleId, epoch: int, version: int, reward: float | None = 1.0) -> e.Committed:
        place = e.Location(0, 100 * len(self.events), 10)
        return e.Committed(sample.group, sample.member, epoch, version, 3, 2, reward, "completed", place)

    def fail(self, choice: int) -> None:
        if not self.leases:
            return
        sample, epoch = self.leases.pop(choice % len(self.leases))
        if self.ledger.judge(sample, epoch) == "accepted":
            self.record(self.ledger.fail(sample, "broken"))
            self.settle(sample.group)

    def settle(self, group: int) -> None:
        event = self.ledger.settle(group)
        if event is not None:
            self.record(event)

    def expire(self, choice: int) -> None:
        """The holder stays in the list: it will commit late."""
        if self.leases:
            sample, epoch = self.leases[choice % len(self.leases)]
            if self.ledger.judge(sample, epoch) == "accepted":
                self.record(e.LeaseExpired(sample.group, sample.member))

    def deadline(self, choice: int) -> None:
        """Of any outstanding group."""
        if not self.ledger.outstanding:
            return
        group = list(self.ledger.outstanding)[choice % len(self.ledger.outstanding)]
        event = self.ledger.at_deadline(group)
        if event is not None:
            self.record(event)
        if isinstance(event, e.GroupClosed):
            self.settle(group)

    def next_batch(self) -> bool:
        """False while it waits."""
        step = self.ledger.last_manifest + 1
        if self.ledger.served < step - MAX_LAG:
            return False
        for event in self.ledger.overdue(step):
            self.record(event)
        selection = self.ledger.select(step, ending=False)
        assert bool(selection.groups) != bool(selection.reason)
        if not selection.groups:
            return False
        self.record(self.ledger.take(step, selection.groups, rng_key=step))
        self.trained += [row.sample for row in self.ledger.manifests[step].rows if row.use == 1]
        for late in self.ledger.late(step + 1):
            self.record(late)
        return True

    def publish(self) -> bool:
        if self.ledger.served == self.ledger.last_manifest:
            return False
        self.record(e.Served(self.ledger.served + 1))
        return True

    def reopen(self) -> None:
        self.record(msgspec.structs.replace(self.events[0], opening=self.ledger.opening + 1))

    def replayed(self) -> Ledger:
        """Another ledger that saw the same events, as the journal writes them."""
        ledger = Ledger(self.ledger.rules)
        for event in self.events:
            ledger.apply(msgspec.msgpack.decode(msgspec.msgpack.encode(event), type=e.AnyEvent))
        return ledger

    def state(self, group: int, member: int) -> State:
        return self.ledger.groups[group].members[member].state

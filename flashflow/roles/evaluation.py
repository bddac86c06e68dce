"""One evaluation in the buffer: held-out problems, greedily, by exactly one version; never in ledger or journal."""

import asyncio
from collections import Counter
from collections.abc import Iterator

import msgspec
import numpy as np

from flashflow.errors import ContractError
from flashflow.ledger import Verdict
from flashflow.messages import EvalReply, Lease
from flashflow.records import SampleId, Task, Trajectory
from flashflow.roles.membership import Holding, Leases
from flashflow.transport.channel import Peer


class _Score(msgspec.Struct, frozen=True):
    """How one problem ended."""

    epoch: int
    reward: float | None
    num_sampled: int | None
    """None: the attempt left no trajectory."""


class Evaluation:
    """Its lease epochs come from `epochs` and are nobody else's: a late commit of an earlier one counts for nothing."""

    def __init__(
        self, version: int, tasks: list[Task], epochs: Iterator[int], asked_by: Peer, max_attempts: int
    ) -> None:
        self._max_attempts = max_attempts
        self._failures: Counter[int] = Counter()
        self.version = version
        self.asked_by = asked_by
        self.leases = Leases()
        self._tasks = tasks
        self._epochs = epochs
        self._todo = list(range(len(tasks)))
        self._scores: dict[int, _Score] = {}
        self._ended = asyncio.Event()

    @property
    def num_problems(self) -> int:
        return len(self._tasks)

    @property
    def num_missing(self) -> int:
        return len(self._tasks) - len(self._scores)

    async def ended(self) -> None:
        """Returns once every problem is scored. Raises ContractError when abandoned before."""
        await self._ended.wait()
        if self.num_missing:
            raise ContractError(f"evaluation of version {self.version}, asked for by {self.asked_by}, is superseded")

    def abandon(self) -> None:
        """Somebody newer asks for another."""
        self._ended.set()

    def lease(self, peer: Peer, now: float) -> Lease | None:
        """The next problem nobody works on."""
        if not self._todo:
            return None
        index, epoch = self._todo.pop(0), next(self._epochs)
        sample = SampleId(index, 0)
        self.leases.give(Holding(peer, sample, epoch, now))
        return Lease(
            sample=sample,
            lease_epoch=epoch,
            purpose="eval",
            task=self._tasks[index],
            min_version=self.version,
            pin_version=self.version,
        )

    def take_back(self, holding: Holding) -> None:
        """Its holder is gone: the problem is given out again, first."""
        self.leases.end(holding.sample, holding.epoch)
        self._todo.insert(0, holding.sample.group)

    def judge(self, sample: SampleId, epoch: int) -> Verdict:
        """Whether an attempt's end counts."""
        score = self._scores.get(sample.group)
        if score is not None and score.epoch == epoch:
            return "duplicate"
        return "accepted" if self.leases.holds(sample, epoch) else "superseded"

    def score(self, trajectory: Trajectory, epoch: int) -> None:
        """Of an accepted commit."""
        self._add(trajectory.sample, _Score(epoch, trajectory.reward, trajectory.num_sampled))

    def fail(self, sample: SampleId, epoch: int) -> None:
        """Of an accepted failure: given out again, and after `max_attempts` counted as reward 0."""
        self._failures[sample.group] += 1
        if self._failures[sample.group] >= self._max_attempts:
            self._add(sample, _Score(epoch, None, None))
            return
        self.leases.end(sample, epoch)
        self._todo.insert(0, sample.group)

    def reply(self, seconds: float) -> EvalReply:
        """Of what is scored by now."""
        scores = self._scores.values()
        lengths = [score.num_sampled for score in scores if score.num_sampled is not None]
        return EvalReply(
            version=self.version,
            num_problems=self.num_problems,
            accuracy=float(np.mean([score.reward if score.reward is not None else 0.0 for score in scores] or [0.0])),
            mean_response_tokens=float(np.mean(lengths)) if lengths else 0.0,
            num_failed=sum(score.reward is None for score in scores),
            num_missing=self.num_missing,
            seconds=seconds,
        )

    def _add(self, sample: SampleId, score: _Score) -> None:
        self._scores[sample.group] = score
        self.leases.end(sample, score.epoch)
        if not self.num_missing:
            self._ended.set()

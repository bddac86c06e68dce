"""reward: scores finished attempts.

    ENV ==Score==> REWARD ----> worker processes, one call each (sync functions); its own event loop (async functions)

waits for: a call; then the reward function, for at most `reward.deadline_s`.
unblocked by: the function's answer, or the deadline, at which the worker is killed and replaced.
never: trains on a guess: what cannot be scored has the reward None, and what raises stops the run.
"""

import asyncio
import logging
import os
import sys

from flashflow.config.sections import NetworkSection, RewardSection
from flashflow.errors import ContractError, RewardError
from flashflow.messages import Message, Score, ScoreReply
from flashflow.rewards.load import load_reward
from flashflow.rewards.pool import WorkerDied, WorkerPool
from flashflow.rewards.worker import Job, Request
from flashflow.transport.channel import Emit, Peer

log = logging.getLogger(__name__)

MAX_WORKERS = 4
"""Worker processes of one reward process, if there are as many cores; `placement.reward` adds processes."""


class RewardRole:
    """Raises ConfigError when the reward function cannot be found or called."""

    def __init__(
        self,
        section: RewardSection,
        *,
        startup_deadline_s: float = NetworkSection().startup_deadline_s,
        workers: bool = True,
    ) -> None:
        """workers: False calls sync functions here and now, where a debugger sees them and nothing can kill them."""
        self._section = section
        self._function = load_reward(section.function, section.arguments)
        self._running = 0
        self._scored = 0
        self._timed_out = 0
        self._died = 0
        self.pool: WorkerPool | None = None
        if workers and not self._function.asynchronous:
            job = Job(section.function, section.arguments, sys.path)
            self.pool = WorkerPool(job, min(MAX_WORKERS, os.cpu_count() or 1), startup_deadline_s)

    async def start(self) -> None:
        """Start the workers; raises RewardError when they cannot load the function. Without it they start on demand."""
        if self.pool is not None:
            await self.pool.start()

    async def handle(self, message: Message, peer: Peer, emit: Emit) -> ScoreReply:
        if not isinstance(message, Score):
            raise ContractError(f"reward: {peer} sent {type(message).__name__}; it takes Score only")
        self._running += 1
        try:
            return await self._score(message)
        finally:
            self._running -= 1

    def peer_lost(self, peer: Peer) -> None:
        """An env died: the transport has cancelled its calls, which kills the workers that were busy with them."""

    def describe(self) -> str:
        return (
            f"reward: {self._running} calls, of which {self.pool.num_busy if self.pool else self._running} run; "
            f"{self._scored} scored, {self._timed_out} past reward.deadline_s, {self._died} crashed a worker"
        )

    async def close(self) -> None:
        if self.pool is not None:
            await self.pool.close()

    async def _score(self, score: Score) -> ScoreReply:
        try:
            reply = await (self._in_worker(score, self.pool) if self.pool else self._in_loop(score))
        except TimeoutError:
            self._timed_out += 1
            log.warning(
                "%s of sample %s took more than %s s", self._function.name, score.sample, self._section.deadline_s
            )
            return ScoreReply(reward=None, components={}, timed_out=True)
        except WorkerDied as error:
            self._died += 1
            log.warning("%s of sample %s: %s", self._function.name, score.sample, error)
            return ScoreReply(reward=None, components={})
        except RewardError as error:
            return ScoreReply(reward=None, components={}, error=str(error))
        self._scored += 1
        return reply

    async def _in_worker(self, score: Score, pool: WorkerPool) -> ScoreReply:
        request = Request(score.prompt, score.completion, score.row.row)
        answer = await pool.call(request, self._section.deadline_s)
        return ScoreReply(reward=answer.reward, components=answer.components, error=answer.error)

    async def _in_loop(self, score: Score) -> ScoreReply:
        if not self._function.asynchronous:
            scored = self._function.score_now(score.prompt, score.completion, score.row.row)
            return ScoreReply(reward=scored.reward, components=scored.components)
        async with asyncio.timeout(self._section.deadline_s):
            scored = await self._function.score(score.prompt, score.completion, score.row.row)
        return ScoreReply(reward=scored.reward, components=scored.components)

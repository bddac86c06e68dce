"""env: hosts EnvManagers, one asyncio task per running attempt.

    BUFFER --Lease--> ENV ==Generate==> PROXY        ENV ==Score==> REWARD        ENV --Commit--> BUFFER

waits for: a lease, the tokens of a turn, a score.
unblocked by: buffer, proxy, reward; every wait has a deadline of the config. A lease that the buffer revokes ends the
attempt at once.
never: stamps a version, keeps a sample to itself, decides what is trained.
"""

import asyncio
import contextlib
import math
import traceback
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

import numpy as np

from flashflow.clock import Clock
from flashflow.config.sections import EvalSection, NetworkSection, RolloutSection, SamplingSection
from flashflow.environments.episode import Episodes, OneAnswer
from flashflow.environments.transcript import Transcript
from flashflow.errors import (
    ConfigError,
    ContractError,
    DeadlineError,
    EnvironmentBroken,
    PeerLost,
    RemoteError,
    RewardError,
    TransportError,
)
from flashflow.messages import (
    Abort,
    Ack,
    AcquireLease,
    AttemptFailed,
    AwaitRevoked,
    AwaitScoring,
    Commit,
    CommitReply,
    Generate,
    GenerateReply,
    Lease,
    LeaseName,
    NoLease,
    Revoked,
    SamplingKey,
    Score,
    ScoreReply,
    ScoringReply,
)
from flashflow.records import Int32Array, Outcome, Purpose, SampleId, Task, Trajectory
from flashflow.transport.channel import Client

T = TypeVar("T")

EVAL_SEED_OFFSET = 1 << 62
"""Keeps evaluation's sampling keys apart from training's."""


class PromptCodec:
    """Text to tokens and back, as the model's tokenizer and chat template have it."""

    def __init__(
        self,
        *,
        encode: Callable[[Task], list[int]],
        decode: Callable[[Int32Array | Sequence[int]], str],
        prompt_text: Callable[[Task], str],
        stop_ids: list[int],
    ) -> None:
        self.encode = encode
        self.decode = decode
        self.prompt_text = prompt_text
        self.stop_ids = stop_ids


class Attempt:
    """One attempt under way."""

    def __init__(self, lease: Lease, started: float, deadline: asyncio.Timeout) -> None:
        self.lease = lease
        self.label = f"{lease.purpose}-{lease.sample}-e{lease.lease_epoch}"
        self.started = started
        self.deadline = deadline
        self.request = ""
        """Its request at the proxy; empty while it has none."""
        self.num_sampled = 0
        self.revoked = False

    @property
    def remaining_s(self) -> float:
        when = self.deadline.when()
        return math.inf if when is None else when - asyncio.get_running_loop().time()

    def end_in(self, seconds: float) -> None:
        self.deadline.reschedule(asyncio.get_running_loop().time() + seconds)


class EnvRole:
    """`rollout.concurrency` EnvManagers; each leases, generates, scores, commits, and starts again."""

    def __init__(
        self,
        *,
        name: str,
        seed: int,
        codec: PromptCodec,
        rollout: RolloutSection,
        sampling: SamplingSection,
        evaluation: EvalSection,
        network: NetworkSection,
        max_context_tokens: int,
        buffer: Client,
        proxy: Client,
        rewards: Sequence[Client],
        clock: Clock,
        episodes: Episodes | None = None,
        on_lease: Callable[[], None] = lambda: None,
    ) -> None:
        """episodes: how attempts go on; None: with one answer to the prompt. on_lease: called at every lease."""
        self._name = name
        self._seed = seed
        self._codec = codec
        self._rollout = rollout
        self._sampling = sampling
        self._evaluation = evaluation
        self._network = network
        self._max_context_tokens = max_context_tokens
        self._buffer = buffer
        self._proxy = proxy
        self._rewards = rewards
        self._clock = clock
        self._on_lease = on_lease
        self._episodes = episodes if episodes is not None else self._one_answer
        self._attempts: dict[tuple[Purpose, SampleId, int], Attempt] = {}
        self._scored = 0

    async def run(self) -> None:
        """Until the buffer says that the run is over; raises what breaks a contract."""
        async with asyncio.TaskGroup() as group:
            revoking = group.create_task(self._revoke_leases(group))
            async with asyncio.TaskGroup() as managers:
                for _ in range(self._rollout.concurrency):
                    managers.create_task(self._env_manager())
            revoking.cancel()

    def describe(self) -> str:
        now = self._clock.now()
        oldest = max((now - attempt.started for attempt in self._attempts.values()), default=0.0)
        return f"{self._name}: {len(self._attempts)} attempts, the oldest for {oldest:.0f} s"

    async def _env_manager(self) -> None:
        deadline_s = self._network.long_poll_s + self._network.call_deadline_s
        while True:
            answer = await self._buffer.call(AcquireLease(), (Lease, NoLease), deadline_s=deadline_s)
            match answer:
                case NoLease(finished=True):
                    return
                case Lease():
                    self._on_lease()
                    await self._attempt(answer)

    async def _revoke_leases(self, aborts: asyncio.TaskGroup) -> None:
        """Aborts attempts that the buffer no longer wants, at the engine too."""
        deadline_s = self._network.long_poll_s + self._network.call_deadline_s
        while True:
            revoked = await self._buffer.call(AwaitRevoked(late=self._late()), Revoked, deadline_s=deadline_s)
            requests = [request for lease in revoked.leases if (request := self._revoke(lease))]
            if requests:
                aborts.create_task(self._abort(requests))

    def _late(self) -> list[LeaseName]:
        before = self._clock.now() - self._rollout.trajectory_deadline_s
        late = [attempt.lease for attempt in self._attempts.values() if attempt.started < before]
        return [LeaseName(lease.sample, lease.lease_epoch, lease.purpose) for lease in late]

    async def _abort(self, requests: list[str]) -> None:
        with contextlib.suppress(TransportError):  # without the proxy, the attempts' deadlines end them
            await self._proxy.call(Abort(requests=requests), Ack, deadline_s=self._network.call_deadline_s)

    def _revoke(self, lease: LeaseName) -> str:
        """The request to be aborted, whose last tokens are waited for; empty where there is none."""
        attempt = self._attempts.get((lease.purpose, lease.sample, lease.lease_epoch))
        if attempt is None:
            return ""
        attempt.revoked = True
        attempt.end_in(self._network.call_deadline_s if attempt.request else 0)
        return attempt.request

    async def _attempt(self, lease: Lease) -> None:
        deadline = asyncio.timeout(self._rollout.trajectory_deadline_s)
        attempt = Attempt(lease, self._clock.now(), deadline)
        try:
            trajectory = await self._until_deadline(attempt)
        except TimeoutError:
            await self._fail(attempt, f"rollout.trajectory_deadline_s: {self._rollout.trajectory_deadline_s} s passed")
        except (PeerLost, DeadlineError, RemoteError, EnvironmentBroken) as error:
            if isinstance(error, RemoteError) and error.kind == ContractError.__name__:
                raise ContractError(f"sample {lease.sample}: {error}") from error
            await self._fail(attempt, f"{type(error).__name__}: {error}")
        else:
            commit = Commit(lease_epoch=lease.lease_epoch, purpose=lease.purpose, trajectory=trajectory)
            await self._buffer.call(commit, CommitReply, deadline_s=self._network.call_deadline_s)

    async def _until_deadline(self, attempt: Attempt) -> Trajectory:
        """While it runs it may be revoked. Raises TimeoutError."""
        lease = attempt.lease
        key = lease.purpose, lease.sample, lease.lease_epoch
        async with attempt.deadline:
            self._attempts[key] = attempt
            try:
                return await self._roll_out(attempt)
            finally:
                del self._attempts[key]

    async def _fail(self, attempt: Attempt, reason: str) -> None:
        lease = attempt.lease
        failed = AttemptFailed(
            sample=lease.sample,
            lease_epoch=lease.lease_epoch,
            purpose=lease.purpose,
            reason="the lease was revoked" if attempt.revoked else reason,
            traceback="" if attempt.revoked else traceback.format_exc(),
            num_sampled=attempt.num_sampled,
        )
        await self._buffer.call(failed, CommitReply, deadline_s=self._network.call_deadline_s)

    async def _roll_out(self, attempt: Attempt) -> Trajectory:
        lease = attempt.lease
        transcript, cut_off = await self._play(attempt)
        answer = transcript.answers[-1]
        if self._rollout.schedule == "sync_naive" and lease.purpose == "train":
            await self._whole_batch(attempt)
        score = await self._score(lease, answer)
        outcome: Outcome = "truncated" if cut_off or answer.finish_reason == "length" else "completed"
        if score.reward is None:
            outcome = "failed"
        tokens, mask, logprobs, versions = transcript.arrays()
        return Trajectory(
            sample=lease.sample,
            tokens=tokens,
            mask=mask,
            logprobs=logprobs,
            versions=versions,
            num_turns=len(transcript.answers),
            outcome=outcome,
            reward=score.reward,
            reward_components=score.components,
            finish_reason="reward deadline" if score.timed_out else answer.finish_reason,
            seconds=self._clock.now() - attempt.started,
        )

    async def _play(self, attempt: Attempt) -> tuple[Transcript, bool]:
        """All turns, and whether the context was full before the environment had ended."""
        lease = attempt.lease
        episode, transcript = self._episodes(lease), Transcript()
        observation: Int32Array | None = await self._within_turn(episode.reset(), "to start")
        while observation is not None:
            transcript.observe(observation)
            turn = len(transcript.answers)
            answer = await self._turn(attempt, transcript.tokens_T, turn=turn)
            transcript.answer(answer)
            observation = await self._within_turn(episode.step(answer), f"over turn {turn}")
            if observation is not None and not self._has_room(lease, transcript, observation):
                return transcript, True
        return transcript, False

    async def _within_turn(self, work: Awaitable[T], what: str) -> T:
        """Raises DeadlineError after rollout.turn_deadline_s."""
        seconds = self._rollout.turn_deadline_s
        try:
            async with asyncio.timeout(seconds):
                return await work
        except TimeoutError as error:
            raise DeadlineError(f"the environment took more than rollout.turn_deadline_s {seconds} s {what}") from error

    def _one_answer(self, lease: Lease) -> OneAnswer:
        return OneAnswer(np.asarray(self._codec.encode(lease.task), dtype=np.int32))

    def _limit(self, lease: Lease) -> int:
        """Tokens of one answer."""
        if lease.purpose == "eval" and self._evaluation.max_new_tokens is not None:
            return self._evaluation.max_new_tokens
        return self._sampling.max_new_tokens

    def _has_room(self, lease: Lease, transcript: Transcript, observation: Int32Array) -> bool:
        """For one more turn."""
        return transcript.num_tokens + len(observation) + self._limit(lease) <= self._max_context_tokens

    async def _turn(self, attempt: Attempt, prompt_ids: Int32Array, *, turn: int) -> GenerateReply:
        """All tokens of one turn as one reply. What it waited for an engine is added to the deadline."""
        request = self._request(attempt, prompt_ids, turn)
        stream = self._proxy.stream(request, GenerateReply, idle_deadline_s=self._rollout.turn_deadline_s)
        parts = []
        attempt.request = request.request
        try:
            async for part in stream:
                parts.append(part)
                attempt.num_sampled += len(part.token_ids)
                if part.waited_s and not attempt.revoked and (when := attempt.deadline.when()) is not None:
                    attempt.deadline.reschedule(when + part.waited_s)
        finally:
            attempt.request = ""
        if parts[-1].finish_reason == "aborted":
            raise RemoteError("Aborted", f"{request.request} was aborted at the engine")
        if len(parts) == 1:
            return parts[0]
        return GenerateReply(
            token_ids=np.concatenate([part.token_ids for part in parts]),
            logprobs=np.concatenate([part.logprobs for part in parts]),
            versions=np.concatenate([part.versions for part in parts]),
            finish_reason=parts[-1].finish_reason,
        )

    def _request(self, attempt: Attempt, prompt_ids: Int32Array, turn: int) -> Generate:
        lease = attempt.lease
        sample, training = lease.sample, lease.purpose == "train"
        limit = self._limit(lease)
        seed = self._seed if training else self._seed ^ EVAL_SEED_OFFSET
        if len(prompt_ids) + limit > self._max_context_tokens:
            raise ConfigError([self._too_long(lease.task, len(prompt_ids), limit)])
        return Generate(
            request=f"{self._name}/{attempt.label}/t{turn}",
            session=f"{lease.purpose}-{sample if self._rollout.replicate_prompts else sample.group}",
            key=SamplingKey(seed, sample.group, sample.member, sample.retry, turn),
            prompt_ids=prompt_ids,
            generated_ids=np.zeros(0, np.int32),
            max_new_tokens=limit,
            temperature=self._sampling.temperature if training else 0.0,
            stop_ids=self._codec.stop_ids,
            stop_strings=self._sampling.stop_strings,
            min_version=lease.min_version,
            pin_version=lease.pin_version,
            block_size=lease.block_size if turn == 0 else 1,
        )

    def _too_long(self, task: Task, num_tokens: int, limit: int) -> str:
        return (
            f"engine.max_context_tokens: {self._max_context_tokens} is less than the {num_tokens} tokens of the prompt "
            f"in row {task.cursor} of the data and max_new_tokens {limit} together; raise the first, lower the last, "
            f"or drop such rows: {self._codec.prompt_text(task)[:200]!r}"
        )

    async def _whole_batch(self, attempt: Attempt) -> None:
        """Returns when the rest of the batch is generated too; the wait counts against no deadline."""
        sample, epoch = attempt.lease.sample, attempt.lease.lease_epoch
        remaining_s = attempt.remaining_s
        attempt.deadline.reschedule(None)
        ask = AwaitScoring(sample=sample, lease_epoch=epoch)
        deadline_s = self._network.long_poll_s + self._network.call_deadline_s
        while not (await self._buffer.call(ask, ScoringReply, deadline_s=deadline_s)).score:
            pass
        attempt.end_in(remaining_s)

    async def _score(self, lease: Lease, answer: GenerateReply) -> ScoreReply:
        self._scored += 1
        reward = self._rewards[self._scored % len(self._rewards)]
        score = Score(
            sample=lease.sample,
            purpose=lease.purpose,
            prompt=self._codec.prompt_text(lease.task),
            completion=self._codec.decode(answer.token_ids),
            row=lease.task,
        )
        reply = await reward.call(score, ScoreReply, deadline_s=self._rollout.turn_deadline_s)
        if reply.error:
            raise RewardError(f"the reward function raised on sample {lease.sample}:\n{reply.error}")
        return reply

"""env: hosts EnvManagers, one asyncio task per running attempt.

    BUFFER --Lease--> ENV ==Generate==> PROXY        ENV ==Score==> REWARD        ENV --Commit--> BUFFER

waits for: a lease, the tokens of a turn, a score.
unblocked by: buffer, proxy, reward; every wait has a deadline of the config.
never: stamps a version, keeps a sample to itself, decides what is trained.
"""

import asyncio
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
)
from flashflow.messages import (
    AcquireLease,
    AttemptFailed,
    Commit,
    CommitReply,
    Generate,
    GenerateReply,
    Lease,
    NoLease,
    SamplingKey,
    Score,
    ScoreReply,
)
from flashflow.records import Int32Array, Outcome, Task, Trajectory
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
        decode: Callable[[Sequence[int]], str],
        prompt_text: Callable[[Task], str],
        stop_ids: list[int],
    ) -> None:
        self.encode = encode
        self.decode = decode
        self.prompt_text = prompt_text
        self.stop_ids = stop_ids


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
        on_lease: Callable[[], None] = lambda: None,
        episodes: Episodes | None = None,
    ) -> None:
        """on_lease: called at every lease. episodes: how attempts go on; None: with one answer to the prompt."""
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
        self._running: dict[str, float] = {}
        self._scored = 0

    async def run(self) -> None:
        """Until the buffer says that the run is over; raises what breaks a contract."""
        async with asyncio.TaskGroup() as group:
            for _ in range(self._rollout.concurrency):
                group.create_task(self._env_manager())

    def describe(self) -> str:
        now = self._clock.now()
        oldest = max((now - since for since in self._running.values()), default=0.0)
        return f"{self._name}: {len(self._running)} attempts, the oldest for {oldest:.0f} s"

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

    async def _attempt(self, lease: Lease) -> None:
        label = f"{lease.purpose}-{lease.sample}-e{lease.lease_epoch}"
        started = self._clock.now()
        self._running[label] = started
        try:
            async with asyncio.timeout(self._rollout.trajectory_deadline_s) as deadline:
                trajectory = await self._roll_out(lease, label, started, deadline)
        except TimeoutError:
            await self._fail(lease, f"rollout.trajectory_deadline_s: {self._rollout.trajectory_deadline_s} s passed")
        except (PeerLost, DeadlineError, RemoteError, EnvironmentBroken) as error:
            if isinstance(error, RemoteError) and error.kind == ContractError.__name__:
                raise ContractError(f"sample {lease.sample}: {error}") from error
            await self._fail(lease, f"{type(error).__name__}: {error}")
        else:
            commit = Commit(lease_epoch=lease.lease_epoch, purpose=lease.purpose, trajectory=trajectory)
            await self._buffer.call(commit, CommitReply, deadline_s=self._network.call_deadline_s)
        finally:
            del self._running[label]

    async def _fail(self, lease: Lease, reason: str) -> None:
        failed = AttemptFailed(
            sample=lease.sample,
            lease_epoch=lease.lease_epoch,
            purpose=lease.purpose,
            reason=reason,
            traceback=traceback.format_exc(),
        )
        await self._buffer.call(failed, CommitReply, deadline_s=self._network.call_deadline_s)

    async def _roll_out(self, lease: Lease, label: str, started: float, deadline: asyncio.Timeout) -> Trajectory:
        transcript, cut_off = await self._play(lease, label, deadline)
        answer = transcript.answers[-1]
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
            seconds=self._clock.now() - started,
        )

    async def _play(self, lease: Lease, label: str, deadline: asyncio.Timeout) -> tuple[Transcript, bool]:
        """All turns, and whether the context was full before the environment had ended."""
        episode, transcript = self._episodes(lease), Transcript()
        observation: Int32Array | None = await self._within_turn(episode.reset(), "to start")
        while observation is not None:
            transcript.observe(observation)
            turn = len(transcript.answers)
            answer = await self._turn(lease, label, transcript.tokens_T, deadline, turn=turn)
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

    async def _turn(
        self, lease: Lease, label: str, prompt_ids: Int32Array, deadline: asyncio.Timeout, *, turn: int
    ) -> GenerateReply:
        """All tokens of one turn as one reply. What it waited for an engine is added to the deadline."""
        sample, training = lease.sample, lease.purpose == "train"
        limit = self._limit(lease)
        seed = self._seed if training else self._seed ^ EVAL_SEED_OFFSET
        if len(prompt_ids) + limit > self._max_context_tokens:
            raise ConfigError([self._too_long(lease.task, len(prompt_ids), limit)])
        request = Generate(
            request=f"{self._name}/{label}/t{turn}",
            session=f"{lease.purpose}-{sample}",
            key=SamplingKey(seed, sample.group, sample.member, sample.retry, turn),
            prompt_ids=prompt_ids,
            generated_ids=np.zeros(0, np.int32),
            max_new_tokens=limit,
            temperature=self._sampling.temperature if training else 0.0,
            stop_ids=self._codec.stop_ids,
            stop_strings=self._sampling.stop_strings,
            min_version=lease.min_version,
            pin_version=lease.pin_version,
        )
        stream = self._proxy.stream(request, GenerateReply, idle_deadline_s=self._rollout.turn_deadline_s)
        parts = []
        async for part in stream:
            parts.append(part)
            if part.waited_s and (when := deadline.when()) is not None:
                deadline.reschedule(when + part.waited_s)
        if parts[-1].finish_reason == "aborted":
            raise RemoteError("Aborted", f"{request.request} was aborted at the engine")
        return GenerateReply(
            token_ids=np.concatenate([part.token_ids for part in parts]),
            logprobs=np.concatenate([part.logprobs for part in parts]),
            versions=np.concatenate([part.versions for part in parts]),
            finish_reason=parts[-1].finish_reason,
        )

    def _too_long(self, task: Task, num_tokens: int, limit: int) -> str:
        return (
            f"engine.max_context_tokens: {self._max_context_tokens} is less than the {num_tokens} tokens of the prompt "
            f"in row {task.cursor} of the data and max_new_tokens {limit} together; raise the first, lower the last, "
            f"or drop such rows: {self._codec.prompt_text(task)[:200]!r}"
        )

    async def _score(self, lease: Lease, answer: GenerateReply) -> ScoreReply:
        self._scored += 1
        reward = self._rewards[self._scored % len(self._rewards)]
        score = Score(
            sample=lease.sample,
            purpose=lease.purpose,
            prompt=self._codec.prompt_text(lease.task),
            completion=self._codec.decode(answer.token_ids.tolist()),
            row=lease.task,
        )
        reply = await reward.call(score, ScoreReply, deadline_s=self._rollout.turn_deadline_s)
        if reply.error:
            raise RewardError(f"the reward function raised on sample {lease.sample}:\n{reply.error}")
        return reply

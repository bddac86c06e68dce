"""engine: decodes for the proxy; owns one inference engine and the thread that computes.

    PROXY ==Generate==> ENGINE: step, step, ...      trainer ~~shared memory~~> ENGINE, swapped between two steps

waits for: a request, when it has none; otherwise for nothing but its own decode steps.
unblocked by: Generate, Resume.
never: goes back to an older version, swaps weights inside a step, spins while idle.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor
from importlib import metadata
from typing import ParamSpec, TypeVar

import msgspec
import numpy as np

from flashflow.clock import Clock
from flashflow.config.sections import NetworkSection, TorchEngineSection
from flashflow.engines.base import Engine, FinishReason, Sampled
from flashflow.errors import ContractError, DeadlineError, NotServing
from flashflow.messages import (
    Abort,
    Ack,
    EngineStatus,
    EngineStatusRequest,
    Generate,
    GenerateReply,
    Message,
    Resume,
    Serving,
    Suspend,
    Update,
)
from flashflow.records import StagedWeights
from flashflow.transport.channel import Emit, Peer
from flashflow.transport.weights.carrier import AttachedWeights, attach

P = ParamSpec("P")
T = TypeVar("T")


class Answer:
    """Tokens of one request that have not been sent yet."""

    def __init__(self) -> None:
        self.ended = asyncio.Event()
        self._reason: FinishReason = ""
        self._unsent: list[Sampled] = []
        self.begun = False
        """A token has been sampled."""

    def add(self, sampled: Sampled) -> None:
        if sampled.token >= 0:
            self.begun = True
            self._unsent.append(sampled)
        if sampled.finish_reason:
            self.end(sampled.finish_reason)

    def end(self, reason: FinishReason) -> None:
        """The first reason counts."""
        if not self.ended.is_set():
            self._reason = reason
            self.ended.set()

    @property
    def has_unsent(self) -> bool:
        return bool(self._unsent)

    def take(self) -> GenerateReply:
        """What came since the last part, with the finish reason once there is one."""
        unsent, self._unsent = self._unsent, []
        return GenerateReply(
            token_ids=np.array([sampled.token for sampled in unsent], dtype=np.int32),
            logprobs=np.array([sampled.logprob for sampled in unsent], dtype=np.float32),
            versions=np.array([sampled.version for sampled in unsent], dtype=np.int32),
            finish_reason=self._reason,
        )


class EngineRole:
    """Serves calls; `run` is the decode loop and must run beside it."""

    def __init__(
        self,
        *,
        name: str,
        engine: Engine,
        section: TorchEngineSection,
        network: NetworkSection,
        clock: Clock,
        executor: Executor | None,
        on_tokens: Callable[[], None] = lambda: None,
    ) -> None:
        """executor: one thread, to which the engine belongs from now on; None computes in the event loop.
        on_tokens: called after every step that sampled a token."""
        self._name = name
        self._engine = engine
        self._section = section
        self._network = network
        self._clock = clock
        self._executor = executor
        self._on_tokens = on_tokens
        self._answers: dict[str, Answer] = {}
        self._weights: AttachedWeights | None = None
        self._work = asyncio.Event()
        self._suspended = False
        self._stopped = False
        self._tokens_generated = 0
        self._last_step_at = clock.now()

    async def handle(self, message: Message, peer: Peer, emit: Emit) -> Message:
        match message:
            case Generate():
                return await self._generate(message, emit)
            case Abort():
                await self._abort(message.requests)
                return Ack()
            case Suspend() | Resume():
                await self._set_suspended(isinstance(message, Suspend))
                return Ack()
            case Update():
                version = await self._compute(self._swap, message.weights)
                return Serving(version=version, engines=[self._name])
            case EngineStatusRequest():
                return await self._compute(self._status)
            case _:
                raise ContractError(f"{self._name}: unexpected {type(message).__name__} from {peer}")

    def peer_lost(self, peer: Peer) -> None:
        """The transport has cancelled the handlers of its requests, which aborts them."""

    def describe(self) -> str:
        state = "suspended" if self._suspended else "decoding" if self._answers else "idle"
        return (
            f"{self._name}: {state} at version {self._engine.version}, {self._engine.num_running} requests running, "
            f"{self._engine.num_waiting} waiting; last step {self._clock.now() - self._last_step_at:.1f} s ago"
        )

    async def run(self) -> None:
        """Decode for ever; raises what a step raises."""
        try:
            while True:
                if self._suspended or not self._work.is_set():
                    self._work.clear()
                    await self._work.wait()
                else:
                    await self._decode_once()
        finally:
            self._stopped = True

    async def _decode_once(self) -> None:
        news, idle = await self._compute(self._step)
        self._last_step_at = self._clock.now()
        self._deliver(news)
        if idle:
            self._work.clear()
        elif self._executor is None:
            await asyncio.sleep(0)

    # ---- requests

    async def _generate(self, request: Generate, emit: Emit) -> GenerateReply:
        name = request.request
        if name in self._answers:
            raise ContractError(f"{self._name}: request {name} is already being answered")
        answer = self._answers[name] = Answer()
        try:
            await self._compute(self._submit, request)
            self._work.set()
            since = self._clock.now()
            while not await self._ends_within(answer, self._section.stream_every_s):
                waited_s = self._waited_s(answer, since)
                if answer.has_unsent or waited_s:
                    await self._send(name, msgspec.structs.replace(answer.take(), waited_s=waited_s), emit)
                since = self._clock.now()
            return msgspec.structs.replace(answer.take(), num_waiting=self._engine.num_waiting)
        finally:
            # A `submit` cancelled on its way has its abort behind it. After `run` the thread may be gone.
            del self._answers[name]
            if not answer.ended.is_set() and not self._stopped:
                await self._compute(self._engine.abort, name)

    def _waited_s(self, answer: Answer, since: float) -> float:
        """Seconds in which others were decoded, or nobody while suspended. An engine that stands still works on it: its
        deadline must find out."""
        waits = self._suspended or (not answer.begun and self._last_step_at > since)
        return self._clock.now() - since if waits else 0.0

    async def _ends_within(self, answer: Answer, seconds: float) -> bool:
        try:
            async with asyncio.timeout(seconds):
                await answer.ended.wait()
        except TimeoutError:
            return False
        return True

    async def _send(self, name: str, part: GenerateReply, emit: Emit) -> None:
        deadline_s = self._network.call_deadline_s
        try:
            async with asyncio.timeout(deadline_s):
                await emit(part)
        except TimeoutError as error:
            raise DeadlineError(
                f"{self._name}: a part of request {name} was not taken within {deadline_s} s (network.call_deadline_s)"
            ) from error

    async def _abort(self, requests: list[str]) -> None:
        await self._compute(self._abort_all, requests)
        for name in self._answers.keys() & set(requests):
            self._answers[name].end("aborted")

    async def _set_suspended(self, suspended: bool) -> None:
        self._suspended = suspended
        if suspended:
            await self._compute(lambda: None)  # returns after the step in progress
        else:
            self._work.set()

    def _deliver(self, news: list[Sampled]) -> None:
        if news:
            self._on_tokens()
        for sampled in news:
            self._tokens_generated += sampled.token >= 0
            if sampled.request in self._answers:
                self._answers[sampled.request].add(sampled)

    # ---- on the engine's thread

    async def _compute(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """In order of the calls, each whole: nothing happens inside a step."""
        if self._executor is None:
            return work(*args, **kwargs)
        return await asyncio.get_running_loop().run_in_executor(self._executor, lambda: work(*args, **kwargs))

    def _step(self) -> tuple[list[Sampled], bool]:
        news = self._engine.step()
        return news, not (self._engine.num_running or self._engine.num_waiting)

    def _abort_all(self, requests: list[str]) -> None:
        for name in requests:
            self._engine.abort(name)

    def _submit(self, request: Generate) -> None:
        version, asker = self._engine.version, f"{self._name}: request {request.request}"
        if version < request.min_version:
            raise NotServing(f"{asker} needs version {request.min_version}, but {version} is served")
        if request.pin_version is not None and request.pin_version != version:
            raise NotServing(f"{asker} is pinned to version {request.pin_version}, but {version} is served")
        self._engine.submit(request)

    def _swap(self, weights: StagedWeights) -> int:
        """The version served from now on. Raises WeightsError when they do not fit; then nothing has changed."""
        served = self._engine.version
        if weights.version == served:
            return served
        if weights.version < served:
            raise ContractError(f"{self._name}: update to version {weights.version}, but {served} is served already")
        attached = attach(weights)
        try:
            attached.verify()
            self._engine.load(weights.version, attached.tensors)
        except BaseException:
            attached.close()
            raise
        if self._weights is not None:
            self._weights.close()
        self._weights = attached
        return weights.version

    def _status(self) -> EngineStatus:
        return EngineStatus(
            version=self._engine.version,
            slots=self._section.slots,
            running=self._engine.num_running,
            waiting=self._engine.num_waiting,
            tokens_generated=self._tokens_generated,
            exact=self._engine.exact,
            packages={name: metadata.version(name) for name in ("flashflow", "torch", "transformers")},
        )

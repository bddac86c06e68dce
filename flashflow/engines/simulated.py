"""An engine that samples nothing: every answer has the length its sampling key draws, and takes the time it would.

    PROXY ==Generate==> [queue] -> slot: prefill, then tokens at a fixed rate -> answer       all in closed form

waits for: a free slot, in order of arrival; then the time of the whole answer at once.
unblocked by: the end of an answer, an abort, Resume.
never: computes, imports torch, wakes up between two tokens.
"""

import asyncio
import heapq
from collections import deque

import numpy as np

from flashflow.clock import Clock
from flashflow.config.sections import NetworkSection
from flashflow.config.simulated import SimulatedEngineSection
from flashflow.engines.base import FinishReason
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
from flashflow.records import Int32Array
from flashflow.simulate import weights
from flashflow.simulate.distributions import drawer
from flashflow.simulate.spans import Spans, Unheard
from flashflow.transport.channel import Emit, Peer

TOKEN_IDS = 50_000
"""Sampled token ids lie below; an answer is one id all along, which tells answers apart."""
LOGPROB = -1.0
"""Of every sampled token."""


class WorkTime:
    """Seconds in which the engine decoded: the clock's, but for those in which it stood still."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._still = 0
        self._still_since = 0.0
        self._lost = 0.0

    @property
    def runs(self) -> bool:
        return self._still == 0

    def now(self) -> float:
        return (self._clock.now() if self.runs else self._still_since) - self._lost

    def halt(self) -> None:
        if self.runs:
            self._still_since = self._clock.now()
        self._still += 1

    def go_on(self) -> None:
        self._still -= 1
        if self.runs:
            self._lost += self._clock.now() - self._still_since


class Decoding:
    """One request in a slot."""

    def __init__(
        self,
        request: Generate,
        *,
        num_tokens: int,
        reason: FinishReason,
        prefill_s: float,
        rate: float,
        version: int,
        started: float,
    ) -> None:
        """reason: how it ends unless it is aborted. started: in work time."""
        self.request = request
        self.num_tokens = num_tokens
        self.num_sent = 0
        self.reason: FinishReason = reason
        self.started = started
        self.ended: asyncio.Future[FinishReason] = asyncio.get_running_loop().create_future()
        self.timer: asyncio.TimerHandle | None = None
        self._prefill_s = prefill_s
        self._rate = rate
        self._versions = [(0, version)]
        """(first token, version that sampled it and those after)."""

    @property
    def seconds(self) -> float:
        return self._prefill_s + (self.num_tokens / self._rate if self._rate else 0.0)

    def num_done(self, work_now: float) -> int:
        """Tokens sampled by then."""
        if not self._rate:
            return self.num_tokens
        return max(0, min(self.num_tokens, int((work_now - self.started - self._prefill_s) * self._rate)))

    def update(self, version: int, work_now: float) -> None:
        self._versions.append((self.num_done(work_now), version))

    def end(self, reason: FinishReason) -> None:
        if not self.ended.done():
            self.ended.set_result(reason)

    def part(self, up_to: int, reason: FinishReason) -> GenerateReply:
        """The tokens not yet sent."""
        first, self.num_sent = self.num_sent, up_to
        count = up_to - first
        key = self.request.key
        token = (key.group * 7919 + key.member * 104_729 + key.turn * 15_485_863 + key.seed) % TOKEN_IDS
        return GenerateReply(
            token_ids=np.full(count, token, np.int32),
            logprobs=np.full(count, LOGPROB, np.float32),
            versions=self._versions_from(first, up_to),
            finish_reason=reason,
        )

    def _versions_from(self, first: int, end: int) -> Int32Array:
        if len(self._versions) == 1:
            return np.full(end - first, self._versions[0][1], np.int32)
        versions = np.empty(end, np.int32)
        for start, version in self._versions:
            versions[start:] = version
        return versions[first:]


class SimulatedEngine:
    """Takes the place of EngineRole. `run` must run beside it, as there."""

    def __init__(
        self,
        *,
        name: str,
        section: SimulatedEngineSection,
        group_size: int,
        network: NetworkSection,
        clock: Clock,
        spans: Spans | None = None,
    ) -> None:
        """Raises OSError or ValueError when a file of lengths cannot be read."""
        self._name = name
        self._section = section
        self._network = network
        self._clock = clock
        self._spans = spans if spans is not None else Unheard()
        self._draw = drawer("answer", section.answer_tokens, group_size)
        self._work = WorkTime(clock)
        self._suspended = False
        self._version = -1
        self._free = list(range(section.slots))
        self._queue: deque[asyncio.Future[int | None]] = deque()
        """Who waits for a slot, in order; the result is the slot, or None for an aborted request."""
        self._turns: dict[str, asyncio.Future[int | None]] = {}
        """Every request that is not answered."""
        self._decoding: dict[str, Decoding] = {}
        self._prefixes: dict[str, int] = {}
        """Session -> tokens whose keys and values are kept, of the present weights."""
        self._tokens_generated = 0

    async def handle(self, message: Message, peer: Peer, emit: Emit) -> Message:
        match message:
            case Generate():
                return await self._generate(message, emit)
            case Abort():
                self._abort(message.requests)
                return Ack()
            case Suspend() | Resume():
                self._set_suspended(isinstance(message, Suspend))
                return Ack()
            case Update():
                return await self._update(message)
            case EngineStatusRequest():
                return self._status()
            case _:
                raise ContractError(f"{self._name}: unexpected {type(message).__name__} from {peer}")

    def peer_lost(self, peer: Peer) -> None:
        """The transport has cancelled the handlers of its requests, which frees their slots."""

    def describe(self) -> str:
        state = "stands still" if not self._work.runs else "decoding" if self._decoding else "idle"
        return (
            f"{self._name}: {state} at version {self._version}, {len(self._decoding)} requests running, "
            f"{len(self._queue)} waiting"
        )

    async def run(self) -> None:
        """There is nothing to do but to answer."""
        await asyncio.get_running_loop().create_future()

    # ---- requests

    async def _generate(self, request: Generate, emit: Emit) -> GenerateReply:
        self._check(request)
        name = request.request
        turn = self._turns[name] = asyncio.get_running_loop().create_future()
        slot: int | None = None
        try:
            if self._free:
                slot = heapq.heappop(self._free)
            else:
                self._queue.append(turn)
                slot = await turn
            return await self._decode(slot, request, emit) if slot is not None else NOTHING
        except asyncio.CancelledError:
            if slot is None and turn.done() and not turn.cancelled():
                slot = turn.result()  # it came together with the cancellation
            raise
        finally:
            del self._turns[name]
            if slot is not None:
                self._give_back(slot)

    def _check(self, request: Generate) -> None:
        asker, asked = f"{self._name}: request {request.request}", len(request.prompt_ids) + request.max_new_tokens
        if self._version < request.min_version or self._version < 0:
            raise NotServing(f"{asker} needs version {request.min_version}, but {self._version} is served")
        if request.pin_version is not None and request.pin_version != self._version:
            raise NotServing(f"{asker} is pinned to version {request.pin_version}, but {self._version} is served")
        if asked > self._section.max_context_tokens:
            raise ContractError(
                f"{asker}: prompt and max_new_tokens are {asked} tokens, engine.max_context_tokens is "
                f"{self._section.max_context_tokens}"
            )
        if request.request in self._turns:
            raise ContractError(f"{asker} is already being answered")

    def _give_back(self, slot: int) -> None:
        while self._queue:
            turn = self._queue.popleft()
            if not turn.done():
                turn.set_result(slot)
                return
        heapq.heappush(self._free, slot)

    async def _decode(self, slot: int, request: Generate, emit: Emit) -> GenerateReply:
        started, decoding = self._clock.now(), self._begin(request)
        self._decoding[request.request] = decoding
        try:
            if decoding.seconds > 0 or not self._work.runs:
                self._set_timer(decoding)
                await self._stream(decoding, emit)
            else:
                decoding.end(decoding.reason)
            reason = decoding.ended.result()
            done = decoding.num_done(self._work.now()) if reason == "aborted" else decoding.num_tokens
            self._prefixes[request.session] = len(request.prompt_ids) + decoding.num_tokens
            return decoding.part(done, reason)
        finally:
            if decoding.timer is not None:
                decoding.timer.cancel()
            del self._decoding[request.request]
            self._tokens_generated += max(decoding.num_sent, decoding.num_done(self._work.now()))
            self._spans.add(self._name, slot, request.session, started, self._clock.now())

    def _begin(self, request: Generate) -> Decoding:
        section = self._section
        length = max(1, round(self._draw(request.key)))
        num_read = len(request.prompt_ids) + len(request.generated_ids) - self._prefixes.get(request.session, 0)
        return Decoding(
            request,
            num_tokens=max(1, min(length, request.max_new_tokens) - len(request.generated_ids)),
            reason="stop" if length < request.max_new_tokens else "length",
            prefill_s=max(0, num_read) / section.prefill_tokens_per_s if section.prefill_tokens_per_s else 0.0,
            rate=section.decode_tokens_per_s,
            version=self._version,
            started=self._work.now(),
        )

    async def _stream(self, decoding: Decoding, emit: Emit) -> None:
        """Returns once it has ended."""
        every_s = self._section.stream_every_s
        if every_s is None:
            await decoding.ended
            return
        while not (await asyncio.wait({decoding.ended}, timeout=every_s))[0]:
            done = decoding.num_done(self._work.now())
            if done > decoding.num_sent:
                await self._send(decoding.part(done, ""), emit)

    async def _send(self, part: GenerateReply, emit: Emit) -> None:
        deadline_s = self._network.call_deadline_s
        try:
            async with asyncio.timeout(deadline_s):
                await emit(part)
        except TimeoutError as error:
            raise DeadlineError(
                f"{self._name}: a part was not taken within {deadline_s} s (network.call_deadline_s)"
            ) from error

    def _abort(self, requests: list[str]) -> None:
        for name in requests:
            if name in self._decoding:
                self._decoding[name].end("aborted")
            elif name in self._turns and not self._turns[name].done():
                self._turns[name].set_result(None)

    # ---- time and weights

    def _set_timer(self, decoding: Decoding) -> None:
        if self._work.runs and not decoding.ended.done():
            remaining_s = decoding.started + decoding.seconds - self._work.now()
            loop = asyncio.get_running_loop()
            decoding.timer = loop.call_later(max(0.0, remaining_s), decoding.end, decoding.reason)

    def _set_suspended(self, suspended: bool) -> None:
        if suspended != self._suspended:
            self._suspended = suspended
            (self._halt if suspended else self._go_on)()

    def _halt(self) -> None:
        self._work.halt()
        for decoding in self._decoding.values():
            if decoding.timer is not None:
                decoding.timer.cancel()

    def _go_on(self) -> None:
        self._work.go_on()
        for decoding in self._decoding.values():
            self._set_timer(decoding)

    async def _update(self, update: Update) -> Serving:
        version = update.weights.version
        if version < self._version:
            raise ContractError(f"{self._name}: update to version {version}, but {self._version} is served already")
        if version > self._version:
            weights.check(update.weights)
            await self._stand_still(self._section.update_s)
            self._version = version
            self._prefixes.clear()
            for decoding in self._decoding.values():
                decoding.update(version, self._work.now())
        return Serving(version=version, engines=[self._name])

    async def _stand_still(self, seconds: float) -> None:
        if seconds > 0:
            self._halt()
            try:
                await self._clock.sleep(seconds)
            finally:
                self._go_on()

    def _status(self) -> EngineStatus:
        return EngineStatus(
            version=self._version,
            slots=self._section.slots,
            running=len(self._decoding),
            waiting=len(self._turns) - len(self._decoding),
            tokens_generated=self._tokens_generated,
            exact=True,
            packages={},
        )


NOTHING = GenerateReply(
    token_ids=np.zeros(0, np.int32),
    logprobs=np.zeros(0, np.float32),
    versions=np.zeros(0, np.int32),
    finish_reason="aborted",
)
"""The answer to a request aborted while it waited for a slot."""

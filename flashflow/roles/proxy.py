"""proxy: the one address for generation; five commands in front of the engines.

    env ==ADD Generate==> PROXY ==> engine-0, engine-1, ...       controller --UPDATE, SUSPEND, RESUME--> PROXY

waits for: an engine that has room and serves `min_version`.
unblocked by: a request that ends, an UPDATE, an engine that comes back.
never: stamps a version, touches a token, blocks one request behind another, drops a request because an engine died.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Mapping
from typing import Literal

import msgspec
import numpy as np

from flashflow.clock import Clock
from flashflow.config.sections import NetworkSection, RolloutSection
from flashflow.errors import (
    BudgetError,
    ContractError,
    DeadlineError,
    NotServing,
    PeerLost,
    RemoteError,
    TransportError,
    WeightsError,
)
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
from flashflow.transport.channel import Client, Emit, Peer

MAX_DISPATCHES = 4
"""Engines one request may die under before it fails."""
MAX_SESSIONS = 65_536
"""Conversations whose engine is remembered; the least recently used is forgotten, which costs a prefill."""


class EngineEnd:
    """What the proxy knows of one engine."""

    def __init__(self, name: str, client: Client) -> None:
        self.name = name
        self.client = client
        self.version = -1
        """-1: not in service (no weights yet, or lost)."""
        self.room = 0
        """Requests it takes at once: its slots and a few more, so that a freed slot never waits for a round trip."""
        self.requests = 0
        self.outstanding_tokens = 0
        self.tokens_generated = 0
        self.exact = False

    def takes(self, request: Generate) -> bool:
        if self.version < 0 or self.requests >= self.room or self.version < request.min_version:
            return False
        return request.pin_version is None or request.pin_version == self.version


class ProxyRole:
    """Routes each request alone to the engine with the least outstanding work."""

    def __init__(
        self, *, engines: Mapping[str, Client], rollout: RolloutSection, network: NetworkSection, clock: Clock
    ) -> None:
        self._engines = [EngineEnd(name, client) for name, client in engines.items()]
        self._rollout = rollout
        self._network = network
        self._clock = clock
        self._changed = asyncio.Condition()
        self._weights: Update | None = None
        self._suspended = False
        self._sessions: OrderedDict[str, EngineEnd] = OrderedDict()
        self._queued: set[str] = set()
        self._running: dict[str, EngineEnd] = {}
        self._aborted: set[str] = set()
        self._revivals: dict[str, asyncio.Task[None]] = {}
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def start(self) -> None:
        """Returns when every engine has answered; raises DeadlineError naming those that have not."""
        async with asyncio.TaskGroup() as group:
            for engine in self._engines:
                group.create_task(self._greet(engine))

    async def handle(self, message: Message, peer: Peer, emit: Emit) -> Message:
        match message:
            case Generate():
                return await self._generate(message, emit)
            case Abort():
                self._aborted |= (self._queued | self._running.keys()) & set(message.requests)
                await self._notify()
                await self._abort(message.requests)
                return Ack()
            case Suspend() | Resume():
                self._suspended = isinstance(message, Suspend)
                await self._broadcast(message)
                await self._notify()
                return Ack()
            case Update():
                return await self._update(message)
            case EngineStatusRequest():
                return await self._status()
            case _:
                raise ContractError(f"proxy: unexpected {type(message).__name__} from {peer}")

    def peer_lost(self, peer: Peer) -> None:
        """An env died: the transport has cancelled its handlers, which aborts its requests at the engines."""

    def describe(self) -> str:
        engines = ", ".join(
            f"{e.name} {'out of service' if e.version < 0 else f'serves version {e.version}'}, {e.requests} requests"
            for e in self._engines
        )
        return f"proxy: {'suspended, ' if self._suspended else ''}{len(self._queued)} requests wait; {engines}"

    async def close(self) -> None:
        for task in self._revivals.values():
            task.cancel()
        await asyncio.gather(*self._revivals.values(), return_exceptions=True)

    # ---- ADD

    async def _generate(self, request: Generate, emit: Emit) -> GenerateReply:
        try:
            return await self._answer(request, emit)
        finally:
            self._aborted.discard(request.request)

    async def _answer(self, request: Generate, emit: Emit) -> GenerateReply:
        """Streams the answer; what a dead engine had streamed is kept and another goes on from there."""
        for _ in range(MAX_DISPATCHES):
            engine = await self._reserve(request, emit)
            if engine is None:
                return _nothing("aborted")
            work = len(request.prompt_ids) + request.max_new_tokens
            self._running[request.request] = engine
            try:
                parts = engine.client.stream(request, GenerateReply, idle_deadline_s=self._rollout.turn_deadline_s)
                async for part in parts:
                    engine.tokens_generated += len(part.token_ids)
                    if part.finish_reason:
                        return part
                    await emit(part)
                    request = _continued(request, part)
            except PeerLost:
                self._lost(engine)
            except RemoteError as error:
                if error.kind != NotServing.__name__:
                    raise
                self._lost(engine)
            finally:
                del self._running[request.request]
                engine.outstanding_tokens -= work
                engine.requests -= 1
                await self._notify()
        raise BudgetError(f"request {request.request}: {MAX_DISPATCHES} engines were lost under it")

    async def _reserve(self, request: Generate, emit: Emit) -> EngineEnd | None:
        """A place on an engine; None when the request was aborted while it waited, or can never be served.

        While it waits it says so every `long_poll_s`, for the caller's deadlines are for work, not for the queue.
        """
        self._queued.add(request.request)
        try:
            since = self._clock.now()
            while not await self._settled(request):
                now = self._clock.now()
                await emit(_nothing("", waited_s=now - since))
                since = now
            engine = None if self._hopeless(request) else self._choose(request)
            if engine is not None:
                engine.requests += 1
                engine.outstanding_tokens += len(request.prompt_ids) + request.max_new_tokens
                self._remember(request.session, engine)
            return engine
        finally:
            self._queued.discard(request.request)

    async def _settled(self, request: Generate) -> bool:
        """True as soon as the request has an engine, or never will; False after `long_poll_s`."""
        try:
            async with asyncio.timeout(self._network.long_poll_s), self._changed:
                await self._changed.wait_for(lambda: self._hopeless(request) or self._choose(request) is not None)
        except TimeoutError:
            return False
        return True

    def _hopeless(self, request: Generate) -> bool:
        """Aborted, or pinned to a version that has gone: versions do not come back."""
        gone = request.pin_version is not None and self._newest > request.pin_version
        return gone or request.request in self._aborted

    @property
    def _newest(self) -> int:
        return self._weights.weights.version if self._weights is not None else -1

    def _remember(self, session: str, engine: EngineEnd) -> None:
        self._sessions[session] = engine
        self._sessions.move_to_end(session)
        if len(self._sessions) > MAX_SESSIONS:
            self._sessions.popitem(last=False)

    def _choose(self, request: Generate) -> EngineEnd | None:
        if self._suspended:
            return None
        willing = [engine for engine in self._engines if engine.takes(request)]
        home = self._sessions.get(request.session)
        if home in willing:
            return home
        return min(willing, key=lambda engine: (engine.outstanding_tokens, engine.name), default=None)

    # ---- UPDATE

    async def _update(self, update: Update) -> Serving:
        """Serving once all engines in service have swapped; those that fail are evicted and catch up behind."""
        self._weights = update
        asked = [engine for engine in self._engines if engine.name not in self._revivals]
        await asyncio.gather(*(self._load(engine, update) for engine in asked))
        await self._notify()
        try:
            async with asyncio.timeout(self._network.startup_deadline_s), self._changed:
                await self._changed.wait_for(lambda: self._serving(update))
        except TimeoutError:
            raise DeadlineError(
                f"UPDATE to version {update.weights.version}: no engine took it within weights.deadline_s "
                f"{update.deadline_s} s, and none came back within network.startup_deadline_s; "
                f"asked: {', '.join(engine.name for engine in self._engines)}"
            ) from None
        serving = self._serving(update)
        return Serving(version=update.weights.version, engines=[engine.name for engine in serving])

    def _serving(self, update: Update) -> list[EngineEnd]:
        return [engine for engine in self._engines if engine.version == update.weights.version]

    async def _load(self, engine: EngineEnd, update: Update) -> None:
        try:
            reply = await engine.client.call(update, Serving, deadline_s=update.deadline_s)
            engine.version = reply.version
        except RemoteError as error:
            if error.kind == "WeightsError":
                raise ContractError(f"{engine.name} refuses version {update.weights.version}: {error}") from error
            self._lost(engine)
        except TransportError:
            self._lost(engine)

    # ---- engines that come and go

    async def _greet(self, engine: EngineEnd) -> None:
        status = await engine.client.call(
            EngineStatusRequest(), EngineStatus, deadline_s=self._network.startup_deadline_s
        )
        engine.room = status.slots + max(8, status.slots // 4)
        engine.exact = status.exact
        engine.version = status.version

    def _lost(self, engine: EngineEnd) -> None:
        """Out of service until it answers again and holds the newest weights."""
        engine.version = -1
        if engine.name not in self._revivals:
            task = asyncio.create_task(self._revive(engine))
            self._revivals[engine.name] = task
            task.add_done_callback(lambda done: self._revived(engine, done))

    async def _revive(self, engine: EngineEnd) -> None:
        await self._greet(engine)
        update = self._weights
        while update is not None and engine.version < update.weights.version:
            engine.version = -1
            try:
                engine.version = (await engine.client.call(update, Serving, deadline_s=update.deadline_s)).version
            except RemoteError as error:
                if error.kind != WeightsError.__name__:
                    raise
                break  # that copy is gone (its trainer was started again): the next UPDATE brings a new one
            update = self._weights
        del self._revivals[engine.name]  # before anyone is told, so that its next loss starts a revival again
        await self._notify()

    def _revived(self, engine: EngineEnd, done: asyncio.Task[None]) -> None:
        if not done.cancelled() and done.exception() is not None and not self.failed.done():
            self.failed.set_exception(BudgetError(f"{engine.name} did not come back: {done.exception()}"))

    async def _abort(self, requests: list[str]) -> None:
        """At the engines that decode them. One that is lost has dropped them."""
        by_engine: dict[EngineEnd, list[str]] = {}
        for name in requests:
            if (engine := self._running.get(name)) is not None:
                by_engine.setdefault(engine, []).append(name)
        deadline_s = self._network.call_deadline_s
        calls = [e.client.call(Abort(requests=names), Ack, deadline_s=deadline_s) for e, names in by_engine.items()]
        for outcome in await asyncio.gather(*calls, return_exceptions=True):
            if isinstance(outcome, BaseException) and not isinstance(outcome, TransportError):
                raise outcome

    async def _broadcast(self, message: Suspend | Resume) -> None:
        deadline_s = self._network.call_deadline_s
        calls = (e.client.call(message, Ack, deadline_s=deadline_s) for e in self._engines if e.version >= 0)
        await asyncio.gather(*calls)

    async def _status(self) -> EngineStatus:
        """Sums over the engines; `version` is the lowest in service."""
        versions = [engine.version for engine in self._engines if engine.version >= 0]
        return EngineStatus(
            version=min(versions, default=-1),
            slots=sum(engine.room for engine in self._engines),
            running=sum(engine.requests for engine in self._engines),
            waiting=len(self._queued),
            tokens_generated=sum(engine.tokens_generated for engine in self._engines),
            exact=all(engine.exact for engine in self._engines),
            packages={},
        )

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()


def _continued(request: Generate, part: GenerateReply) -> Generate:
    """The same request for another engine, with what is already sampled."""
    return msgspec.structs.replace(request, generated_ids=np.concatenate([request.generated_ids, part.token_ids]))


def _nothing(finish_reason: Literal["", "aborted"], waited_s: float = 0.0) -> GenerateReply:
    return GenerateReply(
        token_ids=np.zeros(0, np.int32),
        logprobs=np.zeros(0, np.float32),
        versions=np.zeros(0, np.int32),
        finish_reason=finish_reason,
        waited_s=waited_s,
    )

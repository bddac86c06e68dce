"""proxy: the one address for generation; five commands in front of the engines.

    env ==ADD Generate==> PROXY ==> engine-0, engine-1, ...       controller --UPDATE, SUSPEND, RESUME--> PROXY

waits for: an engine that has room and serves `min_version`.
unblocked by: a request that ends, an UPDATE, an engine that comes back.
never: stamps a version, touches a token, blocks one request behind another, drops a request because an engine died.
"""

import asyncio
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
from flashflow.roles.queueing import Queue, Ticket
from flashflow.roles.routing import EngineEnd, Router, work
from flashflow.transport.channel import Client, Emit, Peer

MAX_DISPATCHES = 4
"""Engines one request may die under before it fails."""


class ProxyRole:
    """Routes each request alone to the engine with the least outstanding work."""

    def __init__(
        self, *, engines: Mapping[str, Client], rollout: RolloutSection, network: NetworkSection, clock: Clock
    ) -> None:
        self._engines = [EngineEnd(name, client) for name, client in engines.items()]
        self._rollout = rollout
        self._network = network
        self._clock = clock
        self._router = Router(self._engines)
        self._queue = Queue(self._router, self._hopeless)
        self._changed = asyncio.Condition()
        self._weights: Update | None = None
        self._running: dict[str, EngineEnd] = {}
        self._aborted: set[str] = set()
        self._revivals: dict[str, asyncio.Task[None]] = {}
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def start(self) -> None:
        """Returns when every engine has answered; raises DeadlineError naming those that have not."""
        async with asyncio.TaskGroup() as group:
            for engine in self._engines:
                group.create_task(self._greet(engine))
        await self._notify()

    async def handle(self, message: Message, peer: Peer, emit: Emit) -> Message:
        match message:
            case Generate():
                return await self._generate(message, emit)
            case Abort():
                await self._abort(message.requests)
                return Ack()
            case Suspend() | Resume():
                self._queue.stopped = isinstance(message, Suspend)
                await self._tell({engine: message for engine in self._engines if engine.version >= 0})
                self._queue.dispatch()
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
        return f"proxy: {'suspended, ' if self._queue.stopped else ''}{len(self._queue)} requests wait; {engines}"

    async def close(self) -> None:
        for task in self._revivals.values():
            task.cancel()
        await asyncio.gather(*self._revivals.values(), return_exceptions=True)

    # ---- ADD

    async def _generate(self, request: Generate, emit: Emit) -> GenerateReply:
        name = request.request
        if name in self._queue or name in self._running:
            raise ContractError(f"proxy: request {name} is already being answered")
        last = None
        try:
            last = await self._answer(request, emit)
            return last
        finally:
            self._aborted.discard(name)
            if last is None or last.finish_reason == "aborted":
                self._router.forget(request.session)  # no turn follows

    async def _answer(self, request: Generate, emit: Emit) -> GenerateReply:
        """Streams the answer; what a dead engine had streamed is kept and another goes on from there."""
        for _ in range(MAX_DISPATCHES):
            engine, waited_s = await self._reserve(request, emit)
            if engine is None:
                return _nothing("aborted")
            reserved, num_waiting = work(request), None
            self._running[request.request] = engine
            version = engine.version
            try:
                parts = engine.client.stream(request, GenerateReply, idle_deadline_s=self._rollout.turn_deadline_s)
                async for part in parts:
                    if waited_s:
                        part, waited_s = msgspec.structs.replace(part, waited_s=part.waited_s + waited_s), 0.0
                    engine.tokens_generated += len(part.token_ids)
                    if part.finish_reason:
                        num_waiting = part.num_waiting
                        return part
                    await emit(part)
                    request = _continued(request, part)
            except PeerLost:
                self._lost(engine)
            except RemoteError as error:
                if error.kind != NotServing.__name__:
                    raise
                # Overtaken by an UPDATE the engine is as it should be; otherwise it was started again.
                if engine.version == version and not self._hopeless(request):
                    self._lost(engine)
            finally:
                del self._running[request.request]
                self._router.release(engine, reserved, num_waiting)
                self._queue.dispatch()
        raise BudgetError(f"request {request.request}: {MAX_DISPATCHES} engines were lost under it")

    async def _reserve(self, request: Generate, emit: Emit) -> tuple[EngineEnd | None, float]:
        """A place on an engine, and the seconds waited that the caller has not been told of; None when the request was
        aborted while it waited, or can never be served.

        While it waits it says so every `long_poll_s` and twice a `turn_deadline_s`, for the caller's deadlines are for
        work, not for the queue. Nor does a block wait longer than that for its last members, which may have died.
        """
        if self._hopeless(request):
            return None, 0.0
        ticket = self._queue.join(request)
        taken = False
        try:
            since = self._clock.now()
            while not ticket.engine.done() and not await self._given(ticket):
                self._queue.close(ticket)
                now = self._clock.now()
                await emit(_nothing("", waited_s=now - since))
                since = now
            taken = True
            return ticket.engine.result(), self._clock.now() - since
        finally:
            self._queue.leave(ticket)
            if not taken and ticket.engine.done() and (engine := ticket.engine.result()) is not None:
                self._router.release(engine, work(request))
            ticket.engine.cancel()
            self._queue.dispatch()

    async def _given(self, ticket: Ticket) -> bool:
        """Whether it has its answer before the caller is to be told that it waits."""
        timeout_s = min(self._network.long_poll_s, self._rollout.turn_deadline_s / 2)
        return bool((await asyncio.wait({ticket.engine}, timeout=timeout_s))[0])

    def _hopeless(self, request: Generate) -> bool:
        """Aborted, or pinned to a version that has gone: versions do not come back."""
        gone = request.pin_version is not None and self._newest > request.pin_version
        return gone or request.request in self._aborted

    @property
    def _newest(self) -> int:
        return self._weights.weights.version if self._weights is not None else -1

    # ---- UPDATE

    async def _update(self, update: Update) -> Serving:
        """Serving once all engines in service have swapped; those that fail are evicted and catch up behind."""
        self._weights = update
        self._queue.drop_hopeless()
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
            self._router.changed(engine)
            self._queue.dispatch()
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
        engine.greet(status.slots)
        engine.exact = status.exact
        engine.version = status.version

    def _lost(self, engine: EngineEnd) -> None:
        """Out of service until it answers again and holds the newest weights."""
        engine.version = -1
        self._router.changed(engine)
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
            self._queue.abort(name)
            if (engine := self._running.get(name)) is not None:
                self._aborted.add(name)
                by_engine.setdefault(engine, []).append(name)
        await self._tell({engine: Abort(requests=names) for engine, names in by_engine.items()})

    async def _tell(self, orders: Mapping[EngineEnd, Abort | Suspend | Resume]) -> None:
        """One that cannot be told is out of service."""
        deadline_s = self._network.call_deadline_s
        calls = [engine.client.call(order, Ack, deadline_s=deadline_s) for engine, order in orders.items()]
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
        for engine, outcome in zip(orders, outcomes, strict=True):
            if isinstance(outcome, PeerLost | DeadlineError):
                self._lost(engine)
            elif isinstance(outcome, BaseException):
                raise outcome

    async def _status(self) -> EngineStatus:
        """Sums over the engines; `version` is the lowest in service."""
        versions = [engine.version for engine in self._engines if engine.version >= 0]
        return EngineStatus(
            version=min(versions, default=-1),
            slots=sum(engine.room for engine in self._engines),
            running=sum(engine.requests for engine in self._engines),
            waiting=len(self._queue),
            tokens_generated=sum(engine.tokens_generated for engine in self._engines),
            exact=all(engine.exact for engine in self._engines),
            packages={},
        )

    async def _notify(self) -> None:
        """An engine came, or serves something else."""
        for engine in self._engines:
            self._router.changed(engine)
        self._queue.dispatch()
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

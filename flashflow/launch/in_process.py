"""The identical roles in one process, over in-process queues: for the debugger, fast tests and the simulator."""

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Protocol

from flashflow.clock import Clock, LoopClock
from flashflow.config.sections import Config
from flashflow.errors import first_cause
from flashflow.journal import OpenJournal, open_journal
from flashflow.launch import build
from flashflow.launch.events import RunEvents
from flashflow.launch.supervise import Display
from flashflow.roles.controller import Events, Outcome, TrainerLink
from flashflow.simulate.spans import Spans
from flashflow.transport.channel import Peer
from flashflow.transport.in_process import InProcessNetwork, InProcessTransport
from flashflow.transport.in_process_server import Delay


def run_in_process(config: Config, display: Display, *, resume: bool) -> int:
    """Runs to the end on the machine's clock; raises what a role raises.

    The exit code: 0 done, 128 + n ended by signal n, with a checkpoint.
    """
    received: list[int] = []

    def stop_on_signals(stop: Callable[[], None]) -> None:
        def on_signal(number: int) -> None:
            received.append(number)
            stop()

        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, on_signal, number)

    try:
        asyncio.run(ring(config, display, resume=resume, clock=LoopClock(), on_stoppable=stop_on_signals))
    except BaseExceptionGroup as group:
        raise first_cause(group) from group
    return 128 + received[0] if received else 0


async def ring(
    config: Config,
    display: Display,
    *,
    resume: bool,
    clock: Clock,
    delay: Delay | None = None,
    on_stoppable: Callable[[Callable[[], None]], None] = lambda _: None,
) -> Outcome:
    """All roles as tasks of the running loop. Nothing computes in a thread, so a debugger sees one stack.

    delay: seconds added to a message. on_stoppable: gets the function that ends the run in order.
    """
    events = RunEvents(
        config.run_folder,
        on_step=display.update,
        on_evaluation=lambda reply: display.evaluation(reply.version, reply.accuracy),
        on_note=display.note,
    )
    try:
        surroundings = Surroundings(events, InProcessNetwork(config.network, delay=delay))
        with build.local_process_group(config):
            return await play(config, surroundings, resume=resume, clock=clock, on_stoppable=on_stoppable)
    finally:
        events.close()


def make_trainer(config: Config, transport: InProcessTransport, clock: Clock) -> "LocalTrainer":
    return build.trainer(config, 0, transport, f"local{os.getpid()}", None, clock)


class LocalTrainer(TrainerLink, Protocol):
    async def close(self) -> None: ...


@dataclass(frozen=True)
class Surroundings:
    """What lies around the roles: where they report to, what carries their messages, what keeps them."""

    events: Events
    network: InProcessNetwork
    open_journal: OpenJournal = open_journal
    make_trainer: Callable[[Config, InProcessTransport, Clock], LocalTrainer] = make_trainer
    spans: Spans | None = None
    """Hears of the time of simulated parts."""
    on_end: Callable[[], None] = lambda: None
    """Called when the run has ended, before what still goes on is cancelled, in no order to speak of."""


async def play(
    config: Config,
    around: Surroundings,
    *,
    resume: bool,
    clock: Clock,
    on_stoppable: Callable[[Callable[[], None]], None] = lambda _: None,
) -> Outcome:
    """The roles, from their start to the end of the run."""
    network = around.network

    def transport(role: str, index: int) -> InProcessTransport:
        return network.transport(Peer(role, index, 1))

    background: list[asyncio.Task[Any]] = []
    closers: list[Callable[[], Awaitable[None]]] = []

    async def serve(role: str, index: int, it: Any) -> None:
        end = transport(role, index)
        await end.listen(it.handle, it.peer_lost)
        background.append(asyncio.ensure_future(end.failed))
        closers.append(end.close)

    def spawn(work: Any) -> None:
        background.append(asyncio.ensure_future(work))

    try:
        buffer = build.buffer(config, clock, around.open_journal)
        await buffer.start()
        closers.append(buffer.close)
        await serve("buffer", 0, buffer)
        for index in range(config.placement.reward):
            reward = build.reward(config, workers=False)
            closers.append(reward.close)
            await serve("reward", index, reward)
        for index in range(config.placement.engine):
            engine = build.engine(config, index, clock, None, spans=around.spans)
            await serve("engine", index, engine)
            spawn(engine.run())
        proxy = build.proxy(config, transport("proxy", 0), clock)
        await proxy.start()
        closers.append(proxy.close)
        await serve("proxy", 0, proxy)
        spawn(proxy.failed)
        for index in range(config.placement.env):
            spawn(build.env(config, index, transport("env", index), clock, spans=around.spans).run())
        trainer = around.make_trainer(config, transport("trainer", 0), clock)
        closers.append(trainer.close)
        link = transport("controller", 0)
        controller = build.controller(config, link, trainer, around.events, clock, resume=resume)
        on_stoppable(controller.stop)
        return await _first_of(controller.run(), background)
    finally:
        around.on_end()
        for task in background:
            task.cancel()
        await asyncio.gather(*background, return_exceptions=True)
        for close in reversed(closers):
            await close()


async def _first_of(run: Awaitable[Outcome], background: list[asyncio.Task[Any]]) -> Outcome:
    """The run's outcome; the exception of a background task that fails before."""
    main = asyncio.ensure_future(run)
    pending: set[asyncio.Future[Any]] = {main, *background}
    try:
        while not main.done():
            done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            for task in done - {main}:
                task.result()
        return main.result()
    finally:
        main.cancel()

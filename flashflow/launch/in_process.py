"""The identical roles in one process, over in-process queues: for the debugger, fast tests and the simulator."""

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable
from typing import Any

from flashflow.clock import Clock, LoopClock
from flashflow.config.sections import Config
from flashflow.errors import first_cause
from flashflow.launch import build
from flashflow.launch.events import RunEvents
from flashflow.launch.supervise import Display
from flashflow.roles.controller import Outcome
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
    run_id = f"local{os.getpid()}"
    network = InProcessNetwork(config.network, delay=delay)

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

    events = RunEvents(
        config.run_folder,
        on_step=display.update,
        on_evaluation=lambda reply: display.evaluation(reply.version, reply.accuracy),
        on_note=display.note,
    )
    closers.append(_closing(events.close))
    try:
        buffer = build.buffer(config, clock)
        await buffer.start()
        closers.append(buffer.close)
        await serve("buffer", 0, buffer)
        for index in range(config.placement.reward):
            reward = build.reward(config, workers=False)
            closers.append(reward.close)
            await serve("reward", index, reward)
        for index in range(config.placement.engine):
            engine = build.engine(config, index, clock, None)
            await serve("engine", index, engine)
            spawn(engine.run())
        proxy = build.proxy(config, transport("proxy", 0), clock)
        await proxy.start()
        closers.append(proxy.close)
        await serve("proxy", 0, proxy)
        spawn(proxy.failed)
        for index in range(config.placement.env):
            spawn(build.env(config, index, transport("env", index), clock).run())
        with build.local_process_group(config):
            trainer = build.trainer(config, 0, transport("trainer", 0), run_id, None, clock)
            closers.append(trainer.close)
            controller = build.controller(config, transport("controller", 0), trainer, events, clock, resume=resume)
            on_stoppable(controller.stop)
            return await _first_of(controller.run(), background)
    finally:
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


def _closing(close: Callable[[], None]) -> Callable[[], Awaitable[None]]:
    async def wrapped() -> None:
        close()

    return wrapped

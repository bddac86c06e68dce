"""One role process: `python -m flashflow.launch.role SPEC`, started by a supervisor, never by hand.

waits for: its supervisor's address book and Stop.
unblocked by: the link; its end means the supervisor is dead, and the process leaves at once.
never: outlives its supervisor, fails without saying so on the link.
"""

import asyncio
import ctypes
import faulthandler
import gc
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import msgspec

from flashflow.clock import LoopClock
from flashflow.config import Config, stored_config
from flashflow.errors import ConfigError, DeadlineError, FlashflowError, PeerLost, first_cause
from flashflow.launch import build
from flashflow.launch.kinship import die_with
from flashflow.launch.link import (
    AddressBook,
    Describe,
    Described,
    EvaluationDone,
    Failed,
    Finished,
    Link,
    Listening,
    Meeting,
    Note,
    Reached,
    Ready,
    RoleSpec,
    StepDone,
    Stop,
)
from flashflow.launch.startup import Milestone
from flashflow.topology import GANG
from flashflow.transport.addresses import Address, Addresses
from flashflow.transport.channel import Peer
from flashflow.transport.security import load_run_key
from flashflow.transport.zeromq import ZmqTransport

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

PR_SET_NAME = 15


class RoleProcess:
    def __init__(self, spec: RoleSpec, config: Config, link: Link) -> None:
        self.spec = spec
        self.config = config
        self.link = link
        self.stop = asyncio.Event()
        self.meeting: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        """Endpoint at which this generation of the gang meets."""
        self.addresses = Addresses()
        self.clock = LoopClock()
        self.describe: Callable[[], str] = lambda: f"{spec.name}: is starting"
        self._reached: set[Milestone] = set()
        generation = spec.generation if spec.role in GANG else 0
        self.transport = ZmqTransport(
            Peer(spec.role, spec.index, spec.incarnation, generation),
            spec.run_id,
            self.addresses,
            config.network,
            None if spec.key is None else load_run_key(Path(spec.key)),
            on_connected=partial(self.reach, "connected"),
        )

    def reach(self, milestone: Milestone, at: float | None = None) -> None:
        """The first time it is told, the supervisor is; `at` is now unless given."""
        if milestone not in self._reached:
            self._reached.add(milestone)
            if milestone == "ready":
                gc.freeze()  # modules and models stay: the collector need not look at them again
            self.link.send(Reached(milestone=milestone, at=time.monotonic() if at is None else at))

    async def run(self) -> None:
        """Until stopped, or the work of the role is done."""
        reading = asyncio.create_task(self._read_link())
        work = asyncio.create_task(getattr(self, f"_{self.spec.role}")())
        failed = asyncio.ensure_future(self.transport.failed)
        try:
            await asyncio.wait({reading, work, failed}, return_when=asyncio.FIRST_COMPLETED)
            for task in (work, failed, reading):
                if task.done():
                    task.result()
        finally:
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)
            await self.transport.close()
            reading.cancel()

    async def _read_link(self) -> None:
        async for message in self.link.messages():
            match message:
                case AddressBook():
                    self.addresses.update(
                        {name: Address(p.data, p.control, p.incarnation) for name, p in message.places.items()}
                    )
                case Meeting(generation=generation, endpoint=endpoint):
                    if generation == self.spec.generation and not self.meeting.done():
                        self.meeting.set_result(endpoint)
                case Stop():
                    self.stop.set()
                case Describe():
                    self.link.send(Described(text=self.describe()))
        os._exit(1)  # the supervisor is gone: nobody is left to end in order for

    def _listening(self) -> None:
        self.reach("ready")
        address = self.transport.address
        self.link.send(Listening(data=address.data, control=address.control))

    def _ready(self) -> None:
        self.reach("ready")
        self.link.send(Ready())

    async def _serve(self, role: Any, *background: Any) -> None:
        """Serve calls until stopped; a background task that ends is an error."""
        self.describe = role.describe
        await self.transport.listen(role.handle, role.peer_lost)
        self._listening()
        stop = asyncio.create_task(self.stop.wait())
        tasks = [asyncio.ensure_future(task) for task in background]
        done, _ = await asyncio.wait({stop, *tasks}, return_when=asyncio.FIRST_COMPLETED)
        stop.cancel()
        for task in tasks:
            task.cancel()
        for task in done - {stop}:
            task.result()
            raise RuntimeError(f"{self.spec.name}: a background task ended")

    async def _buffer(self) -> None:
        buffer = build.buffer(self.config, self.clock)
        self.reach("built")
        await buffer.start()
        try:
            await self._serve(buffer)
        finally:
            await buffer.close()

    async def _reward(self) -> None:
        reward = build.reward(self.config, workers=True)
        self.reach("built")
        try:
            await reward.start()
            await self._serve(reward)
        finally:
            await reward.close()

    async def _proxy(self) -> None:
        proxy = build.proxy(self.config, self.transport, self.clock)
        self.reach("built")
        try:
            await proxy.start()
            await self._serve(proxy, proxy.failed)
        finally:
            await proxy.close()

    async def _engine(self) -> None:
        with ThreadPoolExecutor(1, "engine") as executor:
            engine = build.engine(self.config, self.spec.index, self.clock, executor, reach=self.reach)
            self.reach("built")
            await self._serve(engine, engine.run())

    async def _env(self) -> None:
        env = build.env(self.config, self.spec.index, self.transport, self.clock, reach=self.reach)
        self.reach("built")
        self.describe = env.describe
        self._ready()
        await self._until_stopped(env.run())

    async def _trainer(self) -> None:
        from flashflow.transport import rpc

        meeting = await asyncio.to_thread(rpc.enter_meeting, await self._endpoint(), deadline_s=self._startup_s)
        await asyncio.to_thread(self._join_gang, meeting, rank=1 + self.spec.index)
        if not self.config.simulated:
            self._join_ranks(meeting)
        with ThreadPoolExecutor(1, "trainer") as executor:
            trainer = build.trainer(
                self.config, self.spec.index, self.transport, self.spec.run_id, executor, self.clock
            )
            self.reach("built")
            self.describe = trainer.describe
            rpc.serve(asyncio.get_running_loop(), trainer.answer)
            self._ready()
            await self.stop.wait()
            await trainer.close()

    async def _controller(self) -> None:
        from flashflow.launch.events import RunEvents
        from flashflow.transport import rpc

        meeting, endpoint = rpc.host_meeting(self.spec.interface, deadline_s=self._startup_s)
        self.link.send(Meeting(generation=self.spec.generation, endpoint=endpoint))
        await asyncio.to_thread(self._join_gang, meeting, rank=0)
        events = RunEvents(
            self.config.run_folder,
            on_step=lambda record: self.link.send(StepDone(record=record)),
            on_evaluation=lambda reply: self.link.send(
                EvaluationDone(version=reply.version, accuracy=reply.accuracy, seconds=reply.seconds)
            ),
            on_note=lambda text: self.link.send(Note(text=text)),
        )
        link = rpc.RpcTrainerLink(
            num_ranks=self.config.placement.trainer, deadline_s=self.config.network.train_step_deadline_s
        )
        controller = build.controller(self.config, self.transport, link, events, self.clock, resume=self.spec.resume)
        self.reach("built")
        self.describe = controller.describe
        self._ready()
        stopping = asyncio.create_task(self._forward_stop(controller.stop))
        try:
            outcome = await controller.run()
        finally:
            stopping.cancel()
            events.close()
        self.link.send(Finished(step=outcome.step, reason=outcome.reason))

    async def _forward_stop(self, stop: Any) -> None:
        await self.stop.wait()
        stop()

    async def _until_stopped(self, work: Any) -> None:
        task, stop = asyncio.create_task(work), asyncio.create_task(self.stop.wait())
        await asyncio.wait({task, stop}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            task.result()
            await stop
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    @property
    def _startup_s(self) -> float:
        return self.config.network.startup_deadline_s

    async def _endpoint(self) -> str:
        """Where this generation's members meet; a new generation is a new world."""
        try:
            async with asyncio.timeout(self._startup_s):
                return await self.meeting
        except TimeoutError as error:
            raise DeadlineError(
                f"the controller of generation {self.spec.generation} did not say where to meet within "
                f"network.startup_deadline_s = {self._startup_s} s"
            ) from error

    def _join_ranks(self, meeting: "Store") -> None:
        """The trainer ranks' collectives."""
        from flashflow.models import resolve_device
        from flashflow.transport import rpc

        rpc.init_process_group(
            resolve_device(self.config.model.device).type,
            rank=self.spec.index,
            world_size=self.config.placement.trainer,
            meeting=meeting,
            deadline_s=self.config.network.train_step_deadline_s,
        )

    def _join_gang(self, meeting: "Store", rank: int) -> None:
        from flashflow.transport import rpc

        world_size = 1 + self.config.placement.trainer
        rpc.join(self.spec.name, rank=rank, world_size=world_size, meeting=meeting, deadline_s=self._startup_s)


def placed(config: Config, spec: RoleSpec) -> Config:
    """The config with what this host and this placement make of it."""
    return config.model_copy(
        update={
            "network": config.network.model_copy(update={"interface": spec.interface}),
            "weights": config.weights.model_copy(update={"carrier": spec.carrier}),
        }
    )


def name_process(name: str) -> None:
    """As `ps` and `top` show it."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_NAME, name.encode())


def bind_gang(interface: str) -> None:
    """Have TensorPipe, Gloo and NCCL, which do not authenticate, listen on `network.interface` only.

    Raises ConfigError when no interface of this host has that address.
    """
    import psutil

    for name, addresses in psutil.net_if_addrs().items():
        if any(address.address == interface for address in addresses):
            for variable in ("TP_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
                os.environ.setdefault(variable, name)
            return
    raise ConfigError([f"network.interface: {interface} is no address of an interface of this host"])


async def _run(spec: RoleSpec, imported: float) -> int:
    """imported: when the modules above were, in seconds of time.monotonic()."""
    link = await Link.over(socket.socket(fileno=spec.link_fd))
    try:
        config = placed(stored_config(Path(spec.config)), spec)
        configured = time.monotonic()
        if spec.role in GANG:
            bind_gang(config.network.interface)
        process = RoleProcess(spec, config, link)
        process.reach("imported", imported)
        process.reach("configured", configured)
        await process.run()
        code = 0
    except Exception as error:
        cause = first_cause(error)
        trace = "".join(traceback.format_exception(cause))
        print(trace, file=sys.stderr, flush=True)
        # What is raised on purpose explains itself; its own traceback stays in the log.
        text = str(cause) if isinstance(cause, FlashflowError) else trace
        link.send(Failed(kind=type(cause).__name__, text=text, transient=isinstance(cause, DeadlineError | PeerLost)))
        code = 1
    await link.flush()
    link.close()
    return code


def run(spec: RoleSpec) -> NoReturn:
    """This process is the role from now on."""
    imported = time.monotonic()
    die_with(spec.supervisor_pid)
    name_process(spec.name)
    # Slurm and terminals signal everybody: only the supervisor is to act on it. What this process starts is free to.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    if spec.cpus is not None:
        os.sched_setaffinity(0, spec.cpus)
    code = asyncio.run(_run(spec, imported))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # a TensorPipe world with a dead member can hang the interpreter's own exit


if __name__ == "__main__":
    run(msgspec.json.decode(sys.argv[1], type=RoleSpec))

"""A process that imports torch and transformers once and forks the roles that need them: engine, trainer, controller.

    SUPERVISOR --RoleSpec, link, log--> NURSERY --fork--> role process, a child of the supervisor

waits for: orders on its socket.
unblocked by: the supervisor; the end of the socket means that it is gone.
never: computes, starts a thread (a fork would lose it; with one it forks nothing), stays a parent: the nursery forks
twice, and the supervisor adopts the orphan, so that it learns of the exit itself and its death ends the role.
"""

import asyncio
import contextlib
import gc
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import msgspec

from flashflow.config.sections import Config
from flashflow.launch import kinship
from flashflow.launch.link import RoleSpec
from flashflow.launch.plan import thread_variables

FORKED_ROLES = ("engine", "trainer", "controller")
ORDER_MAX_BYTES = 1 << 16
GPU_DRIVER = Path("/dev/nvidiactl")


@contextlib.contextmanager
def opened(config: Config) -> Iterator["Nursery | None"]:
    """None where nothing is gained (one process, simulated parts), and beside a GPU, whose driver does not survive a
    fork once an import has touched it."""
    device, one_process = config.model.device, config.run.runtime == "in_process"
    if one_process or config.simulated or device == "cuda" or (device == "auto" and GPU_DRIVER.exists()):
        yield None
        return
    nursery = Nursery.start(config.placement.threads)
    try:
        yield nursery
    finally:
        nursery.close()


class Order(msgspec.Struct, frozen=True):
    """Fork this role; the descriptors of its link and of its log come with it."""

    spec: RoleSpec
    env: dict[str, str]


class Nursery:
    """The supervisor's end."""

    def __init__(self, process: "subprocess.Popen[bytes]", end: socket.socket) -> None:
        self.started = time.monotonic()
        self._process = process
        self._end = end
        self._turn = asyncio.Lock()

    @classmethod
    def start(cls, threads: int) -> "Nursery":
        """It begins to import at once. threads: of OpenMP, in what it forks."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-m", "flashflow.launch.nursery", str(theirs.fileno()), str(os.getpid())],
                pass_fds=[theirs.fileno()],
                # An OpenBLAS of several threads would start them when numpy is imported.
                env={**kinship.scrubbed(os.environ), **thread_variables(threads), "OPENBLAS_NUM_THREADS": "1"},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                start_new_session=True,
            )
        ours.setblocking(False)
        return cls(process, ours)

    async def fork(self, spec: RoleSpec, env: dict[str, str], link: socket.socket, log: IO[bytes]) -> "Forked | None":
        """None when the nursery is gone, or cannot fork: start the role by itself then."""
        order = msgspec.msgpack.encode(Order(spec, env))
        async with self._turn:
            try:
                kinship.adopt_orphans()
                socket.send_fds(self._end, [order], [link.fileno(), log.fileno()])
                answer = await asyncio.get_running_loop().sock_recv(self._end, ORDER_MAX_BYTES)
            except OSError:
                return None
        pid = int.from_bytes(answer)
        return Forked(pid) if pid else None

    @property
    def pid(self) -> int:
        return self._process.pid

    def close(self) -> None:
        self._end.close()
        self._process.kill()
        self._process.wait()


class Forked:
    """A role process that the nursery forked, as asyncio.subprocess.Process would show it."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._ended = asyncio.Event()
        self._descriptor = os.pidfd_open(pid)
        asyncio.get_running_loop().add_reader(self._descriptor, self._reap)

    async def wait(self) -> int:
        await self._ended.wait()
        assert self.returncode is not None
        return self.returncode

    def kill(self) -> None:
        if self.returncode is None:
            os.kill(self.pid, signal.SIGKILL)

    def _reap(self) -> None:
        asyncio.get_running_loop().remove_reader(self._descriptor)
        os.close(self._descriptor)
        self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        self._ended.set()


# ---- the process itself


def serve(end: socket.socket) -> None:
    """Until the other end closes."""
    while True:
        order, descriptors, _, _ = socket.recv_fds(end, ORDER_MAX_BYTES, 2)
        if not order:
            return
        pid = _fork(end, msgspec.msgpack.decode(order, type=Order), *descriptors) if _single_threaded() else 0
        for descriptor in descriptors:
            os.close(descriptor)
        end.send(pid.to_bytes(4))


def _single_threaded() -> bool:
    return len(os.listdir("/proc/self/task")) == 1


def _fork(end: socket.socket, order: Order, link: int, log: int) -> int:
    """The pid of the role process, whose parent is no longer this one; 0 when it could not be forked."""
    reading, writing = os.pipe()
    parent = os.fork()
    if parent == 0:
        parent = os.getpid()
        child = os.fork()
        if child:
            os.write(writing, child.to_bytes(4))
            os._exit(0)
        while os.getppid() == parent:  # adopted at the very end of its exit
            os.sched_yield()
        for descriptor in (reading, writing, end.fileno()):
            os.close(descriptor)
        _become(order, link, log)
    os.close(writing)  # first, or nobody would ever end the pipe of a process that died before it wrote
    os.waitpid(parent, 0)
    child = int.from_bytes(os.read(reading, 4))
    os.close(reading)
    return child


def _become(order: Order, link: int, log: int) -> None:
    """Never returns."""
    from flashflow.launch import role

    os.setsid()
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    os.environ.update(order.env)
    role.run(msgspec.structs.replace(order.spec, link_fd=link))


def main() -> None:
    from flashflow.launch import role

    end = socket.socket(fileno=int(sys.argv[1]))
    kinship.die_with(int(sys.argv[2]))
    role.name_process("nursery")
    for name in ("torch", "transformers.modeling_utils", "transformers.models.auto.modeling_auto"):
        __import__(name)
    gc.freeze()  # the collector leaves the pages alone that all of them share
    with contextlib.suppress(ConnectionError):
        serve(end)


if __name__ == "__main__":
    main()

"""Starts the role processes of one host, watches them, restarts what may restart, and ends them in order.

    SUPERVISOR <==link==> every role process      controller --StepDone, Finished--> SUPERVISOR --> a person's terminal

waits for: news on the links, exits of processes, signals.
unblocked by: each of them; ending has a deadline after which everything is killed.
never: touches a sample; leaves a process or a shared-memory segment behind.
"""

import asyncio
import os
import signal
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Protocol

import msgspec

from flashflow.config.sections import Config
from flashflow.launch.link import (
    AddressBook,
    Describe,
    Described,
    EvaluationDone,
    Failed,
    Finished,
    Link,
    Listening,
    Note,
    Place,
    Reached,
    Ready,
    RoleSpec,
    StepDone,
    Stop,
)
from flashflow.launch.plan import ProcessPlan
from flashflow.launch.startup import StartupLog
from flashflow.topology import GANG
from flashflow.transport.security import create_run_key, is_loopback

EXIT_FAILED = 1
LOG_TAIL_LINES = 15
GANG_SETTLE_S = 1.0
"""A rank's collectives fail within so long of the death of another rank (measured: 0.1 s)."""


class Display(Protocol):
    """Where a person sees the run."""

    def update(self, record: dict[str, object]) -> None: ...

    def evaluation(self, version: int, accuracy: float) -> None: ...

    def note(self, text: str) -> None: ...


class Failure(msgspec.Struct, frozen=True):
    """The first thing that went wrong; the rest follows from it."""

    name: str
    text: str
    log: Path

    def __str__(self) -> str:
        return f"{self.name} failed: {self.text.rstrip()}\n(log: {self.log})"


class RoleHandle:
    """One planned process, through its incarnations."""

    def __init__(self, plan: ProcessPlan, log: Path) -> None:
        self.plan = plan
        self.log = log
        self.incarnation = 0
        self.restarts = 0
        self.process: asyncio.subprocess.Process | None = None
        self.retired: asyncio.subprocess.Process | None = None
        """The incarnation that this supervisor ended itself; its exit is no news."""
        self.link: Link | None = None
        self.place: Place | None = None
        self.started = False
        self.finished = False
        self.failed: Failed | None = None

    @property
    def name(self) -> str:
        return f"{self.plan.role}-{self.plan.index}"

    @property
    def in_gang(self) -> bool:
        return self.plan.role in GANG

    @property
    def alive(self) -> bool:
        return self.process is not None and self.process.returncode is None

    def kill(self) -> None:
        if self.process is not None and self.process.returncode is None:
            self.process.kill()

    def log_tail(self) -> str:
        lines = self.log.read_text(errors="replace").splitlines() if self.log.exists() else []
        return "\n".join(lines[-LOG_TAIL_LINES:])


class Supervisor:
    def __init__(
        self,
        config: Config,
        plans: Sequence[ProcessPlan],
        *,
        run_id: str,
        resume: bool,
        display: Display,
        startup: StartupLog,
    ) -> None:
        self._config = config
        self._run_id = run_id
        self._resume = resume
        self._display = display
        self._startup = startup
        self._logs = config.run_folder / "logs"
        self._handles = [RoleHandle(plan, self._logs / f"{plan.role}-{plan.index}.log") for plan in plans]
        self._generation = 1
        self._key: Path | None = None
        self._ending = asyncio.Event()
        self._news = asyncio.Event()
        self._progress = asyncio.Event()
        self._signal: int | None = None
        self._outcome: Finished | None = None
        self.failure: Failure | None = None
        self._watchers: set[asyncio.Task[None]] = set()

    async def run(self) -> int:
        """The exit code: 0 done, 1 failed, 128 + n ended by signal n."""
        self._logs.mkdir(parents=True, exist_ok=True)
        self._key = _make_key(self._config, self._run_id)
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._on_signal, number)
        try:
            for handle in self._handles:
                await self._start(handle)
            await self._wait_started()
            await self._watch()
        finally:
            await self._end()
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.remove_signal_handler(number)
        if self.failure is not None:
            return EXIT_FAILED
        return 0 if self._signal is None else 128 + self._signal

    @property
    def outcome(self) -> Finished | None:
        """What the controller said at the end; None when it never did."""
        return self._outcome

    # ---- starting

    async def _start(self, handle: RoleHandle) -> None:
        ours, theirs = socket.socketpair()
        with theirs, handle.log.open("ab") as log:
            handle.incarnation += 1
            handle.started, handle.failed, handle.place = False, None, None
            if handle.incarnation == 1:
                self._startup.reached(handle.name, "started", time.monotonic())
            handle.process = await self._spawn(handle, theirs, log)
        handle.link = await Link.over(ours)
        handle.link.send(AddressBook(places=self._places()))
        for watch in (self._read(handle, handle.link), self._reap(handle, handle.process, self._generation)):
            task = asyncio.create_task(watch)
            self._watchers.add(task)
            task.add_done_callback(self._watcher_done)

    async def _spawn(self, handle: RoleHandle, link: socket.socket, log: IO[bytes]) -> asyncio.subprocess.Process:
        plan = handle.plan
        spec = RoleSpec(
            role=plan.role,
            index=plan.index,
            incarnation=handle.incarnation,
            generation=self._generation,
            run_id=self._run_id,
            config=str(self._config.run_folder / "config.yaml"),
            link_fd=link.fileno(),
            supervisor_pid=os.getpid(),
            cpus=list(plan.affinity) if plan.affinity is not None else None,
            resume=self._resume or self._generation > 1,
            key=None if self._key is None else str(self._key),
        )
        command = [plan.python or sys.executable, "-m", "flashflow.launch.role", msgspec.json.encode(spec).decode()]
        return await asyncio.create_subprocess_exec(
            *command,
            pass_fds=[link.fileno()],
            env={**os.environ, **plan.env},
            stdin=asyncio.subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,  # Ctrl-C reaches the supervisor alone, which ends the run in order
        )

    async def _wait_started(self) -> None:
        """Names the roles that are not ready by `startup_deadline_s`."""
        deadline_s = self._config.network.startup_deadline_s
        try:
            async with asyncio.timeout(deadline_s):
                while not self._ending.is_set() and not all(handle.started for handle in self._handles):
                    await self._changed()
        except TimeoutError:
            missing = [handle for handle in self._handles if not handle.started]
            self._fail(
                missing[0],
                f"not ready after {deadline_s:.0f} s (network.startup_deadline_s): "
                f"{', '.join(handle.name for handle in missing)}\n{missing[0].log_tail()}",
            )

    async def _watch(self) -> None:
        """Until the end. When no step is done for `stall_report_s`, asks every role what it waits for and says it."""
        stall_s = self._config.network.stall_report_s
        while not self._ending.is_set():
            self._progress.clear()
            waits = [asyncio.create_task(event.wait()) for event in (self._progress, self._ending)]
            done, pending = await asyncio.wait(waits, timeout=stall_s, return_when=asyncio.FIRST_COMPLETED)
            for wait in pending:
                wait.cancel()
            if done:
                continue
            self._display.note(
                f"no step done for {stall_s:g} s (network.stall_report_s); every role says what it does:"
            )
            for handle in self._handles:
                if handle.alive and handle.link is not None:
                    handle.link.send(Describe())
                else:
                    self._display.note(f"{handle.name}: does not run")

    async def _changed(self) -> None:
        """Returns at the next news of a role, or when the run ends."""
        self._news.clear()
        waits = [asyncio.create_task(event.wait()) for event in (self._news, self._ending)]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()

    # ---- news

    async def _read(self, handle: RoleHandle, link: Link) -> None:
        async for message in link.messages():
            self._news.set()
            match message:
                case Listening():
                    handle.started = True
                    handle.place = Place(message.data, message.control, handle.incarnation)
                    self._tell_places()
                case Ready():
                    handle.started = True
                case Reached():
                    if handle.incarnation == 1:
                        self._startup.reached(handle.name, message.milestone, message.at)
                case StepDone():
                    self._progress.set()
                    self._display.update(message.record)
                case EvaluationDone():
                    self._display.evaluation(message.version, message.accuracy)
                case Note():
                    self._display.note(f"{handle.name}: {message.text}")
                case Described():
                    self._display.note(message.text)
                case Failed():
                    handle.failed = message
                case Finished():
                    handle.finished = True
                    self._outcome = message
                    self._ending.set()
                case _:
                    self._display.note(f"{handle.name}: unexpected {type(message).__name__} on its link")

    async def _reap(self, handle: RoleHandle, process: asyncio.subprocess.Process, generation: int) -> None:
        code = await process.wait()
        await asyncio.sleep(0)  # let what it said last be read first
        if self._ending.is_set() or handle.finished or handle.retired is process:
            return
        if handle.failed is not None and not handle.failed.transient and not await self._follows_a_death(handle):
            self._fail(handle, handle.failed.text)
        elif self._signal is not None:
            self._ending.set()
        elif handle.in_gang:
            await self._restart_gang(handle, code, generation)
        else:
            await self._restart(handle, code)

    async def _follows_a_death(self, handle: RoleHandle) -> bool:
        """Whether a gang member failed only because another was killed: the first cause may be seen second."""
        if not handle.in_gang:
            return False
        others = [other for other in self._handles if other.in_gang and other is not handle]
        waits = [asyncio.create_task(other.process.wait()) for other in others if other.process is not None]
        if waits:
            await asyncio.wait(waits, timeout=GANG_SETTLE_S, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()
        codes = [other.process.returncode for other in others if other.process is not None]
        return any(code is not None and code < 0 for code in codes)

    def _watcher_done(self, task: asyncio.Task[None]) -> None:
        self._watchers.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self._fail(self._handles[0], f"the supervisor itself failed: {task.exception()!r}")

    async def _restart(self, handle: RoleHandle, code: int) -> None:
        if not self._may_restart(handle, code):
            return
        self._display.note(f"{handle.name} {_died(code)}; starting it again ({handle.restarts} of {self._budget})")
        await self._start(handle)

    async def _restart_gang(self, first: RoleHandle, code: int, generation: int) -> None:
        """Controller and trainers live and die together: generation + 1, from the newest complete checkpoint."""
        gang = [handle for handle in self._handles if handle.in_gang]
        if generation != self._generation or not self._may_restart(first, code):
            return  # another member's death has started it again already, or the budget is used up
        self._generation += 1
        self._display.note(
            f"{first.name} {_died(code)}; the gang starts again from the newest checkpoint "
            f"(generation {self._generation})"
        )
        for handle in gang:
            handle.retired = handle.process
            handle.kill()
        for handle in gang:
            if handle.process is not None:
                await handle.process.wait()
        for handle in gang:
            await self._start(handle)

    @property
    def _budget(self) -> int:
        return self._config.placement.max_restarts

    def _may_restart(self, handle: RoleHandle, code: int) -> bool:
        handle.restarts += 1
        if handle.restarts <= self._budget:
            return True
        said = handle.failed.text if handle.failed is not None else handle.log_tail()
        self._fail(handle, f"{_died(code)} {handle.restarts} times (placement.max_restarts: {self._budget})\n{said}")
        return False

    def _fail(self, handle: RoleHandle, text: str) -> None:
        if self.failure is None and not (self._ending.is_set() and self._outcome is not None):
            self.failure = Failure(handle.name, text, handle.log)
        self._ending.set()

    def _places(self) -> dict[str, Place]:
        return {handle.name: handle.place for handle in self._handles if handle.place is not None}

    def _tell_places(self) -> None:
        book = AddressBook(places=self._places())
        for handle in self._handles:
            if handle.alive and handle.link is not None:
                handle.link.send(book)

    # ---- ending

    def _on_signal(self, number: int) -> None:
        """First signal: the controller checkpoints and ends. Second: everything is killed at once."""
        if self._signal is not None:
            for handle in self._handles:
                handle.kill()
            self._ending.set()
            return
        self._signal = number
        self._display.note(f"{signal.Signals(number).name}: writing a checkpoint and ending (once more to kill)")
        controller = next(handle for handle in self._handles if handle.plan.role == "controller")
        if controller.link is not None and controller.started:
            controller.link.send(Stop())
            asyncio.get_running_loop().call_later(self._config.network.shutdown_deadline_s, self._ending.set)
        else:
            self._ending.set()

    async def _end(self) -> None:
        self._ending.set()
        for handle in self._handles:
            if handle.alive and handle.link is not None:
                handle.link.send(Stop())
        waits = [handle.process.wait() for handle in self._handles if handle.process is not None]
        grace_s = 2.0 if self.failure is None else 1.0
        tasks = [asyncio.ensure_future(wait) for wait in waits]
        if tasks:
            await asyncio.wait(tasks, timeout=grace_s)
        for handle in self._handles:
            handle.kill()
        if tasks:
            await asyncio.wait(tasks)
        for watcher in list(self._watchers):
            watcher.cancel()
        for handle in self._handles:
            if handle.link is not None:
                handle.link.close()


def _make_key(config: Config, run_id: str) -> Path | None:
    """A key per run whenever the sockets leave this host (contract 6)."""
    if is_loopback(config.network.interface):
        return None
    path = config.run_folder / "keys" / f"{run_id}.key"
    path.parent.mkdir(mode=0o700, exist_ok=True)
    create_run_key(path)
    return path


def _died(code: int) -> str:
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"

"""Starts the role processes of one slot, watches them, restarts what may restart, and ends them in order.

    SUPERVISOR <==link==> every role process of its slot      SUPERVISOR <--directory--> the supervisors of other slots

waits for: news on the links and in the directory, exits of processes, signals.
unblocked by: each of them; ending has a deadline after which everything is killed.
never: touches a sample; leaves a process or a shared-memory segment behind.
"""

import asyncio
import os
import signal
import time
from collections.abc import Sequence
from typing import Protocol

from flashflow.config.sections import Config
from flashflow.errors import PeerLost
from flashflow.launch import guard, kinship
from flashflow.launch.directory import Asked, Directory, GangAdvanced, Gathers, Over, Placed, Said, Signalled
from flashflow.launch.handle import RoleChild, RoleHandle
from flashflow.launch.link import (
    ANY_LINK,
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
    Place,
    Reached,
    Ready,
    RoleSpec,
    StepDone,
    Stop,
)
from flashflow.launch.nursery import Nursery
from flashflow.launch.plan import ProcessPlan
from flashflow.launch.run_facts import RunFacts
from flashflow.launch.startup import StartupLog

EXIT_FAILED = 1
GANG_SETTLE_S = 1.0
"""A rank's collectives fail within so long of the death of another rank (measured: 0.1 s)."""
END_GRACE_S = 2.0
"""A role that is told to stop may take so long; the controller has ended before."""


class Display(Protocol):
    """Where a person sees the run."""

    def update(self, record: dict[str, object]) -> None: ...

    def evaluation(self, version: int, accuracy: float) -> None: ...

    def note(self, text: str) -> None: ...


class Supervisor:
    """Of one slot. `display`: of the slot that a person watches; None on the others."""

    def __init__(
        self,
        config: Config,
        plans: Sequence[ProcessPlan],
        facts: RunFacts,
        *,
        directory: Directory,
        display: Display | None,
        startup: StartupLog,
        impatient: bool,
        nursery: Nursery | None = None,
    ) -> None:
        """impatient: a second signal kills all at once. nursery: forks the roles it can; None: none."""
        self._config = config
        self._facts = facts
        self._directory = directory
        self._display = display
        self._startup = startup
        self._impatient = impatient
        self._logs = config.run_folder / "logs"
        self._handles = [RoleHandle(plan, self._logs / f"{plan.name}.log") for plan in plans]
        self._starting = 0
        self._generation = 1
        self._nursery = nursery
        self._advanced = asyncio.Event()
        self._places: dict[str, Place] = {}
        self._meeting: Meeting | None = None
        self._ending = asyncio.Event()
        self._changed = asyncio.Event()
        self._progress = asyncio.Event()
        self._signal: int | None = None
        self._own_end: Over | None = None
        self._over: Over | None = None
        self._guard: kinship.Guard | None = None
        self._watchers: set[asyncio.Task[None]] = set()

    async def run(self) -> Over:
        """How it ended: exit code 0 done, 1 failed, 128 + n ended by signal n."""
        self._logs.mkdir(parents=True, exist_ok=True)
        kinship.adopt_orphans()
        self._guard = kinship.Guard()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._on_signal, number)
        self._spawn(self._read_directory())
        self._spawn(self._watch_directory())
        starts: list[asyncio.Task[None]] = []
        try:
            # All at once: those that the nursery forks wait until it has imported what they need.
            starts = [self._spawn(self._start(handle)) for handle in self._handles]
            await self._wait_started()
            await self._watch()
        finally:
            for start in starts:
                start.cancel()
            await asyncio.gather(*starts, return_exceptions=True)
            await self._end()
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.remove_signal_handler(number)
        return self._over or self._own_end or Over(code=EXIT_FAILED, failure="the slot ended without a reason")

    # ---- starting

    async def _start(self, handle: RoleHandle) -> None:
        handle.incarnation += 1
        if handle.incarnation == 1:
            self._startup.reached(handle.name, "started", time.monotonic())
        mark = {guard.VARIABLE: self._guard.mark} if self._guard is not None else {}
        self._starting += 1
        try:
            process, link = await handle.start(self._spec(handle), mark, self._nursery, self._note)
        finally:
            self._starting -= 1
        link.send(AddressBook(places=self._places))
        if self._meeting is not None and self._meeting.generation == self._generation:
            link.send(self._meeting)
        self._spawn(self._read(handle, link))
        self._spawn(self._reap(handle, process, self._generation))

    def _spec(self, handle: RoleHandle) -> RoleSpec:
        plan, facts = handle.plan, self._facts
        return RoleSpec(
            role=plan.role,
            index=plan.index,
            incarnation=handle.incarnation,
            generation=self._generation,
            run_id=facts.run_id,
            config=str(self._config.run_folder / "config.yaml"),
            interface=plan.address,
            carrier=facts.carrier,
            link_fd=-1,
            supervisor_pid=os.getpid(),
            cpus=list(plan.affinity) if plan.affinity is not None else None,
            resume=facts.resume or self._generation > 1,
            key=facts.key,
        )

    async def _wait_started(self) -> None:
        """Names the roles that are not ready by `startup_deadline_s`."""
        deadline_s = self._config.network.startup_deadline_s
        try:
            async with asyncio.timeout(deadline_s):
                while not self._ending.is_set() and not all(handle.started for handle in self._handles):
                    self._changed.clear()
                    await _first(self._changed, self._ending)
        except TimeoutError:
            missing = [handle for handle in self._handles if not handle.started]
            self._fail(
                missing[0],
                f"not ready after {deadline_s:.0f} s (network.startup_deadline_s): "
                f"{', '.join(handle.name for handle in missing)}\n{missing[0].log_tail()}",
                permanent=False,
            )

    async def _watch(self) -> None:
        """Until the end. When no step is done for `stall_report_s`, every role is asked what it waits for."""
        stall_s = self._config.network.stall_report_s
        while not self._ending.is_set():
            self._progress.clear()
            try:
                async with asyncio.timeout(stall_s):
                    await _first(self._progress, self._ending)
            except TimeoutError:
                if self._display is not None:
                    self._note(
                        f"no step done for {stall_s:g} s (network.stall_report_s); every role says what it does:"
                    )
                    self._directory.post(Asked())

    def _describe_all(self) -> None:
        for handle in self._handles:
            if handle.alive:
                handle.send(Describe())
            else:
                self._note(f"{handle.name}: does not run")

    # ---- news of the roles

    async def _read(self, handle: RoleHandle, link: Link) -> None:
        incarnation = handle.incarnation
        async for message in link.messages():
            self._changed.set()
            match message:
                case Listening():
                    handle.started = True
                    place = Place(message.data, message.control, incarnation)
                    self._directory.post(Placed(name=handle.name, place=place))
                case Ready():
                    handle.started = True
                case Meeting():
                    self._directory.post(Gathers(meeting=message))
                case Reached():
                    if incarnation == 1:
                        self._startup.reached(handle.name, message.milestone, message.at)
                case StepDone() | EvaluationDone():
                    self._directory.post(Said(message=message))
                case Note():
                    self._note(f"{handle.name}: {message.text}")
                case Described():
                    self._note(message.text)
                case Failed():
                    handle.failed = message
                case Finished():
                    handle.finished = True
                    code = 0 if self._signal is None else 128 + self._signal
                    self._finish(Over(code=code, step=message.step, reason=message.reason))
                case _:
                    self._note(f"{handle.name}: unexpected {type(message).__name__} on its link")

    async def _reap(self, handle: RoleHandle, process: RoleChild, generation: int) -> None:
        code = await process.wait()
        kinship.kill_group(process.pid)  # what it has left behind there
        await asyncio.sleep(0)  # let what it said last be read first
        if self._ending.is_set() or handle.finished or handle.retired is process:
            return
        failed = handle.failed
        if failed is not None and not failed.transient and not await self._follows_a_death(handle, generation):
            self._fail(handle, failed.text)
        elif self._signal is not None:
            self._finish(Over(code=128 + self._signal))
        elif handle.in_gang:
            await self._report_gang(handle, code, generation)
        elif self._has_budget(handle, code):
            handle.restarts += 1
            budget = self._config.placement.max_restarts
            self._note(f"{handle.name} {_died(code)}; starting it again ({handle.restarts} of {budget})")
            self._kill_adopted()
            await self._start(handle)

    async def _follows_a_death(self, handle: RoleHandle, generation: int) -> bool:
        """Whether a gang member failed only because another was killed: the first cause may be seen second."""
        if not handle.in_gang:
            return False
        others = [other.process for other in self._handles if other.in_gang and other is not handle and other.process]
        waits = [asyncio.create_task(wait) for wait in (self._advanced.wait(), *(other.wait() for other in others))]
        await asyncio.wait(waits, timeout=GANG_SETTLE_S, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()
        codes = [other.returncode for other in others]
        return generation != self._generation or any(code is not None and code < 0 for code in codes)

    async def _report_gang(self, handle: RoleHandle, code: int, generation: int) -> None:
        """Controller and trainers live and die together: generation + 1, from the newest complete checkpoint."""
        if generation != self._generation or not self._has_budget(handle, code):
            return  # another member's death has started it again already, or the budget is used up
        if await self._directory.advance_gang(generation, f"{handle.name} {_died(code)}"):
            handle.restarts += 1

    async def _begin_generation(self, generation: int) -> None:
        self._generation = generation
        self._advanced.set()
        self._advanced.clear()
        gang = [handle for handle in self._handles if handle.in_gang]
        for handle in gang:
            handle.retired = handle.process
            handle.kill()
        for handle in gang:
            if handle.process is not None:
                await handle.process.wait()
        self._kill_adopted()
        for handle in gang:
            await self._start(handle)

    def _has_budget(self, handle: RoleHandle, code: int) -> bool:
        budget = self._config.placement.max_restarts
        if handle.restarts < budget:
            return True
        said = handle.failed.text if handle.failed is not None else handle.log_tail()
        self._fail(handle, f"{_died(code)} {handle.restarts + 1} times (placement.max_restarts: {budget})\n{said}")
        return False

    # ---- news of the slots

    async def _read_directory(self) -> None:
        async for news in self._directory.news():
            match news:
                case Placed():
                    self._places[news.name] = news.place
                    self._tell(AddressBook(places={news.name: news.place}))
                case Gathers():
                    self._meeting = news.meeting
                    self._tell(news.meeting)
                case Said():
                    self._show(news.message)
                case Asked():
                    self._describe_all()
                case Signalled():
                    self._on_signalled(news.number)
                case GangAdvanced():
                    number = news.generation
                    self._say(f"{news.reason}; the gang starts again from the newest checkpoint (generation {number})")
                    await self._begin_generation(number)
                case Over():
                    self._ending.set()

    async def _watch_directory(self) -> None:
        try:
            await self._directory.watch()
        except PeerLost as error:
            self._finish(Over(code=EXIT_FAILED, failure=str(error)))

    def _show(self, message: StepDone | EvaluationDone | Note) -> None:
        if self._display is None:
            return
        match message:
            case StepDone():
                self._progress.set()
                self._display.update(message.record)
            case EvaluationDone():
                self._display.evaluation(message.version, message.accuracy)
            case Note():
                self._display.note(message.text)

    def _say(self, text: str) -> None:
        """What every slot knows: only the watched one shows it."""
        if self._display is not None:
            self._display.note(text)

    def _note(self, text: str) -> None:
        self._directory.post(Said(message=Note(text=text)))

    def _tell(self, message: ANY_LINK) -> None:
        for handle in self._handles:
            handle.send(message)

    # ---- ending

    def _fail(self, handle: RoleHandle, text: str, *, permanent: bool = True) -> None:
        failure = f"{handle.name} failed: {text.rstrip()}\n(log: {handle.log})"
        self._finish(Over(code=EXIT_FAILED, failure=failure, permanent=permanent))

    def _finish(self, over: Over) -> None:
        """The first end that any slot sees is the run's."""
        if self._own_end is None:
            self._own_end = over
            self._directory.end(over)
        self._ending.set()

    def _on_signal(self, number: int) -> None:
        if self._signal is not None and self._impatient:
            for handle in self._handles:
                handle.kill()
            self._finish(Over(code=128 + number))
        elif self._signal is None:
            self._directory.post(Signalled(number=number))

    def _on_signalled(self, number: int) -> None:
        """The controller checkpoints and ends; `shutdown_deadline_s` later everybody does."""
        if self._signal is not None:
            return
        self._signal = number
        again = " (once more to kill)" if self._impatient else ""
        self._say(f"{signal.Signals(number).name}: writing a checkpoint and ending{again}")
        over = Over(code=128 + number)
        deadline_s = self._config.network.shutdown_deadline_s
        asyncio.get_running_loop().call_later(deadline_s, self._finish, over)
        for handle in self._handles:
            if handle.plan.role == "controller":
                if handle.started:
                    handle.send(Stop())
                else:
                    self._finish(over)

    async def _end(self) -> None:
        self._ending.set()
        self._tell(Stop())
        waits = [asyncio.ensure_future(handle.process.wait()) for handle in self._handles if handle.process is not None]
        if waits:
            await asyncio.wait(waits, timeout=END_GRACE_S)
        for handle in self._handles:
            handle.kill()
        if waits:
            await asyncio.wait(waits)
        self._kill_adopted()
        self._over = await self._directory.close()
        for watcher in list(self._watchers):
            watcher.cancel()
        for handle in self._handles:
            if handle.link is not None:
                handle.link.close()
        if self._guard is not None:
            self._guard.close()

    # ---- tasks

    def _spawn(self, work: "asyncio._CoroutineLike[None]") -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._watchers.add(task)
        task.add_done_callback(self._watcher_done)
        return task

    def _watcher_done(self, task: asyncio.Task[None]) -> None:
        self._watchers.discard(task)
        if not task.cancelled() and task.exception() is not None:
            failure = f"the supervisor itself failed: {task.exception()!r}"
            self._finish(Over(code=EXIT_FAILED, failure=failure, permanent=True))

    def _kill_adopted(self) -> None:
        """What roles have started and left behind outside their process groups."""
        if self._guard is None or self._starting:
            return  # a process that is just being started is not known yet
        own = {handle.process.pid for handle in self._handles if handle.process is not None}
        if self._nursery is not None:
            own.add(self._nursery.pid)
        kinship.kill_adopted({*own, self._guard.pid})


async def _first(*events: asyncio.Event) -> None:
    """Returns when one of them is set."""
    waits = [asyncio.create_task(event.wait()) for event in events]
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()


def _died(code: int) -> str:
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"

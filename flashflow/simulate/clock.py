"""Virtual time: an event loop that jumps to the next timer instead of waiting for it.

Everything that asks the loop for the time (LoopClock, asyncio.sleep, asyncio.timeout) is simulated, at the speed of the
code between the waits. Sockets live in real time and have no place on this loop; what goes to a thread is done at once.
"""

import asyncio
import math
import selectors
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor
from typing import Any, TypeVar

from flashflow.errors import ContractError

ResultT = TypeVar("ResultT")


class VirtualLoop(asyncio.SelectorEventLoop):
    """Starts at 0 s."""

    def __init__(self) -> None:
        self._now = 0.0
        super().__init__(_JumpingSelector(self))
        self._clock_resolution = math.ulp(self._now)

    def time(self) -> float:
        return self._now

    def run_in_executor(  # type: ignore[override]
        self, executor: Executor | None, func: Callable[..., ResultT], *args: Any
    ) -> "asyncio.Future[ResultT]":
        """Here and now: on virtual time, work takes none."""
        done: asyncio.Future[ResultT] = self.create_future()
        try:
            done.set_result(func(*args))
        except Exception as error:
            done.set_exception(error)
        return done

    def jump(self, seconds: float) -> None:
        """Called when nothing can run before `seconds` from now."""
        # At least to the next float: a jump lost in rounding would be asked for again, for ever. For the same reason
        # asyncio's margin (a timer is due when it is earlier than now + margin) is the distance to the next float: with
        # less it would be lost at large times; with more, who waits for the last bit would be woken for ever, for the
        # clock would stand still.
        self._now = max(self._now + seconds, math.nextafter(self._now, math.inf))
        self._clock_resolution = math.ulp(self._now)

    def deadlock(self) -> ContractError:
        waiting = sorted(_described(task) for task in asyncio.all_tasks(self))
        return ContractError(
            f"deadlock at {self._now:.6g} s of virtual time: no timer is set and nothing can happen any more;"
            f" {len(waiting)} tasks wait: {'; '.join(waiting)}"
        )


class _JumpingSelector(selectors.DefaultSelector):
    """The loop's only place to wait, replaced by a jump of its clock."""

    def __init__(self, loop: VirtualLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise self._loop.deadlock()
        if timeout > 0:
            self._loop.jump(timeout)
        return []


def _described(task: asyncio.Task[Any]) -> str:
    frames = task.get_stack(limit=1)
    where = f" at {frames[0].f_code.co_qualname}:{frames[0].f_lineno}" if frames else ""
    return task.get_name() + where


def run_virtual(coroutine: Coroutine[Any, Any, ResultT]) -> ResultT:
    """Run to the end on virtual time and return the result; leftover tasks are cancelled.

    Raises ContractError naming the waiting tasks when nothing can ever happen again.
    """
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(coroutine)

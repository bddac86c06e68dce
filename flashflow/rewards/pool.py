"""The reward role's end of its workers: each runs one call at a time and is killed when that takes too long."""

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec

from flashflow.errors import RewardError
from flashflow.rewards.worker import LENGTH_BYTES, Answer, Job, Request, frame


class WorkerDied(Exception):
    """The process ended in the middle of a call."""


class Worker:
    """One process, started on first use and again after it was killed. Leads a process group of its own."""

    def __init__(self, job: Job, startup_deadline_s: float) -> None:
        self._job = job
        self._startup_deadline_s = startup_deadline_s
        self._process: asyncio.subprocess.Process | None = None
        self.starts = 0

    async def start(self) -> None:
        """Raises RewardError when the function cannot be loaded, or not within the deadline. Idempotent."""
        if self._process is not None:
            return
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "flashflow.rewards.worker",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            process_group=0,
        )
        self.starts += 1
        try:
            answer = await self._exchange(self._job, self._startup_deadline_s)
        except TimeoutError as error:
            reason = f"not loaded within network.startup_deadline_s = {self._startup_deadline_s} s"
            raise RewardError(f"reward.function {self._job.function}: {reason}") from error
        except WorkerDied as error:
            raise RewardError(f"reward.function {self._job.function}: while loading it, {error}") from error
        if answer.error:
            await self.kill()
            raise RewardError(f"reward.function {self._job.function}: cannot be loaded:\n{answer.error}")

    async def call(self, request: Request, deadline_s: float) -> Answer:
        """Raises TimeoutError after `deadline_s`, WorkerDied when the process ends.

        After either, or a cancellation, the process is gone; the next `start` makes another.
        """
        return await self._exchange(request, deadline_s)

    async def kill(self) -> None:
        """End the process and all that it has started."""
        process, self._process = self._process, None
        if process is None:
            return
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):  # it died by itself, and that is not told yet
                os.killpg(process.pid, signal.SIGKILL)
        await process.wait()

    async def _exchange(self, message: Job | Request, deadline_s: float) -> Answer:
        process = self._process
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            async with asyncio.timeout(deadline_s):
                process.stdin.write(frame(message))
                await process.stdin.drain()
                length = await process.stdout.readexactly(LENGTH_BYTES)
                body = await process.stdout.readexactly(int.from_bytes(length, "big"))
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            await self.kill()
            raise WorkerDied(f"the worker ended with exit code {process.returncode}") from error
        except BaseException:
            await self.kill()
            raise
        return msgspec.msgpack.decode(body, type=Answer)


class WorkerPool:
    """`size` workers; a call waits for an idle one, and only then does its deadline begin."""

    def __init__(self, job: Job, size: int, startup_deadline_s: float) -> None:
        self.workers = [Worker(job, startup_deadline_s) for _ in range(size)]
        self._idle: asyncio.LifoQueue[Worker] = asyncio.LifoQueue()
        for worker in self.workers:
            self._idle.put_nowait(worker)

    @property
    def num_busy(self) -> int:
        return len(self.workers) - self._idle.qsize()

    async def start(self) -> None:
        """Start all idle ones now. Raises RewardError when the function cannot be loaded."""
        results = await asyncio.gather(*(self._start_one() for _ in self.workers), return_exceptions=True)
        for error in results:
            if error is not None:
                raise error

    async def call(self, request: Request, deadline_s: float) -> Answer:
        """Raises TimeoutError, WorkerDied; RewardError when a worker that was killed cannot start again."""
        async with self._one_idle() as worker:
            await worker.start()
            return await worker.call(request, deadline_s)

    async def close(self) -> None:
        await asyncio.gather(*(worker.kill() for worker in self.workers))

    async def _start_one(self) -> None:
        async with self._one_idle() as worker:
            await worker.start()

    @asynccontextmanager
    async def _one_idle(self) -> AsyncIterator[Worker]:
        worker = await self._idle.get()
        try:
            yield worker
        finally:
            self._idle.put_nowait(worker)

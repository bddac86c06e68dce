"""A process that scores one completion at a time, so that one that hangs or crashes can be killed.

Started by pool.py with `python -m flashflow.rewards.worker`. Frames (4 bytes of length, big-endian, then msgpack) come
in on its standard input, a Job first, and go out on its standard output: one Answer for the job, one for each Request.

waits for: the next frame.
unblocked by: the reward role; when that dies, the end of the input ends this process and all it has started.
never: outlives the role; prints into the frames (what the function prints goes to standard error).
"""

import os
import queue
import signal
import sys
import threading
import traceback
from typing import Any, BinaryIO

import msgspec

from flashflow.errors import FlashflowError
from flashflow.rewards.load import load_reward

LENGTH_BYTES = 4


class Job(msgspec.Struct, frozen=True, array_like=True):
    """What to load."""

    function: str
    arguments: dict[str, Any]
    path: list[str]
    """sys.path of the role."""


class Request(msgspec.Struct, frozen=True, array_like=True):
    prompt: str
    completion: str
    row: dict[str, Any]


class Answer(msgspec.Struct, frozen=True, array_like=True):
    reward: float | None = None
    components: dict[str, float] = {}
    error: str = ""
    """Traceback or message; empty when all went well."""


def frame(message: Job | Request | Answer) -> bytes:
    body = msgspec.msgpack.encode(message)
    return len(body).to_bytes(LENGTH_BYTES, "big") + body


def main() -> None:
    frames, replies = _take_standard_streams()
    bodies: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(frames, bodies), daemon=True).start()
    job = msgspec.msgpack.decode(bodies.get(), type=Job)
    sys.path[:] = job.path
    try:
        function = load_reward(job.function, job.arguments)
    except (Exception, SystemExit):
        _reply(replies, Answer(error=traceback.format_exc()))
        return
    _reply(replies, Answer())
    while True:
        request = msgspec.msgpack.decode(bodies.get(), type=Request)
        try:
            scored = function.score_now(request.prompt, request.completion, request.row)
            _reply(replies, Answer(scored.reward, scored.components))
        except FlashflowError as error:
            _reply(replies, Answer(error=str(error)))


def _take_standard_streams() -> tuple[BinaryIO, BinaryIO]:
    """Leaves the reward function an empty standard input, and standard error as its standard output."""
    frames, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    os.dup2(2, 1)
    return frames, replies


def _read(frames: BinaryIO, bodies: "queue.SimpleQueue[bytes]") -> None:
    """Notices the end of the input also while the reward function runs; this process leads a group of its own."""
    while len(length := frames.read(LENGTH_BYTES)) == LENGTH_BYTES:
        bodies.put(frames.read(int.from_bytes(length, "big")))
    os.killpg(0, signal.SIGKILL)


def _reply(replies: BinaryIO, answer: Answer) -> None:
    replies.write(frame(answer))
    replies.flush()


if __name__ == "__main__":
    main()

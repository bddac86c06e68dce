"""Who lives and dies with whom: nothing that a run starts outlives it, whatever is killed with SIGKILL.

    torchrun agent -> slot (supervisor) -> roles -> what roles start (engine cores, reward workers)
                        \\-> guard

A child asks the kernel for a signal at its parent's death; a role also reads the end of its inherited link. What a role
has started dies with the role's process group; what left that group is adopted by the supervisor, the subreaper, and
ended there. When the supervisor itself is killed, the guard finds all that bears the slot's mark and kills it.
"""

import contextlib
import ctypes
import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Collection, Mapping
from pathlib import Path

from flashflow.launch import guard

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
SCRUBBED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE")
SCRUBBED_PREFIXES = ("MASTER_", "TORCHELASTIC_", "ROLE_")
"""torchrun's own: a role that believed them would meet other ranks than its gang's."""
GUARD_DEADLINE_S = 10.0
"""A process that the kernel holds may keep the guard, but not the end of the slot."""


def scrubbed(env: Mapping[str, str]) -> dict[str, str]:
    """Without what torchrun tells its workers."""
    return {
        name: value for name, value in env.items() if name not in SCRUBBED and not name.startswith(SCRUBBED_PREFIXES)
    }


def die_with(parent_pid: int, number: signal.Signals = signal.SIGKILL) -> None:
    """Have the kernel send `number` to this process when its parent dies, however that dies."""
    _prctl(PR_SET_PDEATHSIG, number)
    if os.getppid() != parent_pid:
        os._exit(1)


def outlive_parent() -> None:
    """Takes back `die_with`."""
    _prctl(PR_SET_PDEATHSIG, 0)


def adopt_orphans() -> None:
    """Processes below this one whose parents die become its children."""
    _prctl(PR_SET_CHILD_SUBREAPER, 1)


def kill_group(pid: int) -> None:
    """The process group that `pid` leads, or has led."""
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def kill_adopted(known: Collection[int]) -> None:
    """End and reap the children of this process that it has not started itself."""
    for pid in _children():
        if pid in known:
            continue
        try:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        except (ProcessLookupError, ChildProcessError):
            continue


class Guard:
    """A process that kills all that bears this slot's mark once the slot is gone. It is told by the end of a pipe."""

    def __init__(self) -> None:
        self.mark = secrets.token_hex(8)
        reader, self._writer = os.pipe()
        self._process = subprocess.Popen(
            # Only what the guard needs: it starts in milliseconds and takes a few MB.
            [sys.executable, "-I", "-S", guard.__file__, self.mark],
            stdin=reader,
            stdout=subprocess.DEVNULL,
            env={},
            start_new_session=True,
        )
        os.close(reader)

    @property
    def pid(self) -> int:
        return self._process.pid

    def close(self) -> None:
        """Kills what bears the mark now."""
        os.close(self._writer)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(GUARD_DEADLINE_S)


def _children() -> list[int]:
    found = Path(f"/proc/{os.getpid()}/task").glob("*/children")
    return [int(pid) for path in found for pid in path.read_text().split()]


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(option, value)

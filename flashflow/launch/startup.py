"""How the seconds from the command to the first token are spent: what each process reached when, into startup.json.

started     its process was made                     ready        it serves, or has begun its work
imported    Python and the modules of every role     first_lease  an env was given an attempt
configured  the config was read                      first_token  an engine sampled a token
built       the modules, model and data of its role
connected   every process it calls has welcomed it
"""

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal

Milestone = Literal["started", "imported", "configured", "built", "connected", "ready", "first_lease", "first_token"]
"""In the order in which a process reaches those that concern it; `built` and `connected` may change places."""

Reach = Callable[[Milestone], None]
"""Tells that a milestone is reached; told again, it changes nothing."""


def startup_path(run_folder: Path) -> Path:
    return run_folder / "startup.json"


def process_began() -> float:
    """When this process was made, in seconds of time.monotonic(), to a hundredth."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    return time.monotonic() - age_s


class StartupLog:
    """Seconds since `origin`, a moment of this host's monotonic clock, by process and milestone; of its first start.

    The file is written at every milestone, so that it also shows where a start hangs.
    """

    def __init__(self, path: Path, origin: float) -> None:
        self._path = path
        self._origin = origin
        self._reached: dict[str, dict[str, float]] = {}

    def reached(self, process: str, milestone: Milestone, at: float) -> None:
        milestones = self._reached.setdefault(process, {})
        if milestone not in milestones:
            milestones[milestone] = round(at - self._origin, 3)
            self._path.write_text(json.dumps(self._reached) + "\n", encoding="utf-8")

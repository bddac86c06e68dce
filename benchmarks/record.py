"""What stands beside every figure: the machine and the commit it was measured on."""

import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parent.parent


def machine() -> dict[str, Any]:
    """What the figures depend on."""
    models = [
        line.split(":", 1)[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line
    ]
    return {
        "cpu": models[0] if models else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
    }


def commit() -> str:
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


def family(pid: int) -> list[psutil.Process]:
    """A process and all below it."""
    return [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]


def cpu_seconds(process: psutil.Process) -> float:
    """User and system time so far."""
    times = process.cpu_times()
    return times.user + times.system

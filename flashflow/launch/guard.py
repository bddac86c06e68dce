"""`python guard.py MARK`: waits for the end of its input, then kills every process that bears the mark.

Standard library only, and no import of flashflow: it must start in milliseconds.
"""

import os
import signal
import sys
import time

VARIABLE = "FLASHFLOW_SLOT"
"""Of the environment, which processes inherit whatever session or group they choose."""


def marked(mark: str) -> list[int]:
    entry = f"{VARIABLE}={mark}".encode()
    found = []
    for name in os.listdir("/proc"):
        if name.isdecimal():
            try:
                with open(f"/proc/{name}/environ", "rb") as environ:
                    if entry in environ.read().split(b"\0"):
                        found.append(int(name))
            except OSError:
                continue
    return found


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    while sys.stdin.buffer.read(1):
        pass
    while pids := marked(sys.argv[1]):  # again, for what was started meanwhile
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
            except OSError:
                continue
        time.sleep(0.02)


if __name__ == "__main__":
    main()

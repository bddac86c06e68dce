"""One planned process through its incarnations: started, told, killed by its supervisor."""

import asyncio
import os
import socket
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO

import msgspec

from flashflow.launch import kinship
from flashflow.launch.kinship import scrubbed
from flashflow.launch.link import ANY_LINK, Failed, Link, RoleSpec
from flashflow.launch.nursery import FORKED_ROLES, Forked, Nursery
from flashflow.launch.plan import ProcessPlan
from flashflow.topology import GANG

LOG_TAIL_LINES = 15


RoleChild = asyncio.subprocess.Process | Forked


class RoleHandle:
    """What the supervisor knows and does of one role process."""

    def __init__(self, plan: ProcessPlan, log: Path) -> None:
        self.plan = plan
        self.log = log
        self.incarnation = 0
        self.restarts = 0
        self.process: RoleChild | None = None
        self.retired: RoleChild | None = None
        """The incarnation that this supervisor ended itself; its exit is no news."""
        self.link: Link | None = None
        self.started = False
        self.finished = False
        self.failed: Failed | None = None

    @property
    def name(self) -> str:
        return self.plan.name

    @property
    def in_gang(self) -> bool:
        return self.plan.role in GANG

    @property
    def alive(self) -> bool:
        return self.process is not None and self.process.returncode is None

    async def start(
        self, spec: RoleSpec, env: Mapping[str, str], nursery: Nursery | None, note: Callable[[str], None]
    ) -> tuple[RoleChild, Link]:
        """The next incarnation; `spec` lacks the link's descriptor. nursery: forks it, if it can; note: told if not."""
        self.started, self.failed = False, None
        ours, theirs = socket.socketpair()
        with theirs, self.log.open("ab") as log:
            spec = msgspec.structs.replace(spec, link_fd=theirs.fileno())
            env = {**self.plan.env, **env}
            forked = None
            if nursery is not None and self.plan.python is None and self.plan.role in FORKED_ROLES:
                forked = await nursery.fork(spec, env, theirs, log)
                if forked is None:
                    note(f"{self.name}: the nursery could not fork it; it starts by itself")
            self.process = forked if forked is not None else await self._spawn(spec, env, log)
        self.link = await Link.over(ours)
        return self.process, self.link

    async def _spawn(self, spec: RoleSpec, env: Mapping[str, str], log: IO[bytes]) -> asyncio.subprocess.Process:
        command = [self.plan.python or sys.executable, "-m", "flashflow.launch.role"]
        return await asyncio.create_subprocess_exec(
            *command,
            msgspec.json.encode(spec).decode(),
            pass_fds=[spec.link_fd],
            env={**scrubbed(os.environ), **env},
            stdin=asyncio.subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,  # Ctrl-C reaches the supervisor alone, which ends the run in order
        )

    def send(self, message: ANY_LINK) -> None:
        """To a process that lives; else to nobody."""
        if self.alive and self.link is not None:
            self.link.send(message)

    def kill(self) -> None:
        """With whatever it has started in its process group."""
        if self.alive and self.process is not None:
            kinship.kill_group(self.process.pid)
            self.process.kill()  # forked a moment ago, it may lead no group yet

    def log_tail(self) -> str:
        lines = self.log.read_text(errors="replace").splitlines() if self.log.exists() else []
        return "\n".join(lines[-LOG_TAIL_LINES:])

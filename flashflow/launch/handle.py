"""One planned process through its incarnations: started, told, killed by its supervisor."""

import asyncio
import os
import socket
import sys
from collections.abc import Mapping
from pathlib import Path

import msgspec

from flashflow.launch import kinship
from flashflow.launch.link import ANY_LINK, Failed, Link, RoleSpec
from flashflow.launch.plan import ProcessPlan
from flashflow.topology import GANG

LOG_TAIL_LINES = 15
SCRUBBED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE")
SCRUBBED_PREFIXES = ("MASTER_", "TORCHELASTIC_", "ROLE_")
"""torchrun's own: a role that believed them would meet other ranks than its gang's."""


class RoleHandle:
    """What the supervisor knows and does of one role process."""

    def __init__(self, plan: ProcessPlan, log: Path) -> None:
        self.plan = plan
        self.log = log
        self.incarnation = 0
        self.restarts = 0
        self.process: asyncio.subprocess.Process | None = None
        self.retired: asyncio.subprocess.Process | None = None
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

    async def start(self, spec: RoleSpec, env: Mapping[str, str]) -> tuple[asyncio.subprocess.Process, Link]:
        """The next incarnation; `spec` lacks the link's descriptor."""
        self.started, self.failed = False, None
        ours, theirs = socket.socketpair()
        with theirs, self.log.open("ab") as log:
            spec = msgspec.structs.replace(spec, link_fd=theirs.fileno())
            command = [self.plan.python or sys.executable, "-m", "flashflow.launch.role"]
            self.process = await asyncio.create_subprocess_exec(
                *command,
                msgspec.json.encode(spec).decode(),
                pass_fds=[theirs.fileno()],
                env={**scrubbed(os.environ), **self.plan.env, **env},
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # Ctrl-C reaches the supervisor alone, which ends the run in order
            )
        self.link = await Link.over(ours)
        return self.process, self.link

    def send(self, message: ANY_LINK) -> None:
        """To a process that lives; else to nobody."""
        if self.alive and self.link is not None:
            self.link.send(message)

    def kill(self) -> None:
        """With whatever it has started in its process group."""
        if self.alive and self.process is not None:
            kinship.kill_group(self.process.pid)

    def log_tail(self) -> str:
        lines = self.log.read_text(errors="replace").splitlines() if self.log.exists() else []
        return "\n".join(lines[-LOG_TAIL_LINES:])


def scrubbed(env: Mapping[str, str]) -> dict[str, str]:
    """Without what torchrun tells its workers."""
    return {
        name: value for name, value in env.items() if name not in SCRUBBED and not name.startswith(SCRUBBED_PREFIXES)
    }

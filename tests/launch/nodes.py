"""Several hosts on one machine: network namespaces on a bridge, each with its own host name, addresses and link."""

import os
import shutil
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MAIN = ROOT / "launch" / "main.py"
TORCHRUN = [str(Path(sys.executable).with_name("torchrun"))]
AGENT = [sys.executable, "-m", "flashflow.launch.agent"]


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


class Nodes:
    """Hosts `<prefix>1 .. <prefix>N` with 10.77.0.k and fd77::k. Nothing is added to the root namespace."""

    def __init__(self, count: int) -> None:
        self.prefix = f"t{uuid.uuid4().hex[:6]}n"
        self.switch = f"{self.prefix}sw"
        self.names = [f"{self.prefix}{number}" for number in range(1, count + 1)]
        self._made: list[str] = []
        self._namespace(self.switch)
        ip("-n", self.switch, "link", "add", "br0", "type", "bridge")
        ip("-n", self.switch, "link", "set", "br0", "up")
        for number, name in enumerate(self.names, start=1):
            self._namespace(name)
            ip("-n", self.switch, "link", "add", f"p{number}", "type", "veth", "peer", "name", "eth0", "netns", name)
            ip("-n", self.switch, "link", "set", f"p{number}", "master", "br0", "up")
            ip("-n", name, "addr", "add", f"10.77.0.{number}/24", "dev", "eth0")
            ip("-n", name, "addr", "add", f"fd77::{number}/64", "dev", "eth0", "nodad")
            ip("-n", name, "link", "set", "eth0", "up")
            hosts = Path("/etc/netns") / name / "hosts"  # laid over /etc/hosts in the namespace
            hosts.parent.mkdir(parents=True, exist_ok=True)
            known = "".join(f"10.77.0.{place} {other}\n" for place, other in enumerate(self.names, start=1))
            hosts.write_text(f"127.0.0.1 localhost\n{known}")

    def _namespace(self, name: str) -> None:
        ip("netns", "add", name)
        self._made.append(name)
        ip("-n", name, "link", "set", "lo", "up")

    def command(self, number: int, *arguments: str) -> list[str]:
        """A command that runs on host `number`, from 0."""
        name = self.names[number]
        shell = 'hostname "$0"; exec "$@"'
        return ["ip", "netns", "exec", name, "unshare", "--uts", "--", "bash", "-c", shell, name, *arguments]

    def link(self, number: int, state: str) -> None:
        """state: `up` or `down`."""
        ip("-n", self.names[number], "link", "set", "eth0", state)

    def pids(self, number: int) -> list[int]:
        found = subprocess.run(["ip", "netns", "pids", self.names[number]], capture_output=True, text=True, check=True)
        return [int(pid) for pid in found.stdout.split()]

    def close(self) -> None:
        for name in self._made:
            if name in self.names:
                for pid in self.pids(self.names.index(name)):
                    os.kill(pid, signal.SIGKILL)
            ip("netns", "del", name)
            shutil.rmtree(Path("/etc/netns") / name, ignore_errors=True)


def make_nodes(count: int) -> Iterator[Nodes]:
    """Skips, saying why, where namespaces cannot be made."""
    if shutil.which("ip") is None:
        pytest.skip("NOT TESTED: several hosts need `ip` (iproute2), which is not installed")
    try:
        nodes = Nodes(count)
    except subprocess.CalledProcessError as error:
        pytest.skip(f"NOT TESTED: several hosts need network namespaces: {error.stderr.decode().strip()}")
    try:
        yield nodes
    finally:
        nodes.close()

"""The hosts of a run: what the planner must know of each, and how this one is found out."""

import os
import re
import socket
from pathlib import Path

import msgspec

from flashflow.errors import ConfigError

LOOPBACK = "127.0.0.1"


class Host(msgspec.Struct, frozen=True):
    """One machine, or one (virtual) node of Slurm."""

    name: str
    address: str = LOOPBACK
    """Of the interface that its processes bind to."""
    cores: tuple[int, ...] = ()
    """Cores the run may use, ascending."""
    devices: tuple[str, ...] = ()
    """CUDA devices as CUDA_VISIBLE_DEVICES names them: numbers or UUIDs, in its order."""
    slots: int = 1
    """Supervisors that share its processes: torchrun's --nproc-per-node."""


def this_host(address: str = LOOPBACK) -> Host:
    return Host(name=host_name(), address=address, cores=usable_cores(), devices=visible_devices())


def host_name() -> str:
    """Slurm's name of the node, where it started us: several of its nodes may be one machine."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def usable_cores() -> tuple[int, ...]:
    return tuple(sorted(os.sched_getaffinity(0)))


def visible_devices() -> tuple[str, ...]:
    """Without asking CUDA, which would take memory on each. An inherited CUDA_VISIBLE_DEVICES is the whole truth."""
    num_nodes = sum(re.fullmatch(r"nvidia\d+", path.name) is not None for path in Path("/dev").glob("nvidia*"))
    inherited = os.environ.get("CUDA_VISIBLE_DEVICES")
    if inherited is None or not num_nodes:
        return tuple(map(str, range(num_nodes)))
    return tuple(name.strip() for name in inherited.split(",") if name.strip())


def bind_address(interface: str, *, towards: str | None = None) -> str:
    """The address that `network.interface` means on this host; `towards`: a host to be reached from it, if any other.

    Raises ConfigError naming what this host has.
    """
    import psutil

    if interface == "auto":
        return LOOPBACK if towards is None else source_address(towards)
    found = psutil.net_if_addrs()
    here = {_plain(entry.address) for entries in found.values() for entry in entries if entry.family in _FAMILIES}
    if interface in here:
        return interface
    for family in _FAMILIES:
        for entry in found.get(interface, ()):
            if entry.family == family and not entry.address.lower().startswith("fe80:"):
                return _plain(entry.address)
    raise ConfigError(
        [
            f"network.interface: {interface} is no address and no interface of host {host_name()}; "
            f"here are {', '.join([*found, *sorted(here)])}"
        ]
    )


_FAMILIES = (socket.AF_INET, socket.AF_INET6)


def source_address(towards: str) -> str:
    """The address of this host from which packets to `towards` leave, by the routing table; none is sent."""
    try:
        family, _, _, _, target = socket.getaddrinfo(towards, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(target)
            return _plain(str(probe.getsockname()[0]))
    except OSError as error:
        raise ConfigError(
            [f"network.interface: auto finds no route to {towards} ({error}); name an interface or an address"]
        ) from error


def _plain(address: str) -> str:
    """Without the scope of a link-local IPv6 address."""
    return address.partition("%")[0]

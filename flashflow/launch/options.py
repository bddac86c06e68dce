"""Options of the command line that several commands have, and what they mean."""

from flashflow.config.mistakes import nearest
from flashflow.errors import ConfigError
from flashflow.launch.hosts import Host, this_host

COUNTED_ROLES = ("trainer", "engine", "env", "reward")
"""Roles of which there may be several processes."""


def role_overrides(text: str | None) -> list[str]:
    """`trainer=2,engine=2` -> overrides of `placement`. Raises ConfigError with every mistake."""
    overrides, mistakes = [], []
    for part in (text or "").split(",") if text else ():
        role, equals, count = (word.strip() for word in part.partition("="))
        if role not in COUNTED_ROLES:
            mistakes.append(f"--roles: {part.strip()!r} names no role; {nearest(role, COUNTED_ROLES)}")
        elif not equals or not count.isdecimal() or int(count) < 1:
            mistakes.append(f"--roles: {part.strip()!r} must be {role}=N with N of 1 or more")
        else:
            overrides.append(f"placement.{role}={count}")
    if mistakes:
        raise ConfigError(mistakes)
    return overrides


def imagined_hosts(hosts: str | None, devices: str | None) -> list[Host]:
    """`--hosts 2 --devices 8`, or `--hosts gpu-1,gpu-2,cpu-1 --devices 8,8,0`; this host where neither is given.

    Imagined hosts have the cores of this one. Raises ConfigError.
    """
    here = this_host()
    if hosts is None and devices is None:
        return [here]
    names = _host_names(hosts, here)
    counts = _device_counts(devices, len(names))
    return [
        Host(name=name, address=f"<{name}>", cores=here.cores, devices=tuple(map(str, range(count))))
        for name, count in zip(names, counts, strict=True)
    ]


def _host_names(text: str | None, here: Host) -> list[str]:
    if text is None:
        return [here.name]
    if text.isdecimal() and int(text) > 0:
        return [f"host-{number}" for number in range(int(text))]
    names = [name.strip() for name in text.split(",")]
    if not all(names) or text.isdecimal() or len(set(names)) < len(names):
        raise ConfigError([f"--hosts: {text!r} must be how many, 1 or more, or their names, e.g. gpu-1,gpu-2"])
    return names


def _device_counts(text: str | None, num_hosts: int) -> list[int]:
    parts = (text or "0").split(",")
    if not all(part.strip().isdecimal() for part in parts) or len(parts) not in (1, num_hosts):
        raise ConfigError(
            [f"--devices: {text!r} must be how many each host has, or one number for each of {num_hosts}"]
        )
    counts = [int(part) for part in parts]
    return counts if len(counts) == num_hosts else counts * num_hosts

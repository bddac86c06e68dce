"""A plan as a picture in text: a row for each host, a cell for each device, the other processes beside them."""

from collections.abc import Sequence

from flashflow.launch.hosts import Host
from flashflow.launch.plan import COMPUTING_ROLES, ProcessPlan

LETTERS = {"trainer": "T", "engine": "E"}


def picture(processes: Sequence[ProcessPlan], hosts: Sequence[Host]) -> str:
    """`T3` is trainer-3, `E0` engine-0, `.` a device that nobody has."""
    rows = [_row(place, host, processes, hosts) for place, host in enumerate(hosts)]
    widths = [max(len(row[column]) for row in rows) for column in range(2)]
    lines = [f"{name:<{widths[0]}}  [{cells:<{widths[1]}}]  {beside}".rstrip() for name, cells, beside in rows]
    return "\n".join(lines)


def _row(place: int, host: Host, processes: Sequence[ProcessPlan], hosts: Sequence[Host]) -> tuple[str, str, str]:
    here = [process for process in processes if process.host == place]
    computing = [process for process in here if process.role in COMPUTING_ROLES]
    beside = " ".join(_named(process) for process in here if process.role not in COMPUTING_ROLES)
    if not any(process.devices for process in processes):
        return host.name, " ".join(_label(process) for process in computing), beside
    first = sum(len(other.devices) for other in hosts[:place])
    cells = [
        "+".join(_label(process) for process in computing if number in process.devices) or "."
        for number in range(first, first + len(host.devices))
    ]
    width = max(map(len, cells), default=0)
    return host.name, " ".join(f"{cell:<{width}}" for cell in cells), beside


def _label(process: ProcessPlan) -> str:
    return f"{LETTERS[process.role]}{process.index}"


def _named(process: ProcessPlan) -> str:
    return process.role if process.role in ("buffer", "proxy", "controller") else process.name

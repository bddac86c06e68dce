"""The output of `flashflow check`: placement, derived numbers, warnings."""

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from flashflow.config.cautions import cautions
from flashflow.config.report import derived_numbers
from flashflow.config.sections import Config
from flashflow.launch.hosts import Host
from flashflow.launch.picture import picture
from flashflow.launch.plan import ProcessPlan, carrier, cores_wanted, idle_devices, plan, shared_devices
from flashflow.launch.seats import format_range


def print_check(config: Config, hosts: Sequence[Host], console: Console | None = None) -> None:
    """Prints to standard output unless told otherwise. Raises ConfigError when the hosts do not fit the config."""
    screen = console if console is not None else Console(soft_wrap=False)
    processes = plan(config, hosts)
    if config.run.runtime == "in_process":
        screen.print("placement: all in one process")
    else:
        screen.print(_placement(config, processes, hosts))
        screen.print(Text(picture(processes, hosts)), soft_wrap=True)
    screen.print(_numbers(config))
    for warning in warnings(config, processes, hosts):
        screen.print(f"[yellow]warning[/yellow] {warning}", highlight=False, soft_wrap=True)
    screen.print("the config is right", style="green")


def warnings(config: Config, processes: Sequence[ProcessPlan], hosts: Sequence[Host]) -> list[str]:
    """Of the rules, and of the hosts."""
    found = cautions(config)
    if config.run.runtime == "in_process" or config.simulated:
        return found
    placement, cores = config.placement, sum(len(host.cores) for host in hosts)
    wanted, idle, shared = cores_wanted(config), idle_devices(processes, hosts), shared_devices(processes)
    computing_on_cores = any(process.affinity is not None for process in processes) or cores < wanted
    if wanted > cores and computing_on_cores and not any(process.devices for process in processes):
        where = "this host has" if len(hosts) == 1 else f"{len(hosts)} hosts have"
        found.append(
            f"placement: trainer {placement.trainer} and engine {placement.engine}, of {placement.threads} thread(s) "
            f"each, want {wanted} cores, {where} {cores}: they share, and slow each other down"
        )
    if shared:
        found.append(
            f"placement: trainer and engines share device {format_range(shared)}, the only one: its memory must do for "
            "both, and they slow each other down"
        )
    if idle and config.model.device != "cpu":
        found.append(f"placement: nobody has devices {format_range(idle)}; raise placement.trainer or placement.engine")
    return found


def _placement(config: Config, processes: Sequence[ProcessPlan], hosts: Sequence[Host]) -> Table:
    title = f"placement on {len(hosts)} host{'s' if len(hosts) > 1 else ''}, weights by {carrier(config, processes)}"
    table = Table("process", "host", "address", "devices", "cores", "threads", title=title, title_justify="left")
    for first, last in _alike(processes):
        cores = [f"{format_range(process.affinity)}" for process in (first, last) if process.affinity is not None]
        numbers = [number for process in (first, last) for number in process.devices]
        name = first.name if first is last else f"{first.name} .. {last.index}"
        table.add_row(
            name,
            hosts[first.host].name,
            first.address,
            f"{min(numbers)}-{max(numbers)}" if len(set(numbers)) > 1 else "".join(map(str, numbers[:1])),
            " .. ".join(dict.fromkeys(cores)) or "any",
            str(first.threads),
        )
    return table


def _alike(processes: Sequence[ProcessPlan]) -> list[tuple[ProcessPlan, ProcessPlan]]:
    """First and last of each row of processes of one role on one host."""
    rows: list[tuple[ProcessPlan, ProcessPlan]] = []
    for process in processes:
        before = rows[-1][1] if rows else None
        if before is not None and (before.role, before.host) == (process.role, process.host):
            rows[-1] = (rows[-1][0], process)
        else:
            rows.append((process, process))
    return rows


def _numbers(config: Config) -> Table:
    table = Table("number", "value", "from", title="what follows from the config", title_justify="left")
    for number in derived_numbers(config):
        table.add_row(*number)
    return table

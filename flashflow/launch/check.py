"""The output of `flashflow check`: placement, derived numbers, warnings."""

import os

from rich.console import Console
from rich.table import Table

from flashflow.config.cautions import cautions
from flashflow.config.report import derived_numbers
from flashflow.config.sections import Config
from flashflow.launch.plan import cores_wanted, plan


def print_check(config: Config, console: Console | None = None) -> None:
    """Prints to standard output unless told otherwise."""
    screen = console if console is not None else Console(soft_wrap=False)
    cores = len(os.sched_getaffinity(0))
    screen.print(_placement(config, cores))
    screen.print(_numbers(config))
    for warning in warnings(config, cores):
        screen.print(f"[yellow]warning[/yellow] {warning}", highlight=False, soft_wrap=True)
    screen.print("the config is right", style="green")


def warnings(config: Config, cores: int) -> list[str]:
    """Of the rules, and of this host: `cores` that the run may use."""
    found = cautions(config)
    wanted = cores_wanted(config)
    if wanted > cores and config.run.runtime == "processes" and config.model.device != "cuda" and not config.simulated:
        placement = config.placement
        found.append(
            f"placement: trainer {placement.trainer} and engine {placement.engine}, of {placement.threads} thread(s) "
            f"each, want {wanted} cores, this host has {cores}: they share, and slow each other down"
        )
    return found


def _placement(config: Config, cores: int) -> Table:
    one = config.run.runtime == "in_process"
    title = "placement: all in one process" if one else f"placement on {cores} cores"
    table = Table("process", "threads", "cores", title=title, title_justify="left")
    for process in plan(config):
        pinned = process.affinity is not None and not one
        table.add_row(
            process.name, str(process.threads), " ".join(map(str, process.affinity or ())) if pinned else "any"
        )
    return table


def _numbers(config: Config) -> Table:
    table = Table("number", "value", "from", title="what follows from the config", title_justify="left")
    for number in derived_numbers(config):
        table.add_row(*number)
    return table

"""`flashflow train`: prepares the run folder, runs the roles, says how it ended."""

import asyncio
import contextlib
import fcntl
import os
import shutil
import time
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path

from flashflow.config import Config, dump_config
from flashflow.config.rules import the_context_fits_the_model
from flashflow.errors import ConfigError
from flashflow.launch import nursery
from flashflow.launch.directory import Over
from flashflow.launch.events import evaluations_path
from flashflow.launch.hosts import Host, bind_address, this_host
from flashflow.launch.nursery import Nursery
from flashflow.launch.plan import ProcessPlan, carrier, plan
from flashflow.launch.resume import refuse_changes
from flashflow.launch.run_facts import RunFacts
from flashflow.launch.startup import StartupLog, process_began, startup_path
from flashflow.observe.metrics import read_metrics
from flashflow.observe.progress import ProgressDisplay
from flashflow.transport.security import create_run_key, is_loopback
from flashflow.transport.weights.segment import remove_segments


def train(config: Config, *, resume: bool, overwrite: bool = False) -> int:
    """Exit code: 0 done, 1 failed, 130 or 143 ended by a signal (with a checkpoint). Raises ConfigError."""
    with ProgressDisplay() as display, locked(config.run_folder), nursery.opened(config) as forks:
        remove_leftovers(config.run_folder)
        config = prepare(config, display, resume=resume, overwrite=overwrite)
        display.start(config.run.steps, first_step=steps_done(config))
        if config.run.runtime == "in_process":
            from flashflow.launch.in_process import run_in_process

            code, failure = run_in_process(config, display, resume=resume), None
        else:
            code, failure = supervise(config, display, forks, resume=resume)
        display.finish(summary(config, code))
    if failure is not None:
        print(failure)
    return code


def prepare(config: Config, display: ProgressDisplay, *, resume: bool, overwrite: bool) -> Config:
    """The run folder with the resolved config; a builtin model is made first.

    Raises ConfigError, the run folder being as it was.
    """
    folder = config.run_folder
    stored = folder / "config.yaml"
    started = stored.exists()
    if resume and not started:
        raise ConfigError([f"run.name: nothing to resume in {folder}; remedy: start without --resume"])
    if started and not resume and not overwrite:
        raise ConfigError(
            [f"run.name: {folder} holds a run already; remedy: --resume, --overwrite, or another run.name=..."]
        )
    if resume:
        refuse_changes(config, stored)
    config = resolve_model(config, display)
    mistakes = list(the_context_fits_the_model(config.model, config.engine))  # of a builtin model, only known now
    if mistakes:
        raise ConfigError(mistakes)
    if resume:
        refuse_changes(config, stored)  # again, for the builtin model is a folder now
    elif started:
        _clear(folder)
    folder.mkdir(parents=True, exist_ok=True)
    torn = folder / "config.yaml.partial"  # whole or not at all: a resume compares with it
    torn.write_text(dump_config(config), encoding="utf-8")
    torn.replace(stored)
    return config


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Holds the run folder, so that a second run cannot train into the same one. Raises ConfigError."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "run.lock").open("a+") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.seek(0)
            holder = lock.read().strip()
            raise ConfigError(
                [f"run.name: {folder} is in use by process {holder}; remedy: end it, or another run.name=..."]
            ) from None
        lock.truncate(0)
        lock.write(f"{os.getpid()}\n")
        lock.flush()
        yield


def remove_leftovers(folder: Path) -> list[str]:
    """Staged weights and keys of earlier runs of this folder; the lock says that they are dead. Returns their ids."""
    left = sorted((folder / "gang").glob("*-*"))
    run_ids = [entry.name.rpartition("-")[0] for entry in left]
    for run_id in run_ids:
        remove_segments(run_id)
    for entry in left:
        shutil.rmtree(entry)
    for name in ("weights", "keys"):
        shutil.rmtree(folder / name, ignore_errors=True)
    return run_ids


def resolve_model(config: Config, display: ProgressDisplay) -> Config:
    """Builtin models become folders."""
    from flashflow import builtin

    return builtin.resolve(config, display.note)


def supervise(
    config: Config, display: ProgressDisplay, forks: Nursery | None, *, resume: bool
) -> tuple[int, str | None]:
    """All processes on this host, as the only slot of the run: exit code and the first failure as text."""
    began = process_began()
    startup = StartupLog(startup_path(config.run_folder), began)
    startup.reached("supervisor", "started", began)
    startup.reached("supervisor", "configured", time.monotonic())
    if forks is not None:
        startup.reached("nursery", "started", forks.started)
    from flashflow.launch.directory import LocalDirectory
    from flashflow.launch.supervise import Supervisor

    hosts = [this_host(bind_address(config.network.interface))]
    processes = plan(config, hosts)
    facts = run_facts(config, processes, hosts, resume=resume)

    async def run() -> Over:
        supervisor = Supervisor(
            config,
            processes,
            facts,
            directory=LocalDirectory(),
            display=display,
            startup=startup,
            impatient=True,
            nursery=forks,
        )
        return await supervisor.run()

    try:
        over = asyncio.run(run())
        return over.code, over.failure
    finally:
        tidy(facts)


def tidy(facts: RunFacts) -> None:
    """What a run leaves on its hosts when processes were killed; each host removes its own."""
    remove_segments(facts.run_id)
    if facts.key is not None:
        Path(facts.key).unlink(missing_ok=True)


def run_facts(config: Config, processes: Sequence[ProcessPlan], hosts: Sequence[Host], *, resume: bool) -> RunFacts:
    """Of a new run id; makes its key when an address leaves its host (contract 6), and its entry in the run folder."""
    run_id = uuid.uuid4().hex[:12]
    (config.run_folder / "gang" / f"{run_id}-1").mkdir(parents=True)
    key = None
    if not all(is_loopback(host.address) for host in hosts):
        path = config.run_folder / "keys" / f"{run_id}.key"
        path.parent.mkdir(mode=0o700, exist_ok=True)
        create_run_key(path)
        key = str(path)
    return RunFacts(run_id=run_id, resume=resume, carrier=carrier(config, processes), key=key)


def steps_done(config: Config) -> int:
    """Steps in the metrics of the run folder."""
    lines = read_metrics(config.run_folder / "metrics.jsonl")
    return int(lines[-1]["step"]) if lines else 0


def summary(config: Config, code: int) -> dict[str, object]:
    """What a person wants to know at the end, read back from metrics.jsonl."""
    lines = read_metrics(config.run_folder / "metrics.jsonl")
    accuracies = [record["accuracy"] for record in read_metrics(evaluations_path(config.run_folder))]
    result: dict[str, object] = {
        "exit_code": code,
        "steps": lines[-1]["step"] if lines else 0,
        "run_folder": str(config.run_folder),
    }
    if lines:
        result["reward_mean"] = lines[-1]["reward_mean"]
        result["staleness_max"] = max(line["staleness_max"] for line in lines)
    if accuracies:
        result["accuracy_first"], result["accuracy_last"] = accuracies[0], accuracies[-1]
    return result


def _clear(folder: Path) -> None:
    """Remove only what a run makes; whatever else lies there is the user's."""
    for name in ("journal", "checkpoints", "logs", "gang", "weights", "tensorboard", "evaluations"):
        shutil.rmtree(folder / name, ignore_errors=True)
    for name in ("metrics.jsonl", "evaluations.jsonl", "config.yaml", "startup.json", "trace.json", "report.html"):
        (folder / name).unlink(missing_ok=True)

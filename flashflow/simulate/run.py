"""`flashflow simulate`: the roles of a real run, on the virtual clock, with simulated engines, trainer, environments.

What is replaced schedules nothing: sockets by queues, the journal's files by memory, waiting by jumps of the clock.
"""

import asyncio
import contextlib
import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from flashflow.clock import Clock, LoopClock
from flashflow.config import Config
from flashflow.config.sections import JournalSection, NetworkSection
from flashflow.config.simulated import SimulatedTrainerSection
from flashflow.errors import ConfigError, first_cause
from flashflow.journal.memory import open_in_memory
from flashflow.launch.in_process import Surroundings, play
from flashflow.messages import EvalReply
from flashflow.roles.controller import Outcome
from flashflow.simulate.clock import run_virtual
from flashflow.simulate.figures import Figures, figures
from flashflow.simulate.spans import Recorder, write_trace
from flashflow.trainers.simulated import SimulatedTrainer
from flashflow.transport.in_process import InProcessNetwork, InProcessTransport

LONG_POLL_S = 60.0
"""An idle env asks again so often: on the virtual clock each poll costs, and none is needed."""

GARBAGE_THRESHOLD = 200_000
"""Objects made, less objects freed, between two looks of the collector."""

_UNHURRIED = JournalSection(fsync_s=LONG_POLL_S)
"""Nothing has to reach a disk."""


class Simulation(msgspec.Struct, frozen=True):
    """A run that has ended."""

    outcome: Outcome
    records: list[dict[str, Any]]
    """Of the steps, as in metrics.jsonl."""
    spans: Any
    """The Recorder."""
    figures: Figures


class Records:
    """Keeps what the controller reports."""

    def __init__(self) -> None:
        self.steps: list[dict[str, Any]] = []
        self._evaluated: set[int] = set()

    def step(self, record: dict[str, Any]) -> None:
        self.steps.append(record)

    def evaluation(self, reply: EvalReply) -> None:
        self._evaluated.add(reply.version)

    def evaluated(self, version: int) -> bool:
        return version in self._evaluated

    def note(self, text: str) -> None: ...


def simulate(config: Config, *, seconds: float | None = None) -> Simulation:
    """run.steps steps, or those of so many virtual seconds. Deterministic. Raises what a role raises; ConfigError when
    the config is of real parts, or no step ends in time."""
    if not config.simulated:
        raise ConfigError(
            [f"trainer.kind: {config.trainer.kind} cannot be simulated; make engine, trainer and data.source simulated"]
        )
    records, spans = Records(), Recorder(config.simulate.trace_spans)
    try:
        with _little_garbage():
            outcome = run_virtual(_run(config, records, spans, seconds))
    except BaseExceptionGroup as group:
        raise first_cause(group) from group
    try:
        found = figures(config, records.steps, spans)
    except ValueError as error:
        raise ConfigError([f"run.steps: {config.run.steps}: {error}"]) from error
    return Simulation(outcome, records.steps, spans, found)


def write(simulation: Simulation, folder: Path) -> Path:
    """trace.json and simulation.json in the run folder; returns the path of the trace."""
    folder.mkdir(parents=True, exist_ok=True)
    trace = folder / "trace.json"
    write_trace(trace, simulation.spans.spans)
    encoded = msgspec.json.encode({"figures": simulation.figures, "steps": simulation.records})
    (folder / "simulation.json").write_bytes(msgspec.json.format(encoded))
    return trace


@contextlib.contextmanager
def _little_garbage() -> Iterator[None]:
    """The collector looks at every living object again and again, and here hardly any of them is ever garbage: left to
    itself it took a quarter of the time."""
    usual = gc.get_threshold()
    gc.set_threshold(GARBAGE_THRESHOLD, *usual[1:])
    try:
        yield
    finally:
        gc.set_threshold(*usual)


async def _run(config: Config, records: Records, spans: Recorder, seconds: float | None) -> Outcome:
    config = config.model_copy(update={"network": _patient(config.network), "journal": _UNHURRIED})
    message_s = config.simulate.message_s
    delay = (lambda sender, receiver, message: message_s) if message_s else None

    def make_trainer(config: Config, transport: InProcessTransport, clock: Clock) -> SimulatedTrainer:
        assert isinstance(config.trainer, SimulatedTrainerSection)
        return SimulatedTrainer(
            section=config.trainer,
            rank=0,
            buffer=transport.client("buffer-0"),
            folder=None,
            checkpoint=config.checkpoint,
            network=config.network,
            clock=clock,
            run_id="simulated",
            spans=spans,
        )

    around = Surroundings(
        events=records,
        network=InProcessNetwork(config.network, through_codec=False, delay=delay),
        open_journal=open_in_memory,
        make_trainer=make_trainer,
        spans=spans,
        on_end=spans.close,
    )
    return await play(config, around, resume=False, clock=LoopClock(), on_stoppable=_after(seconds))


def _after(seconds: float | None) -> Callable[[Callable[[], None]], None]:
    def arrange(stop: Callable[[], None]) -> None:
        if seconds is not None:
            asyncio.get_running_loop().call_at(seconds, stop)

    return arrange


def _patient(network: NetworkSection) -> NetworkSection:
    """Nobody is slow or dead here: who waits may wait long without asking again."""
    long_poll_s = max(LONG_POLL_S, network.long_poll_s)
    return network.model_copy(
        update={"long_poll_s": long_poll_s, "call_deadline_s": max(network.call_deadline_s, 2 * long_poll_s)}
    )

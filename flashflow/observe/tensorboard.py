"""Numbers of a step as TensorBoard events, through tensorboard's own writer; torch is not needed for it."""

import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tensorboard.compat.proto.event_pb2 import Event, SessionLog  # type: ignore[import-untyped]
from tensorboard.compat.proto.summary_pb2 import Summary  # type: ignore[import-untyped]
from tensorboard.summary.writer.event_file_writer import EventFileWriter  # type: ignore[import-untyped]

FLUSH_S = 10
"""A reader sees a step at most so much later; a process that dies loses so much of the curves, none of the metrics."""


class EventWriter:
    """One file per start of a run, as TensorBoard expects them."""

    def __init__(self, folder: Path) -> None:
        self._writer = EventFileWriter(str(folder), flush_secs=FLUSH_S)

    def write(self, step: int, record: Mapping[str, Any]) -> None:
        """Every number of the record; those in a map get the tag `name/key`, what is no number is left out."""
        values = [Summary.Value(tag=tag, simple_value=value) for tag, value in _numbers(record)]
        self._writer.add_event(Event(wall_time=time.time(), step=step, summary=Summary(value=values)))

    def forget_after(self, step: int) -> None:
        """Readers drop what earlier files say of later steps."""
        start = SessionLog(status=SessionLog.START)
        self._writer.add_event(Event(wall_time=time.time(), step=step + 1, session_log=start))

    def close(self) -> None:
        self._writer.close()


def _numbers(record: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    for name, value in record.items():
        match value:
            case bool():
                pass
            case int() | float():
                yield prefix + name, float(value)
            case Mapping():
                yield from _numbers(value, f"{prefix}{name}/")
            case _:
                pass

"""What the controller reports: into the run folder, and to whoever watches."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from flashflow.observe.metrics import MetricsWriter


class RunEvents:
    """Steps already on disk, redone after a restart, are not written twice."""

    def __init__(
        self,
        run_folder: Path,
        *,
        on_step: Callable[[dict[str, Any]], None],
        on_evaluation: Callable[[int, float, float], None],
        on_note: Callable[[str], None],
    ) -> None:
        self._metrics = MetricsWriter(run_folder)
        self._on_step = on_step
        self._on_evaluation = on_evaluation
        self._on_note = on_note

    def step(self, record: dict[str, Any]) -> None:
        if record["step"] <= self._metrics.last_step:
            self._on_note(f"step {record['step']} was trained again from its manifest")
            return
        self._metrics.write(record)
        self._on_step(record)

    def evaluation(self, version: int, accuracy: float, seconds: float) -> None:
        self._on_evaluation(version, accuracy, seconds)

    def note(self, text: str) -> None:
        self._on_note(text)

    def close(self) -> None:
        self._metrics.close()

"""What the controller reports: into the run folder, and to whoever watches."""

from collections.abc import Callable
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import msgspec

from flashflow.observe.metrics import MetricsWriter, read_metrics

if TYPE_CHECKING:
    from flashflow.messages import EvalReply


class RunEvents:
    """Writes metrics.jsonl and evaluations.jsonl; steps on disk already, redone after a restart, not twice."""

    def __init__(
        self,
        run_folder: Path,
        *,
        on_step: Callable[[dict[str, Any]], None],
        on_evaluation: "Callable[[EvalReply], None]",
        on_note: Callable[[str], None],
    ) -> None:
        self._metrics = MetricsWriter(run_folder)
        path = evaluations_path(run_folder)
        self._evaluated = {record["version"] for record in read_metrics(path)}
        self._evaluations: IO[str] = path.open("a", encoding="utf-8")
        self._on_step = on_step
        self._on_evaluation = on_evaluation
        self._on_note = on_note

    def step(self, record: dict[str, Any]) -> None:
        if record["step"] <= self._metrics.last_step:
            self._on_note(f"step {record['step']} was trained again from its manifest")
            return
        self._metrics.write(record)
        self._on_step(record)

    def evaluation(self, reply: "EvalReply") -> None:
        self._evaluated.add(reply.version)
        self._evaluations.write(msgspec.json.encode(msgspec.structs.asdict(reply)).decode() + "\n")
        self._evaluations.flush()
        self._on_evaluation(reply)

    def evaluated(self, version: int) -> bool:
        return version in self._evaluated

    def note(self, text: str) -> None:
        self._on_note(text)

    def close(self) -> None:
        self._metrics.close()
        self._evaluations.close()


def evaluations_path(run_folder: Path) -> Path:
    return run_folder / "evaluations.jsonl"

"""metrics.jsonl of a run folder: one JSON object per trained step, in order, and the same as TensorBoard events."""

import json
import math
import os
from collections.abc import Mapping
from numbers import Integral, Real
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from flashflow.errors import ContractError

REQUIRED_STEP_KEYS = (
    "step",
    "version",
    "published_version",
    "reward_mean",
    "staleness_mean",
    "staleness_max",
    "staleness_histogram",
    "groups",
    "samples",
    "tokens_trained",
    "tokens_generated",
    "tokens_wasted",
    "time_step_s",
    "time_wait_s",
    "time_train_s",
    "time_sync_s",
    "loss",
    "grad_norm",
    "clip_fraction",
    "rho_mean",
    "mismatch_k3",
    "entropy",
)
"""What every step must say. `eval_accuracy` comes with the steps that learnt of an evaluation; r and w are there unless
an algorithm without prox pass takes several optimizer steps a batch."""
MEASURED_KEYS = frozenset({"rho_mean", "mismatch_k3", "entropy"})
"""Not of an `empty_batch`, in which no token counts."""
NONFINITE_KEY = "nonfinite_values"
"""Number of NaN and infinite values of the step, which JSON cannot hold and which are written as null."""


class MetricsWriter:
    """Appends steps, a line each; a line that a dying host left torn is dropped at the next open."""

    def __init__(self, run_folder: Path) -> None:
        from flashflow.observe.tensorboard import EventWriter  # for writers only: 0.2 s of imports

        run_folder.mkdir(parents=True, exist_ok=True)
        self._path = run_folder / "metrics.jsonl"
        kept = read_metrics(self._path)
        self._last_step = kept[-1]["step"] if kept else 0
        _drop_torn_line(self._path)
        self._file = self._path.open("a", encoding="utf-8")
        self._events = EventWriter(run_folder / "tensorboard")

    @property
    def last_step(self) -> int:
        """Newest step in the file; 0 when it is empty."""
        return self._last_step

    def write(self, record: Mapping[str, Any]) -> None:
        """Raises ContractError when a required key is missing, or the step does not come after the last one."""
        excused = MEASURED_KEYS if record.get("empty_batch") else frozenset()
        missing = [key for key in REQUIRED_STEP_KEYS if key not in record and key not in excused]
        if missing:
            raise ContractError(
                f"metrics of step {record.get('step')} lack {', '.join(missing)}; their source must give them"
            )
        step = int(record["step"])
        if step <= self._last_step:
            raise ContractError(
                f"metrics of step {step} come after those of step {self._last_step}; truncate_after first"
            )
        plain, nonfinite = _plain(dict(record))
        line = json.dumps({**plain, NONFINITE_KEY: nonfinite}, separators=(",", ":"), allow_nan=False)
        self._file.write(line + "\n")
        self._file.flush()
        self._events.write(step, plain)
        self._last_step = step

    def truncate_after(self, step: int) -> int:
        """Drops what was written of later steps, because they will be trained again; returns how many lines went."""
        records = read_metrics(self._path)
        kept = [record for record in records if record["step"] <= step]
        if len(kept) < len(records):
            self._file.close()
            temporary = self._path.with_suffix(".partial")
            temporary.write_text("".join(json.dumps(record, separators=(",", ":")) + "\n" for record in kept))
            os.replace(temporary, self._path)
            self._file = self._path.open("a", encoding="utf-8")
        self._last_step = kept[-1]["step"] if kept else 0
        self._events.forget_after(step)
        return len(records) - len(kept)

    def close(self) -> None:
        self._file.close()
        self._events.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Steps of a metrics.jsonl in order; [] when there is none. A last line without its end is left out.

    Raises ContractError for a damaged line elsewhere.
    """
    if not path.exists():
        return []
    text = path.read_text(encoding="utf-8")
    records: list[dict[str, Any]] = []
    for number, line in enumerate(text.split("\n")[:-1], start=1):
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise ContractError(f"{path} line {number} is damaged ({error}); mend or remove it") from error
        records.append(record)
    return records


def _drop_torn_line(path: Path) -> None:
    if path.exists():
        content = path.read_bytes()
        whole = content.rfind(b"\n") + 1
        if whole < len(content):
            os.truncate(path, whole)


def _plain(value: Any) -> tuple[Any, int]:
    """`value` in JSON's own types, and how many numbers in it had to become null."""
    match value:
        case bool() | str() | None:
            return value, 0
        case Integral():
            return int(value), 0
        case Real():
            return (float(value), 0) if math.isfinite(value) else (None, 1)
        case Mapping():
            parts = {str(key): _plain(item) for key, item in value.items()}
            return {key: part for key, (part, _) in parts.items()}, sum(count for _, count in parts.values())
        case list() | tuple():
            items = [_plain(item) for item in value]
            return [item for item, _ in items], sum(count for _, count in items)
        case _:
            raise ContractError(
                f"metrics hold a {type(value).__name__} ({value!r}); give plain numbers, text, lists or maps"
            )

"""Reads the rows of a dataset: JSONL, Parquet, Hugging Face `datasets`, reasoning-gym.

Each source gives rows to train on and, where there are any, held-out rows. Optional packages are imported on use.
"""

import difflib
import importlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, assert_never

from flashflow.config.sections import (
    HuggingFaceData,
    JsonlData,
    ParquetData,
    ReasoningGymData,
    Source,
)
from flashflow.config.simulated import SimulatedData
from flashflow.data.packages import optional_package
from flashflow.data.plain import plain
from flashflow.data.split import is_held_out
from flashflow.errors import ConfigError, ContractError

Row = Mapping[str, Any]
"""Columns of one row."""


class Rows(NamedTuple):
    """The two disjoint parts of a source."""

    train: Sequence[Row]
    held_out: Sequence[Row]
    """Empty where the config names none."""


def read_source(source: Source) -> Rows:
    """Raises ConfigError: a missing package, file, folder, split or task; a line that is no JSON object; no rows."""
    match source:
        case JsonlData():
            rows = Rows(read_jsonl(source.path), read_jsonl(source.eval_path) if source.eval_path is not None else [])
        case ParquetData():
            held_out = read_parquet(source.eval_path) if source.eval_path is not None else []
            rows = Rows(read_parquet(source.path), held_out)
        case HuggingFaceData():
            rows = read_hugging_face(source)
        case ReasoningGymData():
            rows = read_reasoning_gym(source)
        case SimulatedData():
            raise ContractError("simulated tasks have no rows; data.stream makes them")
        case _:
            assert_never(source)
    if not rows.train:
        raise ConfigError([f"data.source: {source!r} has no rows to train on"])
    return rows


def read_jsonl(path: Path) -> list[Row]:
    """One JSON object per line; blank lines are skipped."""
    rows: list[Row] = []
    with _existing(path).open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise ConfigError([f"data.source: {path} line {number} is not JSON: {error}"]) from error
            if not isinstance(row, dict):
                raise ConfigError([f"data.source: {path} line {number} is a {type(row).__name__}, not a JSON object"])
            rows.append(row)
    return rows


class ArrowRows(Sequence[Row]):
    """Rows of an Arrow table, made when they are asked for."""

    def __init__(self, table: Any) -> None:
        self._table = table

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def __getitem__(self, index: Any) -> Any:
        return self._table.slice(index, 1).to_pylist()[0]

    def __iter__(self) -> Iterator[Row]:
        for batch in self._table.to_batches():
            yield from batch.to_pylist()


def read_parquet(path: Path) -> Sequence[Row]:
    parquet = optional_package("pyarrow.parquet", "pyarrow", "data.source")
    return ArrowRows(parquet.read_table(_existing(path)))


def read_hugging_face(source: HuggingFaceData) -> Rows:
    """A folder written by save_to_disk, or else whatever `load_dataset` takes."""
    datasets = optional_package("datasets", "datasets", "data.source")
    folder = Path(source.path)
    if (folder / "dataset_info.json").exists() or (folder / "dataset_dict.json").exists():
        return _saved_dataset(datasets.load_from_disk(source.path), source)
    try:
        train = datasets.load_dataset(source.path, source.name, split=source.split)
        if source.eval_split is None:
            return Rows(train, [])
        return Rows(train, datasets.load_dataset(source.path, source.name, split=source.eval_split))
    except (ValueError, OSError) as error:
        raise ConfigError([f"data.source: datasets cannot load {source!r}: {error}"]) from error


def _saved_dataset(loaded: Any, source: HuggingFaceData) -> Rows:
    if not isinstance(loaded, dict):
        if source.eval_split is not None:
            reason = f"{source.path} is one dataset without splits; save a DatasetDict or leave eval_split out"
            raise ConfigError([f"data.source.eval_split: {source.eval_split!r}, but {reason}"])
        return Rows(loaded, [])
    for field, split in (("split", source.split), ("eval_split", source.eval_split)):
        if split is not None and split not in loaded:
            raise ConfigError([f"data.source.{field}: no {split!r} in {source.path}, which has {sorted(loaded)}"])
    return Rows(loaded[source.split], loaded[source.eval_split] if source.eval_split is not None else [])


def read_reasoning_gym(source: ReasoningGymData) -> Rows:
    """Generates `size` problems and keeps each distinct question once, in the part its hash puts it.

    The problems depend on `options` alone (`seed` among them, 0 by default), so runs of different seeds are
    evaluated on the same ones.
    """
    questions: set[str] = set()
    rows = Rows([], [])
    for entry in _reasoning_gym_entries(source):
        question = str(entry["question"])
        if question in questions:
            continue
        questions.add(question)
        row = {"prompt": question, "answer": plain(entry["answer"]), "metadata": plain(entry["metadata"])}
        (rows.held_out if is_held_out(question) else rows.train).append(row)  # type: ignore[attr-defined]
    return rows


def _reasoning_gym_entries(source: ReasoningGymData) -> Iterable[Mapping[str, Any]]:
    reasoning_gym = optional_package("reasoning_gym", "reasoning-gym", "data.source")
    known = list(importlib.import_module("reasoning_gym.factory").DATASETS)
    if source.task not in known:
        near = ", ".join(difflib.get_close_matches(source.task, known, n=3)) or "none"
        raise ConfigError([f"data.source.task: reasoning-gym has no {source.task!r}; nearest: {near}"])
    if "size" in source.options:
        raise ConfigError([f"data.source.options: size {source.options['size']!r} belongs in data.source.size"])
    try:
        dataset = reasoning_gym.create_dataset(source.task, **{"seed": 0, **source.options, "size": source.size})
    except (TypeError, ValueError, AssertionError) as error:
        raise ConfigError([f"data.source.options: {source.task} refuses {source.options}: {error}"]) from error
    return (dataset[index] for index in range(source.size))


def _existing(path: Path) -> Path:
    if not path.is_file():
        raise ConfigError([f"data.source: no file {path} (looked from {Path.cwd()})"])
    return path

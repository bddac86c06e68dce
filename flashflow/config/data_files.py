"""A look into a local data file before a run starts: its columns, and whether it has enough rows."""

import json
from pathlib import Path
from typing import Literal, NamedTuple


class Glance(NamedTuple):
    columns: list[str]
    """Of the first row; of the schema for Parquet."""
    num_rows: int
    """At least this many; all of them when fewer than were asked for."""


def look_into(path: Path, kind: Literal["jsonl", "parquet"], enough: int) -> Glance:
    """Reads no further than the first row and `enough` (at least 1) rows need.

    Raises OSError or ValueError, which say what is wrong with the file; ImportError without pyarrow.
    """
    return _parquet(path) if kind == "parquet" else _jsonl(path, enough)


def _jsonl(path: Path, enough: int) -> Glance:
    """Blank lines are no rows, as when the data is read."""
    columns: list[str] = []
    num_rows = 0
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            if num_rows == 0:
                columns = _keys(line, number)
            num_rows += 1
            if num_rows >= enough:
                break
    return Glance(columns, num_rows)


def _keys(line: str, number: int) -> list[str]:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"line {number} is not JSON: {error}") from error
    if not isinstance(row, dict):
        raise ValueError(f"line {number} is a {type(row).__name__}, not a JSON object")
    return list(row)


def _parquet(path: Path) -> Glance:
    from pyarrow import ArrowException, parquet

    try:
        with parquet.ParquetFile(path) as file:
            return Glance(list(file.schema_arrow.names), int(file.metadata.num_rows))
    except ArrowException as error:
        raise ValueError(f"not a Parquet file: {error}") from error

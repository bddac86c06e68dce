"""The endless stream of tasks: a pure function from cursor to task."""

import hashlib
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from flashflow.config.sections import DataSection
from flashflow.config.simulated import SimulatedData
from flashflow.data.base import TaskStream
from flashflow.data.plain import plain
from flashflow.data.simulated import SimulatedStream
from flashflow.data.sources import Row, Rows, read_source
from flashflow.errors import ConfigError
from flashflow.records import Task


def make_stream(section: DataSection, seed: int) -> TaskStream:
    """Reads the source and checks it. Raises ConfigError: see read_source; a row without a usable prompt; a held-out
    prompt that is also trained on."""
    if isinstance(section.source, SimulatedData):
        return SimulatedStream(section, section.source, seed)
    rows = read_source(section.source)
    _check_disjoint(rows, section.prompt_column)
    return ShuffledStream(rows, section, seed)


class ShuffledStream:
    """A shuffle per pass, keyed by (seed, pass): any cursor is found without the ones before it.

    A task's row has the source's columns, reduced to plain types; `prompt` is the column the config names.
    """

    def __init__(self, rows: Rows, section: DataSection, seed: int) -> None:
        self._train, self._held_out = rows
        self._section = section
        self._seed = seed
        self._orders: dict[int, npt.NDArray[np.int64]] = {}

    def __len__(self) -> int:
        """Tasks in one pass."""
        return len(self._train)

    def task(self, cursor: int) -> Task | None:
        """Raises ValueError for a negative cursor."""
        if cursor < 0:
            raise ValueError(f"cursor {cursor} is negative")
        number, place = divmod(cursor, len(self._train))
        if self._section.epochs is not None and number >= self._section.epochs:
            return None
        index = int(self._order(number)[place]) if self._section.shuffle else place
        return self._as_task(cursor, self._train[index])

    def eval_tasks(self, count: int) -> list[Task]:
        """The first `count` held-out problems, in the order of the source; a cursor counts them from 0."""
        available = len(self._held_out)
        if available < count:
            reason = f"data.source holds out {available}; {self._remedy()}"
            raise ConfigError([f"evaluation.problems: {count}, but {reason}"])
        return [self._as_task(index, self._held_out[index]) for index in range(count)]

    def _remedy(self) -> str:
        match self._section.source.kind:
            case "reasoning_gym":
                return "raise data.source.size, or lower evaluation.problems"
            case "datasets":
                return "set data.source.eval_split, or lower evaluation.problems"
            case _:
                return "set data.source.eval_path, or lower evaluation.problems"

    def _order(self, number: int) -> npt.NDArray[np.int64]:
        """The permutation of pass `number`. Two are kept: tasks of the last pass may still come back."""
        if number not in self._orders:
            if len(self._orders) >= 2:
                del self._orders[min(self._orders)]
            self._orders[number] = np.random.default_rng([self._seed, number]).permutation(len(self._train))
        return self._orders[number]

    def _as_task(self, cursor: int, row: Row) -> Task:
        return Task(cursor=cursor, row={**plain(dict(row)), "prompt": plain(row[self._section.prompt_column])})


def _check_disjoint(rows: Rows, column: str) -> None:
    """Looks at every prompt once: it must be usable, and a held-out one must not be trained on."""
    held_out = {_digest(prompt) for prompt in _prompts(rows.held_out, column, "held-out")}
    for index, prompt in enumerate(_prompts(rows.train, column, "training")):
        if _digest(prompt) in held_out:
            reason = "is also held out; evaluation would measure memory. Remove it from one of the two"
            raise ConfigError([f"data.source: the prompt of training row {index} {reason}: {_short(prompt)}"])


def _prompts(rows: Sequence[Row], column: str, part: str) -> Iterable[Any]:
    for index, row in enumerate(rows):
        if column not in row:
            columns = f"the columns are {', '.join(sorted(map(str, row)))}"
            raise ConfigError([f"data.prompt_column: no {column!r} in {part} row {index}; {columns}"])
        prompt = row[column]
        if not _is_prompt(prompt):
            expected = "expected a non-empty string or a list of messages {role, content}"
            raise ConfigError([f"data.prompt_column: {column} of {part} row {index} is {_short(prompt)}; {expected}"])
        yield prompt


def _is_prompt(prompt: Any) -> bool:
    if isinstance(prompt, str):
        return bool(prompt)
    return (
        isinstance(prompt, list)
        and bool(prompt)
        and all(isinstance(message, dict) and {"role", "content"} <= message.keys() for message in prompt)
    )


def _digest(prompt: Any) -> bytes:
    return hashlib.sha256(msgspec.msgpack.encode(plain(prompt))).digest()


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 200 else text[:200] + "..."

"""Trajectories on disk, in segments that are deleted whole once nothing needs them."""

import os
from collections.abc import Set
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from flashflow.errors import JournalError
from flashflow.journal.framing import HEADER_BYTES, AppendFile, unframe
from flashflow.ledger.events import Location
from flashflow.records import Outcome, SampleId, Trajectory


class _Stored(msgspec.Struct, frozen=True, array_like=True):
    """A Trajectory with its arrays as raw little-endian bytes."""

    sample: SampleId
    tokens: bytearray
    mask: bytearray
    logprobs: bytearray
    versions: bytearray
    num_turns: int
    outcome: Outcome
    reward: float | None
    reward_components: dict[str, float]
    finish_reason: str
    seconds: float


_ARRAYS = {"tokens": "<i4", "mask": "u1", "logprobs": "<f4", "versions": "<i4"}
_PLAIN = tuple(name for name in _Stored.__struct_fields__ if name not in _ARRAYS)


def encode_trajectory(trajectory: Trajectory) -> bytes:
    arrays: dict[str, Any] = {
        name: np.ascontiguousarray(getattr(trajectory, name), dtype).data.cast("B") for name, dtype in _ARRAYS.items()
    }
    return msgspec.msgpack.encode(_Stored(**arrays, **{name: getattr(trajectory, name) for name in _PLAIN}))


def decode_trajectory(data: bytes) -> Trajectory:
    """Raises msgspec.DecodeError. The arrays may be written to."""
    stored = msgspec.msgpack.decode(data, type=_Stored)
    arrays: dict[str, Any] = {name: np.frombuffer(getattr(stored, name), dtype) for name, dtype in _ARRAYS.items()}
    return Trajectory(**arrays, **{name: getattr(stored, name) for name in _PLAIN})


class Payloads:
    """Appends to the newest segment; reads any."""

    def __init__(self, folder: Path, segment_bytes: int) -> None:
        self._folder = folder
        self._segment_bytes = segment_bytes
        self._number = max(self._numbers(), default=-1) + 1
        self._current = AppendFile(self._path(self._number))
        self._full: list[AppendFile] = []
        """Closed to writing, not yet known to be on the disk."""

    def append(self, trajectory: Trajectory) -> Location:
        if self._current.size >= self._segment_bytes:
            self._full.append(self._current)
            self._number += 1
            self._current = AppendFile(self._path(self._number))
        body = encode_trajectory(trajectory)
        return Location(self._number, self._current.append(body), len(body))

    def durable(self, location: Location) -> bool:
        """Whether the record is known to be on the disk."""
        if location.segment == self._number:
            return location.offset + HEADER_BYTES + location.length <= self._current.synced
        return all(file.path != self._path(location.segment) for file in self._full)

    @property
    def newest(self) -> int:
        """Number of the segment being written."""
        return self._number

    @property
    def dirty(self) -> bool:
        return bool(self._full) or self._current.size > self._current.synced

    def sync(self) -> None:
        """Blocks. Safe beside append() in another thread, not beside another sync()."""
        current = self._current
        for file in list(self._full):
            file.sync()
            file.close()
            self._full.remove(file)
        current.sync()

    def read(self, location: Location) -> Trajectory:
        """Blocks. Raises JournalError, naming file and offset, when the record is gone or damaged."""
        body = self._read(location)
        if body is None:
            raise JournalError(f"{self._path(location.segment)}: no sound payload at byte {location.offset}")
        return decode_trajectory(body)

    def intact(self, location: Location) -> bool:
        return self._read(location) is not None

    def keep_only(self, segments: Set[int]) -> None:
        """Deletes every other segment but the one being written."""
        unsynced = {file.path for file in self._full}
        for number in self._numbers():
            if number not in segments and number != self._number and self._path(number) not in unsynced:
                self._path(number).unlink()

    def close(self) -> None:
        for file in [*self._full, self._current]:
            file.close()

    def _read(self, location: Location) -> bytes | None:
        try:
            fd = os.open(self._path(location.segment), os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        try:
            body = unframe(os.pread(fd, HEADER_BYTES + location.length, location.offset), 0)
        finally:
            os.close(fd)
        return body if body is not None and len(body) == location.length else None

    def _numbers(self) -> list[int]:
        return sorted(int(path.stem.removeprefix("payload-")) for path in self._folder.glob("payload-*.log"))

    def _path(self, number: int) -> Path:
        return self._folder / f"payload-{number:06d}.log"

"""How records lie in a journal file: [length u32][crc32 u32][bytes], little-endian; and an append-only file of them.

The checksum covers the length too, so that a stretch of zeros, which a dying host leaves, is never a record.
"""

import os
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path

from flashflow.errors import JournalError

_LENGTH = struct.Struct("<I")
_HEADER = struct.Struct("<II")
HEADER_BYTES = _HEADER.size
RESYNC_BYTES = 1 << 20
"""How far behind a damaged record a sound one is looked for."""


def frame(body: bytes) -> bytes:
    length = _LENGTH.pack(len(body))
    return length + _LENGTH.pack(zlib.crc32(body, zlib.crc32(length))) + body


def unframe(data: bytes | memoryview, offset: int) -> bytes | None:
    """The record at `offset`, or None when there is no sound one."""
    if offset + HEADER_BYTES > len(data):
        return None
    length, checksum = _HEADER.unpack_from(data, offset)
    end = offset + HEADER_BYTES + length
    if length == 0 or end > len(data):
        return None
    body = bytes(data[offset + HEADER_BYTES : end])
    return body if zlib.crc32(body, zlib.crc32(_LENGTH.pack(length))) == checksum else None


def read_records(path: Path, *, may_be_torn: bool) -> Iterator[tuple[int, bytes]]:
    """(offset behind the record, its bytes). Stops before a torn last record if there may be one.

    Raises JournalError for any other damage: a sound record lies behind it, or the file was finished in order.
    """
    data = path.read_bytes()
    offset = 0
    while offset < len(data):
        body = unframe(data, offset)
        if body is None:
            if may_be_torn and not _sound_behind(data, offset):
                return
            raise JournalError(
                f"{path}: the record at byte {offset} is damaged and not the torn end of the file; "
                "restore the file from a copy, or start a new run from the last checkpoint"
            )
        offset += HEADER_BYTES + len(body)
        yield offset, body


def _sound_behind(data: bytes, damaged: int) -> bool:
    last = min(len(data), damaged + RESYNC_BYTES)
    return any(unframe(data, offset) is not None for offset in range(damaged + 1, last))


class AppendFile:
    """A new file written record by record without a buffer of ours; what write() returned from survives the process."""

    def __init__(self, path: Path) -> None:
        """Raises FileExistsError: no file of a journal is ever continued."""
        self.path = path
        self.size = 0
        self.synced = 0
        """Bytes known to be on the disk."""
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o644)

    def append(self, body: bytes) -> int:
        """Returns the record's offset. Raises OSError, leaving no part of the record (a full disk)."""
        offset, rest = self.size, memoryview(frame(body))
        try:
            while rest:
                rest = rest[os.write(self._fd, rest) :]
        except OSError:
            os.ftruncate(self._fd, offset)
            raise
        self.size = offset + HEADER_BYTES + len(body)
        return offset

    def sync(self) -> None:
        """Blocks until all that was appended before the call is on the disk."""
        size = self.size
        if size > self.synced:
            os.fsync(self._fd)
            self.synced = size

    def close(self) -> None:
        os.close(self._fd)


def sync_folder(folder: Path) -> None:
    """Makes names created or removed in `folder` durable."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)

"""Named POSIX shared-memory segments, as files in /dev/shm.

Not `multiprocessing.shared_memory`: before Python 3.13 its resource tracker unlinks a segment when any process that
merely attached to it exits, which would take the weights from every other engine.
"""

import mmap
import os
import re
from pathlib import Path

from flashflow.errors import ConfigError, WeightsError

FOLDER = Path("/dev/shm")
NAME = re.compile(r"[A-Za-z0-9._-]+")
PART = re.compile(r"[A-Za-z0-9._]+")


def segment_name(run_id: str, prefix: str, serial: str) -> str:
    """`flashflow-<run_id>-<prefix>-<serial>`; no dash in prefix and serial, so that runs keep apart."""
    for field, value, pattern in (("run_id", run_id, NAME), ("prefix", prefix, PART), ("serial", serial, PART)):
        if not pattern.fullmatch(value):
            raise WeightsError(f"{field} {value!r} of a segment must match {pattern.pattern}")
    return f"flashflow-{run_id}-{prefix}-{serial}"


def create_segment(name: str, nbytes: int) -> mmap.mmap:
    """A new zeroed segment, mapped for writing. Raises WeightsError when shared memory is too small for it."""
    if not FOLDER.is_dir():
        raise ConfigError([f"weights.carrier: shared_memory needs {FOLDER}, which this machine has not"])
    descriptor = os.open(FOLDER / name, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
    try:
        # Reserved now: a full file system is an error here instead of a bus error at the first write.
        os.posix_fallocate(descriptor, 0, nbytes)
        return mmap.mmap(descriptor, nbytes)
    except OSError as error:
        unlink_segment(name)
        free = os.statvfs(FOLDER)
        raise WeightsError(
            f"cannot reserve {nbytes} bytes of shared memory ({error.strerror}): {FOLDER} has "
            f"{free.f_bavail * free.f_frsize} free, and two copies of the weights must fit; "
            "enlarge it (mount -o remount,size=...)"
        ) from error
    finally:
        os.close(descriptor)


def map_segment(name: str, nbytes: int) -> mmap.mmap:
    """An existing segment, mapped copy-on-write: what the reader writes never reaches the segment.

    Raises WeightsError when there is none of that name, or when it is smaller than `nbytes`.
    """
    if not NAME.fullmatch(name):
        raise WeightsError(f"segment name {name!r} must match {NAME.pattern}")
    try:
        descriptor = os.open(FOLDER / name, os.O_RDONLY)
    except FileNotFoundError as error:
        raise WeightsError(
            f"no shared-memory segment {name!r}: its trainer has ended or runs on another host; await the next update"
        ) from error
    try:
        size = os.fstat(descriptor).st_size
        if size < nbytes:
            raise WeightsError(f"segment {name!r} has {size} bytes, {nbytes} announced")
        return mmap.mmap(descriptor, nbytes, access=mmap.ACCESS_COPY)
    finally:
        os.close(descriptor)


def unlink_segment(name: str) -> None:
    """Removes the name; memory returns once the last process that mapped it lets go. No error when it is gone."""
    (FOLDER / name).unlink(missing_ok=True)


def remove_segments(run_id: str, prefix: str | None = None) -> list[str]:
    """Unlinks whatever segments of this run (and prefix) are left, by killed processes say; returns their names."""
    middle = re.escape(prefix) if prefix is not None else PART.pattern
    pattern = re.compile(rf"flashflow-{re.escape(run_id)}-{middle}-{PART.pattern}")
    names = sorted(entry.name for entry in FOLDER.glob("flashflow-*") if pattern.fullmatch(entry.name))
    for name in names:
        unlink_segment(name)
    return names

"""Folders that appear whole or not at all."""

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def whole_folder(folder: Path) -> Iterator[Path]:
    """A new folder to fill; it gets the name `folder` when the block ends, and vanishes when the block raises.

    A folder of that name that another process has filled meanwhile is as good: it stays, and the new one vanishes.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        yield partial
        partial.chmod(0o777 & ~_umask())  # mkdtemp shuts everyone else out
        try:
            os.rename(partial, folder)
        except OSError:
            if not folder.exists():
                raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _umask() -> int:
    """There is no way to read it but to set it."""
    mask = os.umask(0)
    os.umask(mask)
    return mask

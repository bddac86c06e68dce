"""A look into a local model folder before a run starts: the layers that its weights are of. Knows no torch."""

import json
import struct
from pathlib import Path

_LENGTH = struct.Struct("<Q")
_MOST_BYTES = 100_000_000
"""No header of safetensors is longer."""


def matrices(folder: Path) -> set[str]:
    """Names of the layers below `layers` whose weight is a matrix, from the headers of the safetensors files; empty
    when there are none that can be read."""
    found: set[str] = set()
    for path in sorted(folder.glob("*.safetensors")):
        for name, entry in _header(path).items():
            if ".layers." in name and name.endswith(".weight") and len(entry["shape"]) == 2:
                found.add(name.removesuffix(".weight"))
    return found


def _header(path: Path) -> dict[str, dict[str, list[int]]]:
    try:
        with path.open("rb") as file:
            (length,) = _LENGTH.unpack(file.read(_LENGTH.size))
            header = json.loads(file.read(min(length, _MOST_BYTES)))
    except (OSError, ValueError, struct.error):
        return {}
    return {name: entry for name, entry in header.items() if name != "__metadata__"}

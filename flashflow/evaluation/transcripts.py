"""One answer and its reward, and the JSONL file that people read them in."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec


class Transcript(msgspec.Struct, frozen=True, kw_only=True):
    """A sample, scored."""

    problem: int
    """Index of the held-out problem, in the order of the source."""
    sample: int
    """0 .. samples - 1 of the problem."""
    prompt: str
    """As the model saw it, special tokens included."""
    completion: str
    """As the reward function saw it."""
    reward: float | None
    """None: the reward function could not score it, or not within its deadline."""
    components: dict[str, float]
    num_tokens: int
    """Sampled, the end token included."""
    finish_reason: str
    """stop | length."""
    row: dict[str, Any]
    """Columns of the problem."""


@contextmanager
def transcript_file(path: Path) -> Iterator[Callable[[Transcript], None]]:
    """Replaces the file; each transcript is on it as soon as it is written, for an evaluation may be long."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:

        def write(transcript: Transcript) -> None:
            file.write(msgspec.json.encode(transcript) + b"\n")
            file.flush()

        yield write


def read_transcripts(path: Path) -> list[Transcript]:
    """In the order of the file, which is that of finishing."""
    return [msgspec.json.decode(line, type=Transcript) for line in path.read_bytes().splitlines()]

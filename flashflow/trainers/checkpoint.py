"""Checkpoint folders: `step-000010` is complete, anything else is not. Knows no torch; state.py fills the folders.

A checkpoint is written under a temporary name, flushed to the disk, and renamed: a reader sees all of it or nothing.
"""

import os
import re
import shutil
from pathlib import Path

import msgspec

from flashflow.errors import ConfigError

DESCRIPTION = "checkpoint.json"
COMPLETE = re.compile(r"step-(\d{6,})")
TEMPORARY = ".tmp"


class Adapters(msgspec.Struct, frozen=True):
    """What a checkpoint of LoRA holds in place of the model's weights."""

    rank: int
    alpha: int
    target_modules: list[str]
    """Ends of the names of the linear layers that have adapters."""
    dtype: str
    """Of the frozen weights."""
    base: str
    """Digest of the weights that the adapters were trained on, which the checkpoint does not hold."""
    parameters: dict[str, str]
    """Like Description.parameters, of the adapters."""


class Description(msgspec.Struct, frozen=True):
    """What a checkpoint holds, readable without torch."""

    step: int
    parameters: dict[str, str]
    """Name -> `float32[300, 64]`, of the model."""
    settings: dict[str, str]
    """Section -> JSON of the sections that shaped the training so far."""
    skipped_in_row: int
    skipped_total: int
    num_ranks: int
    critic: dict[str, str] = {}
    """Like `parameters`; empty without a critic."""
    critic_skipped_in_row: int = 0
    critic_skipped_total: int = 0
    adapters: Adapters | None = None
    """None: the checkpoint holds the weights of the model."""


def folder_name(step: int) -> str:
    return f"step-{step:06d}"


def newest_complete(folder: Path) -> Path | None:
    """The complete checkpoint of the highest step in `folder`; None when there is none."""
    return max(_complete(folder), key=_step_of, default=None)


def complete_steps(folder: Path) -> list[int]:
    """Steps of the complete checkpoints in `folder`, rising."""
    return sorted(map(_step_of, _complete(folder)))


def prune(folder: Path, keep: int) -> list[Path]:
    """Removes all but the `keep` newest complete checkpoints, and torn ones; returns what it removed."""
    complete = sorted(_complete(folder), key=_step_of)
    removed = complete[: max(0, len(complete) - keep)] + sorted(folder.glob(f"step-*{TEMPORARY}"))
    for path in removed:
        _remove(path)
    return removed


def temporary(folder: Path) -> Path:
    """Where the checkpoint `folder` is written until it is complete."""
    return folder.with_name(folder.name + TEMPORARY)


def begin(folder: Path) -> None:
    """Makes the temporary folder, empty."""
    shutil.rmtree(temporary(folder), ignore_errors=True)
    temporary(folder).mkdir(parents=True)


def finish(folder: Path, description: Description) -> None:
    """Describes and flushes what was written, and gives it its name; replaces a checkpoint that has the name."""
    written = temporary(folder)
    (written / DESCRIPTION).write_bytes(msgspec.json.format(msgspec.json.encode(description)))
    for path in written.rglob("*"):
        _flush(path)
    _flush(written)
    if folder.exists():
        _remove(folder)
    written.rename(folder)
    _flush(folder.parent)


def read_description(folder: Path) -> Description:
    """Raises ConfigError when `folder` is no checkpoint of ours."""
    try:
        return msgspec.json.decode((folder / DESCRIPTION).read_bytes(), type=Description)
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(
            [f"{folder} is not a complete checkpoint ({error}); remove it to resume from an older one"]
        ) from error


def differences(found: dict[str, str], expected: dict[str, str], limit: int = 5) -> list[str]:
    """Where two descriptions by name differ, for a person; at most `limit` lines and a count of the rest."""
    lines = [f"{name}: the checkpoint has it, the model has not" for name in found if name not in expected]
    for name, value in expected.items():
        if name not in found:
            lines.append(f"{name}: the model has it, the checkpoint has not")
        elif found[name] != value:
            lines.append(f"{name}: {found[name]} in the checkpoint, {value} in the model")
    return [*lines[:limit], f"and {len(lines) - limit} more"] if len(lines) > limit else lines


def adapter_differences(found: Adapters | None, expected: Adapters | None) -> list[str]:
    """Why a trainer with the adapters `expected` cannot go on from those of a checkpoint; for a person."""
    if found is None or expected is None:
        if found is expected:
            return []
        return [
            "the checkpoint is of LoRA; give the section lora that the run began with"
            if expected is None
            else "the checkpoint is of a whole model; remove the section lora, or start from the exported model"
        ]
    if found.base != expected.base:
        return [f"the adapters belong to other weights than model.path's (digest {found.base}, not {expected.base})"]
    changed = [
        f"{name}: {one} in the checkpoint, {other} in the config"
        for name, one, other in (("rank", found.rank, expected.rank), ("alpha", found.alpha, expected.alpha))
        if one != other
    ]
    return [*changed, *([] if changed else differences(found.parameters, expected.parameters))]


def _complete(folder: Path) -> list[Path]:
    if not folder.is_dir():
        return []
    return [path for path in folder.iterdir() if COMPLETE.fullmatch(path.name) and (path / DESCRIPTION).is_file()]


def _step_of(path: Path) -> int:
    match = COMPLETE.fullmatch(path.name)
    return int(match.group(1)) if match else -1


def _remove(folder: Path) -> None:
    """First the name: a removal that is interrupted must not leave half a checkpoint that looks complete."""
    shutil.rmtree(folder.rename(folder.with_name(folder.name.removesuffix(TEMPORARY) + ".old" + TEMPORARY)))


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

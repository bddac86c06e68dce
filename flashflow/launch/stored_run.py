"""Finds a run and its checkpoints on disk, for the commands that use what a run has made."""

import re
from collections.abc import Sequence
from pathlib import Path

from flashflow.config import Config, load_config
from flashflow.config.sections import RunSection
from flashflow.errors import ConfigError
from flashflow.trainers import checkpoint

NEWEST = "newest"


def open_run(path: Path, overrides: Sequence[str] = ()) -> Config:
    """The config of a file, or of a run folder, wherever that lies now.

    Raises ConfigError, also for a run that has no model because it is simulated.
    """
    config = load_config(path / "config.yaml" if path.is_dir() else path, overrides)
    if config.simulated:
        raise ConfigError(["trainer.kind: simulated; there is no model to ask or to export: name a real run"])
    if not path.is_dir():
        return config
    folder = path.resolve()
    run = RunSection(**{**dict(config.run), "name": folder.name, "folder": folder.parent})
    return config.model_copy(update={"run": run})


def find_checkpoint(run_folder: Path, wanted: str) -> Path:
    """`newest`, a step (`20`), a name (`step-000020`) or a folder. Raises ConfigError naming those that exist."""
    folder = run_folder / "checkpoints"
    if wanted == NEWEST:
        found = checkpoint.newest_complete(folder)
    elif re.fullmatch(r"\d+", wanted):
        found = folder / checkpoint.folder_name(int(wanted))
    else:
        found = next((path for path in (folder / wanted, Path(wanted)) if path.is_dir()), None)
    if found is None or not (found / checkpoint.DESCRIPTION).is_file():
        raise ConfigError([f"--checkpoint: {wanted!r} is no checkpoint; {_existing(folder)}"])
    return found


def _existing(folder: Path) -> str:
    steps = checkpoint.complete_steps(folder)
    if not steps:
        return f"{folder} holds none yet"
    return f"{folder} holds {', '.join(map(checkpoint.folder_name, steps))}"

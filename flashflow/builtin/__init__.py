"""The models behind `model.path: builtin:...`: made on first use, kept in `model.cache` as Hugging Face folders."""

from collections.abc import Callable
from pathlib import Path

from flashflow.config.sections import Config

PREFIX = "builtin:"

Note = Callable[[str], None]
"""Takes a line for a person who waits."""

Maker = Callable[[Path, int, Note], Path]
"""(cache, run.seed, note) -> folder of the model, made there unless it is there already."""

WARM_START_NOTE_STEPS = 100


def resolve(config: Config, note: Note) -> Config:
    """The config with the folder in place of a builtin name; any other config as it is.

    Raises ConfigError when a package that the model needs is missing.
    """
    if not config.model.path.startswith(PREFIX):
        return config
    path = MAKERS[config.model.path](config.model.cache, config.run.seed, note)
    return config.model_copy(update={"model": config.model.model_copy(update={"path": str(path.resolve())})})


def _quickstart(cache: Path, seed: int, note: Note) -> Path:
    from flashflow.quickstart import ensure_model

    def progress(done: int, total: int, loss: float) -> None:
        if done % WARM_START_NOTE_STEPS == 0 or done == total:
            note(f"warm start of the builtin model: step {done} of {total}, loss {loss:.3f}")

    return ensure_model(cache, seed, progress)


def _smollm2(cache: Path, seed: int, note: Note) -> Path:
    from flashflow.builtin.smollm2 import ensure_model

    return ensure_model(cache, note)


MAKERS: dict[str, Maker] = {"builtin:quickstart": _quickstart, "builtin:smollm2-135m": _smollm2}
"""Their names are those of config.rules.BUILTIN_MODELS."""

"""What a run keeps for life: --resume with another value is refused before anything is written."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from flashflow.algorithms import presets
from flashflow.config import Config
from flashflow.config.document import read_document
from flashflow.errors import ConfigError

FIXED = ("run.seed", "rollout.group_size", "rollout.alpha", "batch.groups")
"""The journal refuses these as well (journal._FINGERPRINT); model.path, lora and algorithm come on top."""

Change = tuple[str, str, str]
"""Field, its value now, its value when the run began; values as a person reads them."""

_UNKNOWN = object()
"""The stored config does not have the field: an older version wrote it."""


def refuse_changes(config: Config, stored: Path) -> None:
    """Raises ConfigError with every field that a run may not change and that `stored`, its config.yaml, has otherwise.

    A builtin model that is not yet a folder is not compared. The stored file is read as plain values: the rules of
    load_config look at files of the user, which may have moved since.
    """
    past = read_document(stored.read_text(encoding="utf-8"), str(stored)).values
    changes = [
        *_plain_changes(config, past),
        *_model_change(config, past),
        *_lora_change(config, past),
        *_algorithm_changes(config, past),
    ]
    if changes:
        raise ConfigError(
            [
                f"{field}: {now}, but the run in {stored.parent} began with {then}; "
                "remedy: put it back, or start another run.name=..."
                for field, now, then in changes
            ]
        )


def _plain_changes(config: Config, past: Any) -> Iterator[Change]:
    for field in FIXED:
        section, name = field.split(".")
        now, then = getattr(getattr(config, section), name), _value(past, section, name)
        if then is not _UNKNOWN and now != then:
            yield field, repr(now), repr(then)


def _model_change(config: Config, past: Any) -> Iterator[Change]:
    now, then = config.model.path, _value(past, "model", "path")
    if then is _UNKNOWN or now.startswith("builtin:"):
        return
    here, there = Path(now), Path(str(then))
    if here.parent == config.model.cache.resolve():
        same = here.name == there.name  # a builtin model, whose name says all: the cache may be elsewhere
    else:
        same = now == then or (here.is_dir() and here.resolve() == there.resolve())
    if not same:
        yield "model.path", repr(now), repr(then)


def _lora_change(config: Config, past: Any) -> Iterator[Change]:
    """The checkpoints of a run hold adapters of one shape, or whole weights."""
    now, then = config.model_dump(mode="json")["lora"], _value(past, "lora")
    if then is not _UNKNOWN and now != then:
        before, after = (repr(value) if value is not None else "none" for value in (then, now))
        yield "lora", after, before


def _algorithm_changes(config: Config, past: Any) -> Iterator[Change]:
    """Of the fields written out; none when both come to the same algorithm, as when a default is written out."""
    now, then = config.algorithm.model_dump(mode="json"), _value(past, "algorithm")
    if not isinstance(then, Mapping) or _resolved(now, config) == _resolved(then, config):
        return
    for name in dict.fromkeys((*now, *then)):
        one, other = (repr(written[name]) if name in written else "that of the preset" for written in (now, then))
        if one != other:
            yield f"algorithm.{name}", one, other


def _resolved(algorithm: Mapping[str, Any], config: Config) -> object:
    """The whole algorithm; what is written when this version does not know it. Alpha has a line of its own."""
    overrides = {name: value for name, value in algorithm.items() if name != "preset"}
    try:
        return presets.resolve(str(algorithm.get("preset")), overrides, alpha=config.rollout.alpha)
    except ConfigError:
        return algorithm


def _value(values: Any, *keys: str) -> Any:
    for key in keys:
        if not isinstance(values, Mapping) or key not in values:
            return _UNKNOWN
        values = values[key]
    return values

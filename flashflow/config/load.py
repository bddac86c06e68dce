"""Reads a config file and reports every mistake in it at once, each with its path, value, place and remedy."""

import contextlib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from flashflow.config import rules
from flashflow.config.document import Document, read_document, read_value, write_document
from flashflow.config.mistakes import explain, models_of, nearest, unknown_key
from flashflow.config.sections import Config
from flashflow.errors import ConfigError

COMMAND_LINE = 0
"""Stands for a line number where an override gave the value."""


def load_config(path: Path | str, overrides: Sequence[str] = ()) -> Config:
    """The config of a YAML file, with `section.key=value` overrides laid over it.

    Raises ConfigError with all mistakes: of the file, of the overrides, of each section, and of the cross-section rules
    wherever the fields they speak of are themselves right.
    """
    document = _read_file(Path(path))
    mistakes = _apply(overrides, document)
    sections, wrong, broken = _validate(document.values)
    mistakes += wrong
    # A rule that speaks of a broken field would speak of the default that stands in for it.
    mistakes += [found for found in rules.mistakes(sections) if not any(path in found for path in broken)]
    if mistakes:
        raise ConfigError([_with_place(mistake, document, str(path)) for mistake in mistakes])
    return Config(**sections)


def dump_config(config: Config) -> str:
    """The resolved config as YAML; load_config gives an equal one back."""
    return write_document(config.model_dump(mode="json"))


def _read_file(path: Path) -> Document:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError([f"{path}: cannot be read: {reason}; name an existing YAML file"]) from error
    document = read_document(text, str(path))
    if not isinstance(document.values, dict):
        kind = type(document.values).__name__
        raise ConfigError([f"{path}: the top of a config maps sections to their fields, got a {kind}"])
    return document


def _apply(overrides: Iterable[str], document: Document) -> list[str]:
    """Lays overrides over the document in place; what cannot be laid is a mistake."""
    mistakes: list[str] = []
    for override in overrides:
        name, equals, text = override.partition("=")
        keys = name.strip().split(".")
        if not equals or not all(keys):
            mistakes.append(f"{override}: not an override; write section.key=value")
            continue
        try:
            _lay(keys, read_value(text), document)
        except ConfigError as error:
            mistakes += [f"{name}: {mistake}" for mistake in error.mistakes]
    return mistakes


def _lay(keys: list[str], value: Any, document: Document) -> None:
    values = document.values
    for depth, key in enumerate(keys[:-1], start=1):
        if values.get(key) is None:
            values[key] = {}
        values = values[key]
        if not isinstance(values, dict):
            raise ConfigError([f"{'.'.join(keys[:depth])} is {values!r}, which has no fields to override"])
    values[keys[-1]] = value
    for path in [path for path in document.lines if path[: len(keys)] == tuple(keys)]:
        del document.lines[path]
    document.lines[tuple(keys)] = COMMAND_LINE


def _validate(values: dict[str, Any]) -> tuple[dict[str, BaseModel | None], list[str], list[str]]:
    """Each section by itself, so that one mistake hides no other: (sections, mistakes, paths of broken fields).

    A section with mistakes is there too, with defaults in place of its broken fields, if it has defaults for them. One
    that may be left out is None then.
    """
    sections: dict[str, BaseModel | None] = {}
    broken: list[str] = []
    mistakes = [unknown_key((str(name),), Config, values[name]) for name in values if name not in Config.model_fields]
    for name, field in Config.model_fields.items():
        if name not in values and field.is_required():
            mistakes.append(f"{name}: missing; this section has no default")
            continue
        if field.default is None and values.get(name) is None:
            sections[name] = None
            continue
        try:
            kind = _kind(name, field, values.get(name))
        except ConfigError as error:
            mistakes += error.mistakes
            broken.append(name)
            continue
        try:
            sections[name] = _section(kind, values.get(name))
        except ValidationError as error:
            details = error.errors(include_url=False)
            mistakes += [explain(name, kind, detail) for detail in details]
            keys = {str(detail["loc"][0]) for detail in details if detail["loc"]}
            broken += [f"{name}.{key}" for key in keys]
            with contextlib.suppress(ValidationError):
                sections[name] = _section(kind, _without(values.get(name), keys))
    return sections, mistakes, broken


def _kind(section: str, field: FieldInfo, values: Any) -> type[BaseModel]:
    """The model of a section; of several, the one its `kind` names, by default the field's. Raises ConfigError."""
    kinds = models_of(field.annotation)
    if len(kinds) == 1 or not isinstance(values, dict) or "kind" not in values:
        return kinds[0] if len(kinds) == 1 else type(field.default)
    tagged = {str(kind.model_fields["kind"].default): kind for kind in kinds}
    if values["kind"] not in tagged:
        close = nearest(str(values["kind"]), tagged)
        raise ConfigError([f"{section}.kind: {values['kind']!r} is no kind of {section}; {close}"])
    return tagged[values["kind"]]


def _without(values: Any, keys: set[str]) -> Any:
    return {key: value for key, value in values.items() if key not in keys} if isinstance(values, dict) else values


def _section(kind: type[BaseModel], values: Any) -> BaseModel:
    """Strict, so that "8" is no number and 1 no bool; from JSON, so that a list may be a tuple and text a path."""
    return kind.model_validate_json(json.dumps({} if values is None else values), strict=True)


def _with_place(mistake: str, document: Document, name: str) -> str:
    """The mistake with the line of the deepest key on its path."""
    keys = tuple(mistake.partition(":")[0].split("."))
    for length in range(len(keys), 0, -1):
        line = document.lines.get(keys[:length])
        if line is not None:
            return f"{mistake} ({'command line' if line == COMMAND_LINE else f'{name}, line {line}'})"
    return mistake

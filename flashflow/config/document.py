"""A YAML file as plain values, with the line of every key, and back again.

YAML 1.2's core schema: `1e-6` is a number, and `no`, `on` and dates are text. A key given twice is a mistake, because
YAML itself would silently keep only the last.
"""

import re
from typing import Any, NamedTuple

import yaml

from flashflow.errors import ConfigError

Path = tuple[str, ...]
"""Keys from the top, list places as digits."""


_MAX_DEPTH = 40


class _Loader(yaml.SafeLoader):
    """SafeLoader with the resolvers of YAML 1.2."""


class _Dumper(yaml.SafeDumper):
    """Quotes exactly the text that _Loader would otherwise read as something else."""


_RESOLVERS: tuple[tuple[str, str, str], ...] = (
    ("tag:yaml.org,2002:bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("tag:yaml.org,2002:int", r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", "-+0123456789"),
    (
        "tag:yaml.org,2002:float",
        r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        "-+0123456789.",
    ),
    ("tag:yaml.org,2002:null", r"~|null|Null|NULL|", "~nN\0"),
    ("tag:yaml.org,2002:merge", r"<<", "<"),
)


def _use_core_schema(kind: type[_Loader] | type[_Dumper]) -> None:
    kind.yaml_implicit_resolvers = {}
    for tag, pattern, first in _RESOLVERS:
        letters = ["" if letter == "\0" else letter for letter in first]
        kind.add_implicit_resolver(tag, re.compile(f"^(?:{pattern})$"), letters)


def _construct_int(loader: _Loader, node: yaml.ScalarNode) -> int:
    """Base 10 unless 0x or 0o says otherwise; YAML 1.1 read 010 as 8."""
    text = str(loader.construct_scalar(node))
    return int(text, 0) if text[:2] in ("0x", "0o") else int(text)


def _represent_text(dumper: _Dumper, text: str) -> yaml.ScalarNode:
    """Double quotes, which escape, for the line breaks and controls that YAML would fold in any other style."""
    quoted = '"' if not all(letter.isprintable() or letter == "\n" for letter in text) else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=quoted)


_use_core_schema(_Loader)
_use_core_schema(_Dumper)
_Loader.add_constructor("tag:yaml.org,2002:int", _construct_int)
_Dumper.add_representer(str, _represent_text)


class Document(NamedTuple):
    values: Any
    lines: dict[Path, int]
    """Line, from 1, of every key."""


def read_document(text: str, name: str) -> Document:
    """Raises ConfigError on bad syntax and, all at once, on every key given twice. `name` stands in the messages."""
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
        lines: dict[Path, int] = {}
        if node is None:
            return Document({}, lines)
        twice = list(_walk(node, (), lines))
        if twice:
            raise ConfigError(
                [f"{'.'.join(path)}: given twice ({name}, line {line}); keep one" for path, line in twice]
            )
        return Document(loader.construct_document(node), lines)
    except yaml.YAMLError as error:
        raise ConfigError([f"{name}: not valid YAML: {' '.join(str(error).split())}"]) from error
    finally:
        loader.dispose()


def _walk(node: yaml.Node, path: Path, lines: dict[Path, int]) -> list[tuple[Path, int]]:
    """Fills `lines` and returns the keys given twice, with the line of the second."""
    if len(path) > _MAX_DEPTH:
        raise ConfigError(
            [f"{'.'.join(path[:3])}: nested deeper than {_MAX_DEPTH} levels; an alias that holds itself?"]
        )
    twice: list[tuple[Path, int]] = []
    if isinstance(node, yaml.MappingNode):
        seen: set[str] = set()
        for key, value in node.value:
            here = (*path, str(key.value))
            line = key.start_mark.line + 1
            if here[-1] in seen:
                twice.append((here, line))
            seen.add(here[-1])
            lines[here] = line
            twice += _walk(value, here, lines)
    elif isinstance(node, yaml.SequenceNode):
        for place, item in enumerate(node.value):
            twice += _walk(item, (*path, str(place)), lines)
    return twice


def read_value(text: str) -> Any:
    """One value of the command line, as YAML. Raises ConfigError."""
    return read_document(text, "command line").values if text.strip() else None


def write_document(values: Any) -> str:
    """Text that read_document turns into the same values."""
    return str(yaml.dump(values, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120))

"""Whether `module:function` or `file.py:function` names something, found by reading source and importing nothing."""

import ast
import importlib.machinery
import importlib.util
from collections.abc import Iterator
from pathlib import Path

from flashflow.config.mistakes import nearest


def problem_of(reference: str) -> str | None:
    """What is wrong with the reference and what to do, or None when it names a definition."""
    place, colon, name = reference.rpartition(":")
    if not colon or not place or not name.isidentifier():
        return "must be module:function or file.py:function"
    if place.endswith(".py"):
        source = Path(place)
        return _problem_in(source, name) if source.is_file() else f"no file {place} in {Path.cwd()}"
    if not all(part.isidentifier() for part in place.split(".")):
        return f"{place} is no module name; write module:function or file.py:function"
    spec = find_module(place)
    if spec is None:
        return f"no module {place}; install it, or give a file as file.py:function"
    if spec.origin is None or not spec.origin.endswith(".py"):
        return None
    return _problem_in(Path(spec.origin), name)


def find_module(name: str) -> importlib.machinery.ModuleSpec | None:
    """The spec of a dotted module, without importing its packages as importlib.util.find_spec would."""
    first, *rest = name.split(".")
    try:
        spec = importlib.util.find_spec(first)
    except (ImportError, ValueError):
        return None
    for depth in range(len(rest)):
        if spec is None or spec.submodule_search_locations is None:
            return None
        full_name = ".".join([first, *rest[: depth + 1]])
        spec = importlib.machinery.PathFinder.find_spec(full_name, spec.submodule_search_locations)
    return spec


def _problem_in(source: Path, name: str) -> str | None:
    try:
        tree = ast.parse(source.read_bytes(), str(source))
    except (OSError, SyntaxError, ValueError) as error:
        return f"{source} cannot be read as Python: {error}"
    names = set(_names(tree.body))
    if name in names or "*" in names or "__getattr__" in names:
        return None
    return f"{source} defines no {name}; {nearest(name, (n for n in names if not n.startswith('_')))}"


def _names(body: list[ast.stmt]) -> Iterator[str]:
    """Names bound at the top of a module, also under `if`, `try` and `with`; `*` for a star import."""
    for statement in body:
        match statement:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield name
            case ast.Import(names=aliases) | ast.ImportFrom(names=aliases):
                yield from ((alias.asname or alias.name).partition(".")[0] for alias in aliases)
            case ast.Assign(targets=targets):
                yield from (target.id for target in targets if isinstance(target, ast.Name))
            case ast.AnnAssign(target=ast.Name(id=name)):
                yield name
            case ast.If() | ast.Try() | ast.With():
                yield from _names(statement.body)
                yield from _names(getattr(statement, "orelse", []))
                for handler in getattr(statement, "handlers", []):
                    yield from _names(handler.body)
            case _:
                pass

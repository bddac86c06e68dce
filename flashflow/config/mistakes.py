"""Turns what pydantic found wrong into a line a person can act on: path, value, what is allowed, nearest valid name."""

import difflib
from collections.abc import Iterable
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic_core import ErrorDetails

Location = tuple[int | str, ...]

_BOUNDS = {
    "greater_than": ("gt", "must be greater than {}"),
    "greater_than_equal": ("ge", "must be at least {}"),
    "less_than": ("lt", "must be less than {}"),
    "less_than_equal": ("le", "must be at most {}"),
    "multiple_of": ("multiple_of", "must be a multiple of {}"),
    "string_pattern_mismatch": ("pattern", "must match {}"),
    "string_too_short": ("min_length", "must have at least {} characters"),
}
_TYPES = {
    "int_type": "must be a whole number",
    "int_from_float": "must be a whole number",
    "float_type": "must be a number",
    "finite_number": "must be a finite number",
    "bool_type": "must be true or false",
    "string_type": "must be text",
    "path_type": "must be a path, as text",
    "list_type": "must be a list",
    "tuple_type": "must be a list",
    "dict_type": "must map keys to values",
    "model_type": "must map field names to values",
    "model_attributes_type": "must map field names to values",
    "too_long": "has too many values",
}


def nearest(name: str, valid: Iterable[str], prefix: str = "") -> str:
    """`did you mean <prefix>X?`, or the valid names when nothing is near."""
    names = sorted(valid)
    close = difflib.get_close_matches(name, names, n=1)
    return f"did you mean {prefix}{close[0]}?" if close else f"valid: {', '.join(names)}"


def unknown_key(path: tuple[str, ...], owner: type[BaseModel], value: Any) -> str:
    """`owner` is the model that the last key of `path` was given to."""
    close = nearest(path[-1], owner.model_fields, prefix="".join(f"{key}." for key in path[:-1]))
    return f"{'.'.join(path)}: {_short(value)} is given to an unknown key; {close}"


def explain(section: str, kind: type[BaseModel], detail: ErrorDetails) -> str:
    """One line for one of the errors of a ValidationError of section `section`."""
    path, owner = _walk((section,), kind, detail["loc"])
    where, value, context = ".".join(path), _short(detail["input"]), detail.get("ctx", {})
    match detail["type"]:
        case "extra_forbidden":
            return unknown_key(path, owner, detail["input"])
        case "missing" if path[-1].isdigit():
            return f"{'.'.join(path[:-1])}: has too few values; place {path[-1]} is missing"
        case "missing":
            return f"{where}: missing; {_purpose(owner, path[-1])}"
        case "literal_error":
            allowed = context["expected"]
            near = difflib.get_close_matches(str(detail["input"]), _choices(owner, path[-1]), n=1)
            return f"{where}: {value} must be {allowed}" + (f"; did you mean {near[0]}?" if near else "")
        case "union_tag_not_found":
            return f"{where}: kind is missing; one of {_tags(owner, path[-1])}"
        case "union_tag_invalid":
            near_tag = nearest(str(context["tag"]), _tags(owner, path[-1]))
            return f"{where}.kind: {context['tag']!r} is no kind of {path[-1]}; {near_tag}"
        case name if name in _BOUNDS:
            key, text = _BOUNDS[name]
            return f"{where}: {value} {text.format(context[key])}"
        case name if name in _TYPES:
            return f"{where}: {value} {_TYPES[name]}"
        case _:
            return f"{where}: {value}: {detail['msg']}"


def _walk(path: tuple[str, ...], kind: type[BaseModel], location: Location) -> tuple[tuple[str, ...], type[BaseModel]]:
    """Follows pydantic's location through the models: (path as the user wrote it, model that owns its last key).

    pydantic puts the tag of a tagged union into the location; the user did not write it there.
    """
    owner, rest = kind, list(location)
    while rest:
        key = str(rest.pop(0))
        path = (*path, key)
        members = _members(owner, key)
        if rest and len(members) > 1:
            owner = _tagged(members)[str(rest.pop(0))]
        elif rest and members:
            owner = members[0]
    return path, owner


def _members(owner: type[BaseModel], key: str) -> list[type[BaseModel]]:
    """Models that field `key` of `owner` may hold."""
    field = owner.model_fields.get(key)
    return models_of(field.annotation) if field else []


def models_of(annotation: Any) -> list[type[BaseModel]]:
    """The models that a field of this annotation may hold."""
    if get_origin(annotation) is Annotated:
        return models_of(get_args(annotation)[0])
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    if get_origin(annotation) is Union or type(annotation).__name__ == "UnionType":
        return [model for member in get_args(annotation) for model in models_of(member)]
    return []


def _tagged(members: list[type[BaseModel]]) -> dict[str, type[BaseModel]]:
    return {str(member.model_fields["kind"].default): member for member in members}


def _tags(owner: type[BaseModel], key: str) -> list[str]:
    return list(_tagged(_members(owner, key)))


def _choices(owner: type[BaseModel], key: str) -> list[str]:
    field = owner.model_fields.get(key)
    return [str(choice) for choice in get_args(field.annotation)] if field else []


def _purpose(owner: type[BaseModel], key: str) -> str:
    field = owner.model_fields.get(key)
    text = field.description if field and field.description else "it has no default"
    return " ".join(text.split())


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."

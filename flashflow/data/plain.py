"""Reduces what datasets put into their columns to plain msgpack types."""

import datetime
import enum
from typing import Any

import numpy as np

MIN_INT, MAX_INT = -(2**63), 2**64 - 1
"""What msgpack can hold."""


def plain(value: Any) -> Any:
    """`value` in str, int, float, bool, None, list and dict (with str keys) only.

    Tuples, sets and arrays become lists (sets ordered by their text), enumerations their values, dates ISO 8601.
    Anything else, and an integer beyond 64 bits, becomes its `str()`.
    """
    match value:
        case enum.Enum():
            return plain(value.value)
        case None | bool() | str():
            return value
        case int():
            return int(value) if MIN_INT <= value <= MAX_INT else str(value)
        case float():
            return float(value)
        case np.generic() | np.ndarray():
            return plain(value.tolist())
        case dict():
            return {str(plain(key)): plain(item) for key, item in value.items()}
        case list() | tuple():
            return [plain(item) for item in value]
        case set() | frozenset():
            return sorted((plain(item) for item in value), key=str)
        case datetime.date() | datetime.time():
            return value.isoformat()
        case _:
            return str(value)

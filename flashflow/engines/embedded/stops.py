"""When a request's text ends."""

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Protocol

_SLACK_TOKENS = 4
"""Tokens of the window beyond the stop string's: a partial character and a swallowed leading space at its start."""


class Decoder(Protocol):
    """The part of a tokenizer that is needed."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str: ...


class StopStrings:
    """Decodes a window of the last tokens, long enough for the longest string at one byte a token."""

    def __init__(self, strings: Sequence[str], decoder: Decoder, generated: Iterable[int]) -> None:
        """strings: not empty. generated: tokens the request has already."""
        self._strings, self._decoder = tuple(strings), decoder
        longest = max(len(string.encode()) for string in strings)
        self._window = deque(generated, maxlen=longest + _SLACK_TOKENS)

    def completed_by(self, token: int) -> bool:
        """Take the next token; True when a stop string is in the text now. Special tokens count as text."""
        self._window.append(token)
        text = self._decoder.decode(list(self._window), skip_special_tokens=False)
        return any(string in text for string in self._strings)

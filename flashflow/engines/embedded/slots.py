"""Which request sits in which slot. Pure bookkeeping: knows no model and no cache.

Letter: S slots. Row i of every array belongs to slot i; a free row holds harmless values, since it is computed too.
"""

from collections.abc import Iterator

import numpy as np

from flashflow.engines.embedded.stops import StopStrings
from flashflow.engines.uniform import Int64Array, sampling_key_bits
from flashflow.messages import Generate
from flashflow.shapes import safe_rows


class Running:
    """One request in a slot."""

    __slots__ = ("name", "prefix", "remaining", "reserved", "slot", "stop_ids", "stop_strings")

    def __init__(self, request: Generate, stop_strings: StopStrings | None) -> None:
        self.name = request.request
        self.remaining = request.max_new_tokens - len(request.generated_ids)
        self.reserved = len(request.prompt_ids) + request.max_new_tokens
        """Tokens it may come to."""
        self.stop_ids = frozenset(request.stop_ids)
        self.stop_strings = stop_strings
        self.slot = -1
        self.prefix = b""
        """The tokens before the last known one, as bytes: what prefill computes."""

    @property
    def num_prefix_tokens(self) -> int:
        return len(self.prefix) // 8

    def finish_reason_after(self, token: int) -> str:
        """Count a sampled token; "" when the request goes on."""
        self.remaining -= 1
        completed = self.stop_strings is not None and self.stop_strings.completed_by(token)
        if completed or token in self.stop_ids:
            return "stop"
        return "" if self.remaining > 0 else "length"


class Slots:
    """The rows in use stay few: stragglers move down when there are fewer requests."""

    def __init__(self, count: int) -> None:
        """count: requests at once; there are `safe_rows(count)` rows."""
        rows = safe_rows(count)
        self.count = count
        self.running: list[Running | None] = [None] * rows
        self.slots_S = np.full(rows, -1, dtype=np.int64)
        """A row's own number; -1 while it is free."""
        self.tokens_S = np.zeros(rows, dtype=np.int64)
        """The last known token, whose successor comes next."""
        self.positions_S = np.zeros(rows, dtype=np.int64)
        """Where that token stands in its sequence."""
        self.keys_S = np.zeros(rows, dtype=np.uint64)
        self.draws_S = np.zeros(rows, dtype=np.int64)
        """Tokens sampled in this turn so far, those of other engines included."""
        self.temperatures_S = np.ones(rows, dtype=np.float32)
        self._arrays = (self.tokens_S, self.positions_S, self.keys_S, self.draws_S, self.temperatures_S)
        self._free = dict.fromkeys(range(count))
        """In order of their release."""

    def __len__(self) -> int:
        """Requests in slots."""
        return self.count - len(self._free)

    @property
    def num_rows(self) -> int:
        """Rows a step needs once nothing is beyond them."""
        return safe_rows(len(self))

    def free_below(self, limit: int) -> list[int]:
        """Free slots of a lower number, the longest free first."""
        return [slot for slot in self._free if slot < limit]

    def place(self, running: Running, request: Generate, tokens: Int64Array, slot: int) -> None:
        """tokens: prompt and generated ones. slot: a free one."""
        del self._free[slot]
        self.running[slot], running.slot = running, slot
        self.slots_S[slot] = slot
        self.tokens_S[slot] = tokens[-1]
        self.positions_S[slot] = len(tokens) - 1
        self.keys_S[slot] = sampling_key_bits(request.key)
        self.draws_S[slot] = len(request.generated_ids)
        self.temperatures_S[slot] = request.temperature

    def advance(self, num_rows: int, tokens_N: Int64Array) -> None:
        """Append one token to each of the first rows; a free one stays at position 0."""
        live_N = self.slots_S[:num_rows] >= 0
        self.tokens_S[:num_rows] = tokens_N
        self.positions_S[:num_rows] += live_N
        self.draws_S[:num_rows] += live_N

    def release(self, slot: int) -> None:
        self.running[slot] = None
        self.slots_S[slot] = -1
        for array in self._arrays:
            array[slot] = 0
        self.temperatures_S[slot] = 1.0
        self._free[slot] = None

    def moves(self, limit: int) -> Iterator[tuple[int, int, int]]:
        """Bring stragglers below a limit: yields (from slot, to slot, tokens cached) as each is moved."""
        for source in range(limit, len(self.running)):
            running = self.running[source]
            if running is None:
                continue
            target = min(self.free_below(limit))
            del self._free[target]
            self.running[target], running.slot = running, target
            self.slots_S[target] = target
            num_cached = int(self.positions_S[source])
            for array in self._arrays:
                array[target] = array[source]
            self.release(source)
            yield source, target, num_cached

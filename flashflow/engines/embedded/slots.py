"""Which request sits in which slot. Pure bookkeeping: knows no model and no cache.

Letter: S slots. Row i of every array belongs to slot i; a free row holds harmless values, since it is computed too.
"""

import heapq
from collections.abc import Iterator

import numpy as np

from flashflow.engines.embedded.stops import StopStrings
from flashflow.engines.uniform import Int64Array, sampling_key_bits
from flashflow.messages import Generate
from flashflow.shapes import safe_rows


class Running:
    """One request in a slot."""

    __slots__ = ("name", "prefix", "remaining", "slot", "stop_ids", "stop_strings")

    def __init__(self, request: Generate, stop_strings: StopStrings | None) -> None:
        self.name = request.request
        self.remaining = request.max_new_tokens - len(request.generated_ids)
        self.stop_ids = frozenset(request.stop_ids)
        self.stop_strings = stop_strings
        self.slot = -1
        self.prefix = b""
        """The tokens before the last known one, as bytes: what prefill computes."""

    def finish_reason_after(self, token: int) -> str:
        """Count a sampled token; "" when the request goes on."""
        self.remaining -= 1
        completed = self.stop_strings is not None and self.stop_strings.completed_by(token)
        if completed or token in self.stop_ids:
            return "stop"
        return "" if self.remaining > 0 else "length"


class Slots:
    """Lowest free slot first, so that the rows in use stay few."""

    def __init__(self, count: int) -> None:
        """count: requests at once; there are `safe_rows(count)` rows."""
        rows = safe_rows(count)
        self._count = count
        self.running: list[Running | None] = [None] * rows
        self.tokens_S = np.zeros(rows, dtype=np.int64)
        """The last known token, whose successor comes next."""
        self.positions_S = np.zeros(rows, dtype=np.int64)
        """Where that token stands in its sequence."""
        self.keys_S = np.zeros(rows, dtype=np.uint64)
        self.draws_S = np.zeros(rows, dtype=np.int64)
        """Tokens sampled in this turn so far, those of other engines included."""
        self.temperatures_S = np.ones(rows, dtype=np.float32)
        self._live_S = np.zeros(rows, dtype=np.int64)
        self._arrays = (
            self.tokens_S, self.positions_S, self.keys_S, self.draws_S, self.temperatures_S, self._live_S
        )  # fmt: skip
        self._free = list(range(count))

    def __len__(self) -> int:
        """Requests in slots."""
        return self._count - len(self._free)

    @property
    def has_free(self) -> bool:
        return bool(self._free)

    @property
    def num_rows(self) -> int:
        """Rows a step needs once `moves` is empty."""
        return safe_rows(len(self))

    def place(self, running: Running, request: Generate, tokens: Int64Array) -> None:
        """tokens: prompt and generated ones."""
        slot = heapq.heappop(self._free)
        self.running[slot], running.slot = running, slot
        self.tokens_S[slot] = tokens[-1]
        self.positions_S[slot] = len(tokens) - 1
        self.keys_S[slot] = sampling_key_bits(request.key)
        self.draws_S[slot] = len(request.generated_ids)
        self.temperatures_S[slot] = request.temperature
        self._live_S[slot] = 1

    def advance(self, num_rows: int, tokens_N: Int64Array) -> None:
        """Append one token to each of the first rows; a free one stays at position 0."""
        self.tokens_S[:num_rows] = tokens_N
        self.positions_S[:num_rows] += self._live_S[:num_rows]
        self.draws_S[:num_rows] += self._live_S[:num_rows]

    def release(self, slot: int) -> None:
        self.running[slot] = None
        self._reset(slot)
        heapq.heappush(self._free, slot)

    def moves(self) -> Iterator[tuple[int, int, int]]:
        """Bring stragglers down into `num_rows` rows: yields (from slot, to slot, tokens cached) as each is moved."""
        for source in range(self.num_rows, len(self.running)):
            running = self.running[source]
            if running is None:
                continue
            target = heapq.heappop(self._free)
            self.running[target], running.slot = running, target
            num_cached = int(self.positions_S[source])
            for array in self._arrays:
                array[target] = array[source]
            self.release(source)
            yield source, target, num_cached

    def _reset(self, slot: int) -> None:
        for array in self._arrays:
            array[slot] = 0
        self.temperatures_S[slot] = 1.0

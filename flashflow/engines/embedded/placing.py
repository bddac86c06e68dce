"""Brings requests into slots: room in the cache, a prompt's keys and values once for all who share it.

A request is placed only when the cache holds all that it and the running ones may come to (prompt and
`max_new_tokens`), so that none ever has to leave; until then it waits, and those behind it with it.
"""

from collections import defaultdict

import numpy as np

from flashflow.engines.embedded.prefixes import Prefixes
from flashflow.engines.embedded.runner import Runner
from flashflow.engines.embedded.slots import Running, Slots
from flashflow.messages import Generate
from flashflow.shapes import cache_length, safe_rows, safe_tokens

PREFILL_TOKENS = 1024
"""Of several prompts in one pass; a longer one has a pass for itself."""


class Placing:
    """`make_room`, `place`, ... and `settle` before the next decode step."""

    def __init__(self, runner: Runner, slots: Slots) -> None:
        self._runner, self._slots = runner, slots
        self.prefixes = Prefixes()
        self._unfilled: list[Running] = []
        self._to_copy: list[tuple[int, Running]] = []
        """(from slot, to whom), once the unfilled are filled."""

    def make_room(self, request: Generate) -> bool:
        """False when it must wait for others to end."""
        cache = self._runner.cache
        length = self._length_with(len(request.prompt_ids) + request.max_new_tokens)
        if length is None:
            return False
        if length != cache.length:
            self._resize(length)
        return True

    def place(self, running: Running, request: Generate) -> None:
        tokens = np.concatenate([request.prompt_ids, request.generated_ids]).astype(np.int64)
        running.prefix = tokens[:-1].tobytes()
        holders = self.prefixes.slots_with(running.prefix)
        slot = self._choose(holders)
        self._slots.place(running, request, tokens, slot)
        if slot in holders:
            return
        if not running.prefix:
            self.prefixes.drop(slot)
            return
        if holders:
            self._take(min(holders), running)
        else:
            self._unfilled.append(running)
        self.prefixes.put(slot, running.prefix)

    def settle(self) -> None:
        """Compute the prompts of those placed, several of a length in one pass."""
        by_length: defaultdict[int, list[Running]] = defaultdict(list)
        for running in self._unfilled:
            by_length[safe_tokens(running.num_prefix_tokens)].append(running)
        for length, alike in by_length.items():
            at_once = max(1, PREFILL_TOKENS // length)
            for first in range(0, len(alike), at_once):
                chosen = alike[first : first + at_once]
                sequences = [np.frombuffer(running.prefix, dtype=np.int64) for running in chosen]
                self._runner.prefill([running.slot for running in chosen], sequences)
        for source, running in self._to_copy:
            self._runner.cache.copy(source, running.slot, running.num_prefix_tokens)
        self._unfilled, self._to_copy = [], []

    def compact(self, limit: int) -> None:
        """No request in a slot of a number from `limit` on."""
        for source, target, num_cached in self._slots.moves(limit):
            self._runner.cache.copy(source, target, num_cached)
            self.prefixes.copy(source, target)

    def _length_with(self, reserved: int) -> int | None:
        """Slot length at which the cache holds a request of so many tokens beside the running ones."""
        cache, count = self._runner.cache, len(self._slots) + 1
        needed = cache_length(reserved)
        if count > self._slots.count:
            return None
        if needed <= cache.length and count <= cache.slots:
            return cache.length
        length = max(needed, *(cache_length(running.reserved) for running in self._slots.running if running), 0)
        return length if count <= cache.slots_of(length) else None

    def _resize(self, length: int) -> None:
        self.settle()
        cache = self._runner.cache
        self.compact(cache.slots_of(length))
        running = [running for running in self._slots.running if running is not None]
        num_cached = max((int(self._slots.positions_S[one.slot]) for one in running), default=0)
        cache.resize(length, max((one.slot + 1 for one in running), default=0), num_cached)
        for slot in self._slots.free_below(self._slots.count):
            self.prefixes.drop(slot)

    def _choose(self, holders: set[int]) -> int:
        """A free slot that has the prompt already; or one that has none; or the one whose request ended first."""
        limit = min(safe_rows(len(self._slots) + 1), self._runner.cache.slots)
        free = self._slots.free_below(limit)
        ready = holders.intersection(free)
        if ready:
            return min(ready)
        empty = [slot for slot in free if slot not in self.prefixes]
        return min(empty) if empty else free[0]

    def _take(self, source: int, running: Running) -> None:
        pending = {one.slot for one in self._unfilled} | {one.slot for _, one in self._to_copy}
        if source in pending:
            self._to_copy.append((source, running))
        else:
            self._runner.cache.copy(source, running.slot, running.num_prefix_tokens)

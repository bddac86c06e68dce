"""Which slots hold the keys and values of which tokens, so that a prompt is computed once. Pure bookkeeping.

A slot keeps what it holds after its request has ended, until another one takes it: the members of a group find their
prompt whether they come together or one by one.
"""

from collections import defaultdict


class Prefixes:
    """All of them computed by the present weights."""

    def __init__(self) -> None:
        self._by_slot: dict[int, bytes] = {}
        self._slots: defaultdict[bytes, set[int]] = defaultdict(set)

    def __contains__(self, slot: int) -> bool:
        return slot in self._by_slot

    def slots_with(self, prefix: bytes) -> set[int]:
        return self._slots.get(prefix, set())

    def put(self, slot: int, prefix: bytes) -> None:
        """In place of what the slot held."""
        self.drop(slot)
        self._by_slot[slot] = prefix
        self._slots[prefix].add(slot)

    def copy(self, source: int, target: int) -> None:
        """The target's tokens are now the source's."""
        if source in self._by_slot:
            self.put(target, self._by_slot[source])
        else:
            self.drop(target)

    def drop(self, slot: int) -> None:
        prefix = self._by_slot.pop(slot, None)
        if prefix is None:
            return
        self._slots[prefix].remove(slot)
        if not self._slots[prefix]:
            del self._slots[prefix]

    def clear(self) -> None:
        self._by_slot.clear()
        self._slots.clear()

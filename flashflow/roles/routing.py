"""Which engine takes which request: the least outstanding tokens, but a conversation stays where its prefix is.

Pure: knows no socket, clock or task. Every choice costs the logarithm of the number of engines.
"""

import heapq
from collections import OrderedDict
from collections.abc import Sequence

from flashflow.messages import Generate
from flashflow.transport.channel import Client

MAX_SESSIONS = 65_536
"""Conversations whose engine is remembered; the least recently used is forgotten, which costs a prefill."""
MIN_HEAP = 64


class EngineEnd:
    """What the proxy knows of one engine."""

    def __init__(self, name: str, client: Client) -> None:
        self.name = name
        self.client = client
        self.version = -1
        """-1: not in service (no weights yet, or lost)."""
        self.slots = 0
        self.room = 0
        """Requests it takes at once; see `measure`."""
        self.requests = 0
        self.outstanding_tokens = 0
        self.tokens_generated = 0
        self.exact = False

    def serves(self, request: Generate) -> bool:
        """The right weights."""
        if self.version < 0 or self.version < request.min_version:
            return False
        return request.pin_version is None or request.pin_version == self.version

    def has_room(self, count: int) -> bool:
        """For so many requests at once; more than one need free slots, or an idle engine."""
        limit = self.room if count == 1 else self.slots
        return self.requests + count <= limit or (self.requests == 0 and self.room > 0)

    def greet(self, slots: int) -> None:
        """It has so many slots, and takes a few requests more, so that a freed slot never waits for a round trip."""
        self.slots = slots
        self.room = slots + self._spare

    def measure(self, num_waiting: int) -> None:
        """Follow the engine's own queue, as it is when a request leaves an engine that had no room.

        A request in that queue can no longer go to an engine that is free before this one, and holds memory there
        (an engine may run fewer than its slots: long contexts fill its cache). An empty queue means that the next slot
        to be freed waits. So the room goes down by one while more than a few wait, and up by one while nobody does.
        """
        if num_waiting > self._spare:
            self.room = max(1, self.room - 1)
        elif num_waiting == 0:
            self.room = min(2 * self.slots, self.room + 1)

    @property
    def _spare(self) -> int:
        return max(2, self.slots // 8)


class Router:
    """`changed` must be told of every change of an engine that is not made here."""

    def __init__(self, engines: Sequence[EngineEnd]) -> None:
        self._engines = engines
        self._stamps = [0] * len(engines)
        self._order = {engine: order for order, engine in enumerate(engines)}
        self._heap: list[tuple[int, int, int]] = []
        """(outstanding tokens, order, stamp) of engines with room; older stamps than the engine's are void."""
        self._sessions: OrderedDict[str, EngineEnd] = OrderedDict()

    @property
    def has_room(self) -> bool:
        """Some engine in service takes another request."""
        self._drop_void()
        return bool(self._heap)

    @property
    def num_sessions(self) -> int:
        return len(self._sessions)

    def changed(self, engine: EngineEnd) -> None:
        order = self._order[engine]
        self._stamps[order] += 1
        if engine.version >= 0 and engine.has_room(1):
            heapq.heappush(self._heap, (engine.outstanding_tokens, order, self._stamps[order]))
        if len(self._heap) > MIN_HEAP + 4 * len(self._engines):
            self._heap = [entry for entry in self._heap if entry[2] == self._stamps[entry[1]]]
            heapq.heapify(self._heap)

    def reserve(self, requests: Sequence[Generate]) -> EngineEnd | None:
        """Room for all of them, which have one session, on one engine; None when none has it."""
        engine = self._choose(requests[0], len(requests))
        if engine is not None:
            self._remember(requests[0].session, engine)
            engine.requests += len(requests)
            engine.outstanding_tokens += sum(map(work, requests))
            self.changed(engine)
        return engine

    def release(self, engine: EngineEnd, num_tokens: int, num_waiting: int | None = None) -> None:
        """One request of so many reserved tokens has left; so many waited in the engine then, if it said so."""
        if num_waiting is not None and engine.requests == engine.room:
            engine.measure(num_waiting)
        engine.requests -= 1
        engine.outstanding_tokens -= num_tokens
        self.changed(engine)

    def forget(self, session: str) -> None:
        self._sessions.pop(session, None)

    def _choose(self, request: Generate, count: int) -> EngineEnd | None:
        home = self._sessions.get(request.session)
        if home is not None and home.serves(request) and home.has_room(count):
            return home
        unfit, found = [], None
        while found is None and self.has_room:
            engine = self._engines[self._heap[0][1]]
            if engine.serves(request) and engine.has_room(count):
                found = engine
            else:
                unfit.append(heapq.heappop(self._heap))
        for entry in unfit:
            heapq.heappush(self._heap, entry)
        return found

    def _drop_void(self) -> None:
        while self._heap and self._heap[0][2] != self._stamps[self._heap[0][1]]:
            heapq.heappop(self._heap)

    def _remember(self, session: str, engine: EngineEnd) -> None:
        self._sessions[session] = engine
        self._sessions.move_to_end(session)
        if len(self._sessions) > MAX_SESSIONS:
            self._sessions.popitem(last=False)


def work(request: Generate) -> int:
    """Tokens an engine may have to compute for it."""
    return len(request.prompt_ids) + request.max_new_tokens

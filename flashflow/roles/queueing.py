"""Requests that wait for an engine, first come, first served; a block waits until it is whole.

A *block* is a group whose members share one engine (`replicate_prompts: false`): requests of one session that say how
many they are. A *unit* is a block, or a request by itself.
"""

import asyncio
from collections.abc import Callable

from flashflow.messages import Generate
from flashflow.roles.routing import EngineEnd, Router


class Unit:
    """Goes to one engine."""

    def __init__(self) -> None:
        self.tickets: list[Ticket] = []


class Ticket:
    """The place of one request in the queue."""

    def __init__(self, request: Generate, unit: Unit) -> None:
        self.request = request
        self.unit = unit
        self.engine: asyncio.Future[EngineEnd | None] = asyncio.get_running_loop().create_future()
        """Where it has room by now; None: it is not wanted any more, or can never be served."""

    def give(self, engine: EngineEnd | None) -> None:
        if not self.engine.done():
            self.engine.set_result(engine)


class Queue:
    def __init__(self, router: Router, is_hopeless: Callable[[Generate], bool]) -> None:
        """is_hopeless: whether no engine can ever serve a request."""
        self.stopped = False
        """Nobody is given an engine."""
        self._router = router
        self._is_hopeless = is_hopeless
        self._tickets: dict[str, Ticket] = {}
        self._units: dict[Unit, None] = {}
        """In line for an engine."""
        self._blocks: dict[str, Unit] = {}
        """Not yet whole, by session."""

    def __len__(self) -> int:
        return len(self._tickets)

    def __contains__(self, request: object) -> bool:
        return request in self._tickets

    def join(self, request: Generate) -> Ticket:
        """Its block is in line once it is whole, or closed."""
        is_block = request.block_size > 1
        unit = self._blocks.setdefault(request.session, Unit()) if is_block else Unit()
        ticket = self._tickets[request.request] = Ticket(request, unit)
        unit.tickets.append(ticket)
        if is_block and len(unit.tickets) >= request.block_size:
            self.close(ticket)
        elif not is_block:
            self._units[unit] = None
            self.dispatch()
        return ticket

    def close(self, ticket: Ticket) -> None:
        """The block of the ticket waits for nobody else."""
        session = ticket.request.session
        if self._blocks.get(session) is ticket.unit:
            self._units[self._blocks.pop(session)] = None
            self.dispatch()

    def leave(self, ticket: Ticket) -> None:
        """It has an engine, or is given up; the others of its unit stay together."""
        del self._tickets[ticket.request.request]
        unit, session = ticket.unit, ticket.request.session
        unit.tickets.remove(ticket)
        if not unit.tickets:
            self._units.pop(unit, None)
            if self._blocks.get(session) is unit:
                del self._blocks[session]

    def abort(self, request: str) -> None:
        if (ticket := self._tickets.get(request)) is not None:
            ticket.give(None)

    def drop_hopeless(self) -> None:
        for ticket in self._tickets.values():
            if self._is_hopeless(ticket.request):
                ticket.give(None)

    def dispatch(self) -> None:
        """Gives engines to those first in line, as far as there is room.

        A block that finds no engine with room for all of it has the next that has: nobody overtakes it.
        """
        refused: set[tuple[int, int | None]] = set()
        served: list[Unit] = []
        for unit in self._units:
            if self.stopped or not self._router.has_room:
                break
            waiting = [ticket for ticket in unit.tickets if not ticket.engine.done()]
            weights = {(ticket.request.min_version, ticket.request.pin_version) for ticket in waiting}
            if refused.issuperset(weights) and waiting:
                continue
            engine = self._router.reserve([ticket.request for ticket in waiting]) if waiting else None
            if engine is None and len(waiting) > 1:
                break
            if engine is None and waiting:
                refused |= weights
                continue
            for ticket in waiting:
                ticket.give(engine)
            served.append(unit)
        for unit in served:
            del self._units[unit]

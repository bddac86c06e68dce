"""What the slots of a run tell each other, and the two decisions that exactly one of them takes.

News of every slot reach all slots, those of one slot in order. `advance_gang` and `end` are compare-and-set: whoever is
first decides, and everybody hears it.
"""

import asyncio
from collections.abc import AsyncIterator
from typing import Protocol

from flashflow.launch.link import EvaluationDone, LinkMessage, Meeting, Note, Place, StepDone


class News(LinkMessage):
    """Base; the tag is the class name."""


class Placed(News):
    """A role process serves here."""

    name: str
    place: Place


class Gathers(News):
    """A gang meets."""

    meeting: Meeting


class Said(News):
    """Something for the person who watches the run."""

    message: StepDone | EvaluationDone | Note


class Signalled(News):
    """A slot got a signal that ends the run."""

    number: int


class Asked(News):
    """No step is done: every role is to say what it waits for."""


class GangAdvanced(News):
    """The gang of the generation before is over; decided once."""

    generation: int
    reason: str


class Over(News):
    """The run is over for every slot; decided once."""

    code: int
    """Exit code of the slots."""
    failure: str | None = None
    """The first thing that went wrong, for a person; the rest follows from it."""
    permanent: bool = False
    """Starting the slots again would not help."""
    step: int | None = None
    """Last step, when the controller ended the run in order."""
    reason: str = ""


ANY_NEWS = Placed | Gathers | Said | Signalled | Asked | GangAdvanced | Over


class Directory(Protocol):
    """One slot's end."""

    def post(self, news: Placed | Gathers | Said | Signalled | Asked) -> None:
        """To all slots, this one too. Never waits."""
        ...

    def news(self) -> AsyncIterator[ANY_NEWS]:
        """Of all slots, for ever."""
        ...

    async def advance_gang(self, generation: int, reason: str) -> bool:
        """From `generation` to the next; False when another slot has done it."""
        ...

    def end(self, over: Over) -> None:
        """The first end counts. Never waits."""
        ...

    async def watch(self) -> None:
        """Returns never; raises PeerLost when this slot has lost the others, or lost one of them."""
        ...

    async def close(self) -> Over | None:
        """What was posted last is on its way. Returns the end that all slots have, as far as it is known."""
        ...


class LocalDirectory:
    """Of a run with one slot."""

    def __init__(self) -> None:
        self._queue: asyncio.Queue[ANY_NEWS] = asyncio.Queue()
        self._generation = 1
        self._over: Over | None = None

    def post(self, news: Placed | Gathers | Said | Signalled | Asked) -> None:
        self._queue.put_nowait(news)

    async def news(self) -> AsyncIterator[ANY_NEWS]:
        while True:
            yield await self._queue.get()

    async def advance_gang(self, generation: int, reason: str) -> bool:
        if generation != self._generation:
            return False
        self._generation += 1
        self._queue.put_nowait(GangAdvanced(generation=self._generation, reason=reason))
        return True

    def end(self, over: Over) -> None:
        if self._over is None:
            self._over = over
            self._queue.put_nowait(over)

    async def watch(self) -> None:
        await asyncio.Event().wait()

    async def close(self) -> Over | None:
        return self._over

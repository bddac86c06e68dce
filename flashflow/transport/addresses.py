"""Where the processes of the run can be reached, as far as this process has been told."""

import asyncio
from collections.abc import Callable, Mapping

import msgspec

from flashflow.errors import DeadlineError


class Address(msgspec.Struct, frozen=True):
    """The two bound sockets of one process."""

    data: str
    """ZeroMQ endpoint, e.g. `tcp://127.0.0.1:40001`."""
    control: str
    incarnation: int


Listener = Callable[[Address], None]


class Addresses:
    """A directory `role-index` -> Address. The supervisor's news enter by `update`; nothing ever leaves it."""

    def __init__(self, known: Mapping[str, Address] | None = None) -> None:
        self._known: dict[str, Address] = dict(known or {})
        self._listeners: dict[str, list[Listener]] = {}

    def get(self, name: str) -> Address | None:
        return self._known.get(name)

    def update(self, news: Mapping[str, Address]) -> None:
        """Take new or changed addresses; news of an older incarnation than the known one is ignored."""
        for name, address in news.items():
            known = self._known.get(name)
            if known is not None and (address == known or address.incarnation < known.incarnation):
                continue
            self._known[name] = address
            for listener in list(self._listeners.get(name, ())):
                listener(address)

    def subscribe(self, name: str, listener: Listener) -> Callable[[], None]:
        """Call `listener` at every later change of `name`; returns the function that ends it."""
        listeners = self._listeners.setdefault(name, [])
        listeners.append(listener)
        return lambda: listeners.remove(listener) if listener in listeners else None

    async def wait_for(self, name: str, *, deadline_s: float) -> Address:
        """The address of `name`, as soon as it is known. Raises DeadlineError."""
        known = self._known.get(name)
        if known is not None:
            return known
        first: asyncio.Future[Address] = asyncio.get_running_loop().create_future()
        unsubscribe = self.subscribe(name, lambda address: None if first.done() else first.set_result(address))
        try:
            async with asyncio.timeout(deadline_s):
                return await first
        except TimeoutError as error:
            raise DeadlineError(
                f"the address of {name} was not published within network.startup_deadline_s = {deadline_s} s:"
                " see that process's log, or raise the deadline"
            ) from error
        finally:
            unsubscribe()

"""Wakes everybody who waits for a change."""

import asyncio


class Signal:
    """Between a check that failed and wait() there must be no await, or a change could slip through."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def notify(self) -> None:
        self._event.set()
        self._event = asyncio.Event()

    async def wait(self, timeout_s: float | None) -> None:
        """Returns at the next notify(), or after `timeout_s`; None: only then."""
        event = self._event
        try:
            async with asyncio.timeout(timeout_s):
                await event.wait()
        except TimeoutError:
            return

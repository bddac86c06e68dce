"""Time of the scheduling code. Roles ask this clock and nothing else: a loop with virtual time simulates them."""

import asyncio
from typing import Protocol


class Clock(Protocol):
    def now(self) -> float:
        """Seconds since an arbitrary start; never goes back."""
        ...

    async def sleep(self, seconds: float) -> None: ...


class LoopClock:
    """The running event loop's time: the machine's, or virtual. `asyncio.timeout` agrees with it."""

    def now(self) -> float:
        return asyncio.get_running_loop().time()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

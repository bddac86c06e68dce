"""Where calls that block on the disk run: in a thread, so that the event loop goes on, or in place on virtual time."""

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

ResultT = TypeVar("ResultT")


class Offload(Protocol):
    """`asyncio.to_thread`, or `in_place`."""

    async def __call__(self, function: Callable[..., ResultT], /, *args: Any) -> ResultT: ...


async def in_place(function: Callable[..., ResultT], /, *args: Any) -> ResultT:
    """For a loop whose time is virtual: threads have no place there."""
    return function(*args)

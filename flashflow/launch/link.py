"""The line between a supervisor and one role process: an inherited socket carrying msgpack messages, length-prefixed.

Its end is a signal by itself: a child that reads EOF has lost its supervisor and leaves at once.
"""

import asyncio
import socket
import struct
from collections.abc import AsyncIterator
from typing import Any, Literal, dataclass_transform

import msgspec

from flashflow.launch.startup import Milestone


class RoleSpec(msgspec.Struct, frozen=True):
    """What the supervisor tells a role process on its command line."""

    role: str
    index: int
    incarnation: int
    generation: int
    run_id: str
    config: str
    """Path of the resolved config."""
    interface: str
    """Address that its sockets are bound to."""
    carrier: Literal["shared_memory", "file"]
    """Of the weights."""
    link_fd: int
    supervisor_pid: int
    cpus: list[int] | None
    resume: bool
    key: str | None
    """Path of the run's CURVE key (mode 0600); None on loopback."""

    @property
    def name(self) -> str:
        return f"{self.role}-{self.index}"


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(msgspec.field,))
class LinkMessage(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Base; the tag is the class name."""


class Listening(LinkMessage):
    """The role is ready and serves at these addresses."""

    data: str
    control: str


class Ready(LinkMessage):
    """A role that serves nobody has started."""


class Reached(LinkMessage):
    """A milestone of the start."""

    milestone: Milestone
    at: float
    """Seconds of the host's monotonic clock."""


class StepDone(LinkMessage):
    record: dict[str, Any]


class EvaluationDone(LinkMessage):
    version: int
    accuracy: float
    seconds: float


class Note(LinkMessage):
    """A line for a person."""

    text: str


class Failed(LinkMessage):
    """An exception reached the top of the role."""

    kind: str
    text: str
    """Message and traceback."""
    transient: bool
    """True: a peer or a deadline was lost, starting again may help. False: the run must stop."""


class Finished(LinkMessage):
    """The controller has ended the run in order."""

    step: int
    reason: str


class Place(msgspec.Struct, frozen=True):
    """Where an incarnation of a role process is reached."""

    data: str
    control: str
    incarnation: int


class AddressBook(LinkMessage):
    """All known places, by `role-index`."""

    places: dict[str, Place]


class Meeting(LinkMessage):
    """Where a generation of the gang meets: from the controller, which hosts it, to every trainer rank."""

    generation: int
    endpoint: str


class Stop(LinkMessage):
    """End in order."""


class Describe(LinkMessage):
    """What do you wait for?"""


class Described(LinkMessage):
    """What the role waits for, who holds what and for how long; for a person."""

    text: str


ANY_LINK = (
    Listening | Ready | Reached | StepDone | EvaluationDone | Note | Failed | Finished
    | AddressBook | Meeting | Stop | Describe | Described
)  # fmt: skip

_LENGTH = struct.Struct("<I")


class Link:
    """One end. Reading and writing are asyncio's; a message is written whole or the other end is gone."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(ANY_LINK)

    @classmethod
    async def over(cls, end: socket.socket) -> "Link":
        end.setblocking(False)
        return cls(*await asyncio.open_unix_connection(sock=end))

    def send(self, message: ANY_LINK) -> None:
        """Never waits; what a dead end does not read is lost with it."""
        if self._writer.is_closing():
            return
        payload = self._encoder.encode(message)
        self._writer.write(_LENGTH.pack(len(payload)) + payload)

    async def flush(self) -> None:
        await self._writer.drain()

    async def messages(self) -> AsyncIterator[ANY_LINK]:
        """Until the other end closes or dies."""
        while True:
            try:
                (length,) = _LENGTH.unpack(await self._reader.readexactly(_LENGTH.size))
                payload = await self._reader.readexactly(length)
            except (asyncio.IncompleteReadError, ConnectionError):
                return
            yield self._decoder.decode(payload)

    def close(self) -> None:
        self._writer.close()

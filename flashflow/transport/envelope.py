"""The first frame of everything on a ZeroMQ socket: who sends it, to whom, in which run, and what it is for.

The frames of a message (codec.py) follow a Call, a Part and a Reply; the other envelopes stand alone.
"""

from typing import Final, Literal

import msgspec

from flashflow import messages as m
from flashflow.errors import TransportError
from flashflow.transport.channel import Peer
from flashflow.transport.codec import Frame

Lane = Literal["data", "control"]
"""The two connections of a pair: what travels on control overtakes what travels on data."""

CONTROL_MESSAGES: Final = (m.Abort, m.Suspend, m.Resume)
"""Calls that travel on the control lane."""


class Stamp(msgspec.Struct, frozen=True, array_like=True):
    """What every frame proves before it is looked at."""

    run: str
    sender: Peer
    connection: int
    """Ordinal of the caller's connection to this server; a server repeats the caller's."""
    to: str
    """`role-index` of the receiver: a port may have passed to another process."""
    acknowledged: int
    """From a caller: its lowest sequence without an answer; everything below may be forgotten. 0 from a server."""


class Envelope(msgspec.Struct, frozen=True, array_like=True, kw_only=True, tag=True):
    """Base of envelopes; the tag is the class name."""

    stamp: Stamp


# ---- from caller to server


class Hello(Envelope, frozen=True):
    """Opens a connection; on control. Answered by Welcome."""

    next_sequence: int
    outstanding: list[int]
    """Every sequence below `next_sequence` that still wants an answer; the server cancels the others."""


class Heartbeat(Envelope, frozen=True):
    """Both ways on control; a server answers the caller's."""


class Call(Envelope, frozen=True):
    """Starts the handler, once per sequence. A message follows."""

    sequence: int
    streamed: bool


class Attach(Envelope, frozen=True):
    """The call is known to the server: its answer should come over this connection."""

    sequence: int


class Cancel(Envelope, frozen=True):
    """The answer is no longer wanted."""

    sequence: int


class Grant(Envelope, frozen=True):
    """The caller has taken `consumed` parts of the stream; that many plus the window may be sent."""

    sequence: int
    consumed: int


class Bye(Envelope, frozen=True):
    """The caller leaves for good."""


# ---- from server to caller


class Welcome(Envelope, frozen=True):
    """The connection stands."""

    unknown: list[int]
    """Those of the Hello's outstanding sequences that the server never saw or has lost."""
    credits: int
    """Calls, and as many streams, that the caller may have outstanding on this connection."""


class Part(Envelope, frozen=True):
    """A partial reply of a stream. A message follows."""

    sequence: int


class Reply(Envelope, frozen=True):
    """The final reply. A message follows."""

    sequence: int


class Failure(Envelope, frozen=True):
    """The handler raised."""

    sequence: int
    kind: str
    text: str


class Stranger(Envelope, frozen=True):
    """The server does not know this connection (any more): say Hello again."""


FromCaller = Hello | Heartbeat | Call | Attach | Cancel | Grant | Bye
FromServer = Welcome | Heartbeat | Part | Reply | Failure | Stranger

_encoder = msgspec.msgpack.Encoder()
_from_caller = msgspec.msgpack.Decoder(FromCaller)
_from_server = msgspec.msgpack.Decoder(FromServer)


def seal(envelope: Envelope) -> bytes:
    return _encoder.encode(envelope)


def open_from_caller(frame: Frame) -> FromCaller:
    """Raises TransportError."""
    try:
        return _from_caller.decode(frame)
    except (msgspec.MsgspecError, ValueError) as error:
        raise TransportError(f"malformed envelope from a caller: {error}") from error


def open_from_server(frame: Frame) -> FromServer:
    """Raises TransportError."""
    try:
        return _from_server.decode(frame)
    except (msgspec.MsgspecError, ValueError) as error:
        raise TransportError(f"malformed envelope from a server: {error}") from error


def name_of(peer: Peer) -> str:
    """`role-index`, the name under which the directory knows the process."""
    return f"{peer.role}-{peer.index}"


def lane_of(message: m.Message) -> Lane:
    return "control" if isinstance(message, CONTROL_MESSAGES) else "data"

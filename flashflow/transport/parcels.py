"""Several messages in one ZeroMQ frame: sending and receiving a frame costs more than copying what lies in it.

A parcel: u64 number of messages; of each its number of frames; then the lengths of all frames; then the frames, each
padded to a multiple of eight bytes, so that arrays in them are aligned. All numbers are u64, little endian.
"""

import struct
from collections.abc import Sequence

from flashflow.errors import TransportError
from flashflow.transport.codec import Frame

ALIGNMENT = 8
_PADDING = [bytes(count) for count in range(ALIGNMENT)]


def pack(messages: Sequence[Sequence[Frame]]) -> bytes:
    counts = [len(frames) for frames in messages]
    lengths = [len(frame) for frames in messages for frame in frames]
    parts: list[Frame] = [struct.pack(f"<{1 + len(counts) + len(lengths)}Q", len(counts), *counts, *lengths)]
    for frames in messages:
        for frame in frames:
            parts.append(frame)
            if len(frame) % ALIGNMENT:
                parts.append(_PADDING[-len(frame) % ALIGNMENT])
    return b"".join(parts)


def unpack(parcel: Frame) -> list[list[Frame]]:
    """The frames are views of the parcel. Raises TransportError."""
    view = memoryview(parcel)
    try:
        (num_messages,) = struct.unpack_from("<Q", view)
        counts = struct.unpack_from(f"<{num_messages}Q", view, 8)
        lengths = struct.unpack_from(f"<{sum(counts)}Q", view, 8 + 8 * num_messages)
    except (struct.error, OverflowError, MemoryError) as error:
        raise TransportError(f"parcel of {len(view)} bytes: no table of frames ({error})") from error
    position = 8 * (1 + len(counts) + len(lengths))
    frames: list[Frame] = []
    for length in lengths:
        frames.append(view[position : position + length])
        position += length + -length % ALIGNMENT
    if position != len(view):
        raise TransportError(f"parcel of {len(view)} bytes: its table of frames says {position}")
    messages, taken = [], 0
    for count in counts:
        messages.append(frames[taken : taken + count])
        taken += count
    return messages

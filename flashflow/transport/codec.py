"""Messages and records to frames and back: one msgpack frame, then the raw bytes of every array in it.

An array in the msgpack is an extension value (number of its frame, dtype, shape), so arrays are neither copied nor
parsed. The closed sets of types make the codec strict: what it does not know raises at the encoder. No pickle.
"""

import functools
import math
import struct
import threading
from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeAlias, TypeVar, cast

import msgspec
import numpy as np
import numpy.typing as npt

from flashflow import messages
from flashflow.errors import FlashflowError, TransportError

Frame: TypeAlias = bytes | bytearray | memoryview
RecordT = TypeVar("RecordT")

ARRAY_EXTENSION = 1
"""msgpack extension code of an array placeholder."""
DTYPES: tuple[np.dtype[Any], ...] = (np.dtype("<i4"), np.dtype("<f4"), np.dtype("|u1"))
"""The position is the code on the wire."""
MAX_DIMENSIONS = 8
FRAME_ALIGNMENT = 8
"""Bytes; frames of a blob start at multiples of it, so that arrays in it are aligned when the blob is."""

_PLACEHOLDER = struct.Struct("<IBB")
_SHAPES = [struct.Struct(f"<{ndim}Q") for ndim in range(MAX_DIMENSIONS + 1)]
_DTYPES_BY_TEXT = {dtype.str: code for code, dtype in enumerate(DTYPES)}
"""A dtype's hash costs ten times its text's."""


def encode(message: messages.Message) -> list[Frame]:
    """Frames of a message. Array frames are views: the arrays must not change until the message has left.

    Raises TransportError naming the message and the value that cannot cross.
    """
    return _encode(message)


def decode(frames: Sequence[Frame]) -> messages.Message:
    """The message of `frames`; its arrays are read-only views of them. Raises TransportError on anything malformed."""
    message: messages.Message = _decode(frames, _message_decoder())
    return message


def encode_record(record: msgspec.Struct) -> bytes:
    """One blob of a record: number of frames, their lengths (all u32, little endian), then the padded frames.

    Raises TransportError on a value that cannot be stored and on a frame of 4 GiB or more.
    """
    frames = _encode(record)
    lengths = [len(frame) for frame in frames]
    if max(lengths) >= 1 << 32:
        raise TransportError(f"{type(record).__name__}: a frame of {max(lengths)} bytes does not fit a blob (4 GiB)")
    table = struct.pack(f"<{len(lengths) + 1}I", len(lengths), *lengths)
    return b"".join(part for frame in (table, *frames) for part in (frame, bytes(-len(frame) % FRAME_ALIGNMENT)))


def decode_record(blob: Frame, record_type: type[RecordT]) -> RecordT:
    """The record of a blob of `encode_record`; its arrays are read-only views of the blob. Raises TransportError."""
    record: RecordT = _decode(_split(memoryview(blob)), _record_decoder(cast(Hashable, record_type)))
    return record


def _split(blob: memoryview) -> list[Frame]:
    try:
        (count,) = struct.unpack_from("<I", blob)
        lengths = struct.unpack_from(f"<{count}I", blob, 4)
    except struct.error as error:
        raise TransportError(f"blob of {len(blob)} bytes: no table of frames ({error})") from error
    frames: list[Frame] = []
    start = _aligned(4 + 4 * count)
    for length in lengths:
        frames.append(blob[start : start + length])
        start = _aligned(start + length)
    if start != len(blob):
        raise TransportError(f"blob of {len(blob)} bytes: its table of frames says {start}")
    return frames


def _aligned(position: int) -> int:
    return position + -position % FRAME_ALIGNMENT


def _encode(value: msgspec.Struct) -> list[Frame]:
    frames: list[Frame] = [b""]

    def replace_array(item: object) -> msgspec.msgpack.Ext:
        if not isinstance(item, np.ndarray):
            raise TypeError(f"values of type {type(item).__module__}.{type(item).__qualname__} cannot cross")
        frames.append(_raw(item))
        return _placeholder(len(frames) - 1, item)

    try:
        frames[0] = msgspec.msgpack.encode(value, enc_hook=replace_array)
    except (TypeError, ValueError, OverflowError, RecursionError, msgspec.MsgspecError) as error:
        raise TransportError(f"{type(value).__name__} cannot be encoded: {error}") from error
    return frames


def _raw(array: npt.NDArray[Any]) -> Frame:
    """Bytes of the array in C order, without a copy where it is contiguous."""
    if array.size == 0:
        return b""
    return (array if array.flags.c_contiguous and array.ndim else np.ascontiguousarray(array)).data.cast("B")


def _placeholder(index: int, array: npt.NDArray[Any]) -> msgspec.msgpack.Ext:
    code = _DTYPES_BY_TEXT.get(array.dtype.str)
    if code is None:
        raise TypeError(f"array of dtype {array.dtype} cannot cross, only {', '.join(map(str, DTYPES))}")
    if array.ndim > MAX_DIMENSIONS:
        raise TypeError(f"array of {array.ndim} dimensions cannot cross, at most {MAX_DIMENSIONS}")
    head = _PLACEHOLDER.pack(index, code, array.ndim)
    return msgspec.msgpack.Ext(ARRAY_EXTENSION, head + _SHAPES[array.ndim].pack(*array.shape))


class _Reading(threading.local):
    """The frames this thread is decoding: msgspec's hooks belong to a decoder, which is shared."""

    frames: Sequence[Frame] = ()
    taken: int = 0


_reading = _Reading()


def _decode(frames: Sequence[Frame], decoder: "msgspec.msgpack.Decoder[Any]") -> Any:
    if not frames:
        raise TransportError("malformed frames: none")
    _reading.frames, _reading.taken = frames, 0
    try:
        value = decoder.decode(frames[0])
        if _reading.taken != len(frames) - 1:
            raise ValueError(f"{len(frames) - 1} array frames, {_reading.taken} named")
    except (msgspec.MsgspecError, ValueError, TypeError, OverflowError, RecursionError, struct.error) as error:
        raise TransportError(f"malformed frames: {error}") from error
    except FlashflowError as error:
        raise TransportError(f"malformed frames: {error}") from error
    finally:
        _reading.frames = ()
    return value


def _take_array(code: int, data: memoryview) -> npt.NDArray[Any]:
    """msgspec's ext_hook: the next array frame as the array that its placeholder describes."""
    if code != ARRAY_EXTENSION:
        raise ValueError(f"extension {code} is unknown")
    index, dtype_code, ndim = _PLACEHOLDER.unpack_from(data)
    if ndim > MAX_DIMENSIONS:
        raise ValueError(f"array placeholder of {ndim} dimensions, at most {MAX_DIMENSIONS}")
    shape = _SHAPES[ndim].unpack_from(data, _PLACEHOLDER.size)
    if index != _reading.taken + 1 or index >= len(_reading.frames) or dtype_code >= len(DTYPES):
        raise ValueError(f"array placeholder {index} (dtype {dtype_code}) of {len(_reading.frames) - 1} array frames")
    frame, dtype = _reading.frames[index], DTYPES[dtype_code]
    if math.prod(shape) * dtype.itemsize != len(frame):
        raise ValueError(f"array of shape {shape} and dtype {dtype} in a frame of {len(frame)} bytes")
    _reading.taken += 1
    array = np.frombuffer(frame, dtype=dtype)
    if array.flags.writeable:
        array.flags.writeable = False
    return array if ndim == 1 else array.reshape(shape)


def _check_array(annotation: Any, value: Any) -> Any:
    """msgspec's dec_hook, for the annotations it does not know: npt.NDArray[d] is ndarray[shape, dtype[d]]."""
    scalar = annotation.__args__[1].__args__[0]  # by hand, and without a cache: to hash an annotation costs more
    if not isinstance(value, np.ndarray) or value.dtype.type is not scalar:
        found = value.dtype if isinstance(value, np.ndarray) else type(value).__name__
        raise ValueError(f"expected an array of {np.dtype(scalar)}, found {found}")
    return value


def _decoder(accepted: Any) -> "msgspec.msgpack.Decoder[Any]":
    take: Callable[[int, memoryview], Any] = _take_array
    return msgspec.msgpack.Decoder(accepted, dec_hook=_check_array, ext_hook=take)


@functools.cache
def _message_decoder() -> "msgspec.msgpack.Decoder[Any]":
    return _decoder(messages.ANY)


@functools.cache
def _record_decoder(record_type: Any) -> "msgspec.msgpack.Decoder[Any]":
    return _decoder(record_type)

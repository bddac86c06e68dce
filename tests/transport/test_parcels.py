"""Parcels give back what was put in, aligned, and refuse what is none."""

import struct

import pytest

from flashflow.errors import TransportError
from flashflow.transport.parcels import pack, unpack

CASES = [
    [],
    [[]],
    [[b""]],
    [[b"a"], [], [b"12345678", b"", b"123456789"]],
    [[bytes(range(256)) * 40, memoryview(b"view"), bytearray(b"array")]],
]


@pytest.mark.parametrize("messages", CASES)
def test_what_is_packed_comes_out_again(messages):
    assert [[bytes(frame) for frame in frames] for frames in unpack(pack(messages))] == [
        [bytes(frame) for frame in frames] for frames in messages
    ]


def test_every_frame_begins_at_a_multiple_of_eight_bytes():
    parcel = pack([[b"1", b"12345678", b"123"], [b"12"]])
    starts = [parcel.index(bytes(frame), 8 * 7) for frames in unpack(parcel) for frame in frames]
    assert [start % 8 for start in starts] == [0, 0, 0, 0]


@pytest.mark.parametrize(
    "parcel",
    [
        b"",
        b"1234567",
        struct.pack("<Q", 1),
        struct.pack("<Q", 2**63),
        struct.pack("<QQ", 1, 2**61),
        struct.pack("<QQQ", 1, 1, 8),
        pack([[b"12345678"]])[:-1],
        pack([[b"12345678"]]) + b"8",
    ],
)
def test_what_is_no_parcel_is_refused(parcel):
    with pytest.raises(TransportError, match="parcel of"):
        unpack(parcel)

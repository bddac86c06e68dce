"""Frames and blobs: what goes in comes out, and nothing else gets through."""

import contextlib
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from flashflow import messages as m
from flashflow.errors import TransportError
from flashflow.records import Manifest, ManifestRow, SampleId, Task, Trajectory
from flashflow.transport.codec import decode, decode_record, encode, encode_record

int64s = st.integers(-(2**63), 2**63 - 1)
sample_ids = st.builds(SampleId, group=int64s, member=int64s, retry=int64s)
plain = st.recursive(
    st.none() | st.booleans() | int64s | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@st.composite
def trajectories(draw: st.DrawFn) -> Trajectory:
    length = draw(st.integers(0, 40))
    tokens, versions = (draw(hnp.arrays(np.int32, length)) for _ in range(2))
    return Trajectory(
        sample=draw(sample_ids),
        tokens=tokens,
        mask=draw(hnp.arrays(np.uint8, length)),
        logprobs=draw(hnp.arrays(np.float32, length)),
        versions=versions,
        num_turns=draw(st.integers(0, 5)),
        outcome=draw(st.sampled_from(["completed", "truncated", "failed"])),
        reward=draw(st.none() | st.floats(allow_nan=False)),
        reward_components=draw(st.dictionaries(st.text(), st.floats(allow_nan=False), max_size=2)),
        finish_reason=draw(st.text()),
        seconds=draw(st.floats(allow_nan=False)),
    )


def the_trajectory(length: int = 3) -> Trajectory:
    return Trajectory(
        sample=SampleId(4, 1),
        tokens=np.arange(length, dtype=np.int32),
        mask=np.ones(length, np.uint8),
        logprobs=np.full(length, -0.5, np.float32),
        versions=np.zeros(length, np.int32),
        num_turns=1,
        outcome="completed",
        reward=1.0,
        reward_components={"exact": 1.0},
        finish_reason="stop",
        seconds=0.25,
    )


def assert_same(left: Any, right: Any) -> None:
    """Equal by value, with arrays compared by dtype, shape and bytes (NaN included)."""
    if isinstance(left, np.ndarray):
        assert left.dtype == right.dtype
        assert left.shape == right.shape
        assert left.tobytes() == right.tobytes()
    elif isinstance(left, msgspec.Struct):
        assert type(left) is type(right)
        for field in left.__struct_fields__:
            assert_same(getattr(left, field), getattr(right, field))
    elif isinstance(left, list):
        assert len(left) == len(right)
        for one, other in zip(left, right, strict=True):
            assert_same(one, other)
    else:
        assert left == right


@settings(max_examples=40)
@given(st.lists(trajectories(), max_size=3))
def test_rows_of_any_trajectories_cross_unchanged(rows: list[Trajectory]) -> None:
    message = m.Rows(trajectories=rows)
    assert_same(message, decode([bytes(frame) for frame in encode(message)]))


@settings(max_examples=40)
@given(sample_ids, st.dictionaries(st.text(), plain, max_size=4), st.none() | st.integers(0, 9))
def test_a_lease_with_any_plain_row_crosses_unchanged(sample: SampleId, row: dict[str, Any], pin: int | None) -> None:
    lease = m.Lease(
        sample=sample, lease_epoch=1, purpose="train", task=Task(cursor=3, row=row), min_version=2, pin_version=pin
    )
    assert decode(encode(lease)) == lease


@settings(max_examples=40)
@given(trajectories())
def test_a_trajectory_blob_gives_the_trajectory_back(trajectory: Trajectory) -> None:
    assert_same(trajectory, decode_record(encode_record(trajectory), Trajectory))


def test_a_record_without_arrays_goes_to_a_blob_and_back() -> None:
    row = ManifestRow(
        sample=SampleId(0, 1), num_tokens=5, num_sampled=3, initiating_version=0, reward=None, outcome="failed"
    )
    manifest = Manifest(step=1, rows=[row], group_size=2, rng_key=2**64 - 1)
    assert decode_record(encode_record(manifest), Manifest) == manifest


def test_arrays_are_sent_as_views_and_arrive_as_read_only_views() -> None:
    trajectory = the_trajectory()
    frames = encode(m.Commit(lease_epoch=1, purpose="train", trajectory=trajectory))
    assert len(frames) == 5  # one of msgpack, four arrays
    assert np.shares_memory(np.frombuffer(frames[1], np.int32), trajectory.tokens)
    received = decode(frames)
    assert isinstance(received, m.Commit)
    assert np.shares_memory(received.trajectory.tokens, trajectory.tokens)
    assert not received.trajectory.tokens.flags.writeable
    assert trajectory.tokens.flags.writeable


def test_arrays_in_a_blob_are_aligned() -> None:
    trajectory = decode_record(encode_record(the_trajectory(5)), Trajectory)  # 5 mask bytes would misalign the next
    assert all(a.flags.aligned for a in (trajectory.tokens, trajectory.mask, trajectory.logprobs, trajectory.versions))


def test_strided_arrays_cross_by_value() -> None:
    reply = m.GenerateReply(
        token_ids=np.arange(10, dtype=np.int32)[::3],
        logprobs=np.zeros(4, np.float32),
        versions=np.zeros(4, np.int32),
    )
    received = decode(encode(reply))
    assert isinstance(received, m.GenerateReply)
    assert received.token_ids.tolist() == [0, 3, 6, 9]


@pytest.mark.parametrize(
    ("row", "named"),
    [
        ({"answer": object()}, "builtins.object"),
        ({"answer": np.int64(3)}, "numpy.int64"),
        ({"answer": np.zeros(2)}, "float64"),
        ({"answer": np.zeros((1,) * 9, np.int32)}, "9 dimensions"),
        ({"answer": 2**70}, "ints"),
    ],
)
def test_an_unknown_value_raises_at_the_encoder_and_is_named(row: dict[str, Any], named: str) -> None:
    lease = m.Lease(sample=SampleId(0, 0), lease_epoch=0, purpose="train", task=Task(cursor=0, row=row), min_version=0)
    with pytest.raises(TransportError, match=rf"Lease cannot be encoded: .*{named}"):
        encode(lease)


def test_an_array_of_another_dtype_than_annotated_is_refused() -> None:
    zeros = np.zeros(2, np.float32)
    frames = encode(m.GenerateReply(token_ids=zeros, logprobs=zeros, versions=np.zeros(2, np.int32)))  # type: ignore[arg-type]
    with pytest.raises(TransportError, match=r"expected an array of int32, found float32 .*token_ids"):
        decode(frames)


def test_a_list_in_the_place_of_an_array_is_refused() -> None:
    body = {"type": "GenerateReply", "token_ids": [1], "logprobs": [0.0], "versions": [0]}
    with pytest.raises(TransportError, match="expected an array of int32, found list"):
        decode([msgspec.msgpack.encode(body)])


def test_missing_surplus_and_short_array_frames_are_refused() -> None:
    frames = encode(m.Commit(lease_epoch=1, purpose="train", trajectory=the_trajectory()))
    for broken in (frames[:-1], [*frames, b"x"], [*frames[:-1], b"12345"], [frames[0], *frames[:0:-1]], []):
        with pytest.raises(TransportError, match="malformed frames"):
            decode(broken)


def test_a_record_that_breaks_its_own_contract_is_refused() -> None:
    frames = encode(m.Commit(lease_epoch=1, purpose="train", trajectory=the_trajectory()))
    head = msgspec.msgpack.decode(frames[0])
    shorter = head["trajectory"]["versions"]
    head["trajectory"]["versions"] = msgspec.msgpack.Ext(shorter.code, shorter.data[:6] + (2).to_bytes(8, "little"))
    with pytest.raises(TransportError, match="arrays of different lengths"):
        decode([msgspec.msgpack.encode(head), *frames[1:4], frames[4][:8]])


def test_a_message_outside_the_closed_set_is_refused() -> None:
    class Surprise(m.Message):
        text: str = "boo"

    with pytest.raises(TransportError, match="Invalid value 'Surprise'"):
        decode(encode(Surprise()))


@settings(max_examples=200)
@given(st.lists(st.binary(max_size=60), max_size=4))
@example([b"\xdf\xff\xff\xff\xff"])
@example([b"\xdd\xff\xff\xff\xff"])
@example([b"\x91" * 5000])
def test_garbage_raises_a_transport_error_and_nothing_else(frames: list[bytes]) -> None:
    with pytest.raises(TransportError):
        decode(frames)


@settings(max_examples=200)
@given(st.data())
def test_a_damaged_message_is_refused_or_still_a_message(data: st.DataObject) -> None:
    frames = [bytearray(f) for f in encode(m.Commit(lease_epoch=1, purpose="train", trajectory=the_trajectory()))]
    position = data.draw(st.integers(0, len(frames[0]) - 1))
    frames[0][position] ^= data.draw(st.integers(1, 255))
    with contextlib.suppress(TransportError):
        assert isinstance(decode(frames), m.Message)


@settings(max_examples=200)
@given(st.binary(max_size=80))
@example(b"\xff\xff\xff\xff")
@example(b"")
def test_a_garbage_blob_raises_a_transport_error(blob: bytes) -> None:
    with pytest.raises(TransportError):
        decode_record(blob, Trajectory)


def test_a_truncated_blob_is_refused() -> None:
    blob = encode_record(the_trajectory())
    for length in range(len(blob)):
        with pytest.raises(TransportError):
            decode_record(blob[:length], Trajectory)

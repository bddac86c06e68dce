"""The weights of a model that does not exist: a version in a few bytes, through the same shared memory as real ones.

`NOWHERE` is the segment of the virtual clock, where there is no memory to share.
"""

import mmap
import secrets

import numpy as np

from flashflow.errors import WeightsError
from flashflow.records import SharedWeights, StagedWeights, TensorSpec
from flashflow.transport.weights.segment import (
    create_segment,
    map_segment,
    remove_segments,
    segment_name,
    unlink_segment,
)

NOWHERE = ""
NBYTES = 64
"""A version as int64; the rest is 0."""
PREFIX = "simulated"


def virtual_weights(version: int) -> SharedWeights:
    return SharedWeights(version=version, segment=NOWHERE, nbytes=0, tensors=[])


class TinyStage:
    """Stages versions in segments of a run; each is a new one, and the two newest stay."""

    def __init__(self, run_id: str) -> None:
        """Removes what an earlier, killed incarnation left behind."""
        remove_segments(run_id, PREFIX)
        self._run_id = run_id
        self._segments: list[tuple[str, mmap.mmap]] = []

    def stage(self, version: int) -> SharedWeights:
        name = segment_name(self._run_id, PREFIX, secrets.token_hex(4))
        memory = create_segment(name, NBYTES)
        content = np.zeros(NBYTES // 4, np.int32)
        content[:2] = np.array([version], np.int64).view(np.int32)
        memory[:] = content.tobytes()
        self._segments.append((name, memory))
        for old, _ in self._segments[:-2]:
            unlink_segment(old)
        del self._segments[:-2]
        spec = TensorSpec(
            name="version", dtype="int64", shape=[NBYTES // 8], offset=0, digest=int(content.sum(dtype=np.int64))
        )
        return SharedWeights(version=version, segment=name, nbytes=NBYTES, tensors=[spec])

    def close(self) -> None:
        for name, _ in self._segments:
            unlink_segment(name)
        self._segments.clear()


def check(weights: StagedWeights) -> None:
    """Maps and reads a staged copy. Raises WeightsError when it is gone, damaged or of another version."""
    if not isinstance(weights, SharedWeights):
        raise WeightsError(f"simulated weights are in shared memory, not in {weights.path}")
    if weights.segment == NOWHERE:
        return
    with map_segment(weights.segment, weights.nbytes) as memory:
        content = np.frombuffer(memory[:], np.int32)
    found, (spec,) = int(content.sum(dtype=np.int64)), weights.tensors
    version = int(content[:2].view(np.int64)[0])
    if found != spec.digest or version != weights.version:
        raise WeightsError(
            f"segment {weights.segment!r} holds version {version} with digest {found}; "
            f"announced are {weights.version} and {spec.digest}"
        )

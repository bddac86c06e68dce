"""The random number that samples a token depends on who the token is, never on who is beside it (contract 3).

Torch-free, so that any loop can repeat an engine's draws.
"""

import hashlib

import numpy as np
import numpy.typing as npt

from flashflow.messages import SamplingKey

UInt64Array = npt.NDArray[np.uint64]
Int64Array = npt.NDArray[np.int64]
Float64Array = npt.NDArray[np.float64]

_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


def sampling_key_bits(key: SamplingKey) -> int:
    """64 bits of BLAKE2b over (seed, group, member, retry, turn)."""
    text = f"{key.seed}/{key.group}/{key.member}/{key.retry}/{key.turn}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


def uniforms(keys: UInt64Array, positions: Int64Array) -> Float64Array:
    """Draws in [0, 1) with 53 random bits, one per row.

    keys: [N] `sampling_key_bits` of each row's request. positions: [N] index of the token among those sampled in its
    turn, from 0. Output number `position` of splitmix64 (Steele, Lea, Flood 2014) seeded with the key.
    """
    state = keys + (positions.astype(np.uint64) + np.uint64(1)) * _GAMMA
    state = (state ^ (state >> np.uint64(30))) * _MIX_1
    state = (state ^ (state >> np.uint64(27))) * _MIX_2
    draws: Float64Array = ((state ^ (state >> np.uint64(31))) >> np.uint64(11)) * 2.0**-53
    return draws

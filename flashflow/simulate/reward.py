"""A reward function for simulated answers: a wait, and a value that is one with a given probability.

`reward: {function: "flashflow.simulate.reward:simulated", arguments: {latency_s: 0.2, sigma_s: 0.1, mean: 0.5}}`
"""

import asyncio
import hashlib
from statistics import NormalDist

from flashflow.rewards.base import reward

_STANDARD = NormalDist()


@reward
async def simulated(completion: str, latency_s: float = 0.0, sigma_s: float = 0.0, mean: float = 0.5) -> float:
    """Takes N(latency_s, sigma_s) seconds, 0 where that is negative; 1 with probability `mean`, else 0.

    What it is depends on the answer alone, which for simulated engines names the attempt.
    """
    seconds = latency_s + sigma_s * _STANDARD.inv_cdf(_uniform("wait", completion)) if sigma_s else latency_s
    if seconds > 0:
        await asyncio.sleep(seconds)
    return float(_uniform("value", completion) < mean)


def _uniform(what: str, completion: str) -> float:
    digest = hashlib.blake2b(f"{what}/{completion}".encode(), digest_size=8).digest()
    return ((int.from_bytes(digest, "little") >> 11) + 0.5) * 2.0**-53

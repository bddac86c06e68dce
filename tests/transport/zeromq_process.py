"""A process of its own for test_zeromq.py: a server or a caller that is there to be killed.

It prints one JSON value per line: first its address (a server), then what happens, one event per line.
"""

import asyncio
import json
import sys
from typing import Any

import msgspec
import numpy as np

from flashflow import messages as m
from flashflow.config.sections import NetworkSection
from flashflow.transport.addresses import Address, Addresses
from flashflow.transport.channel import Emit, Peer
from flashflow.transport.zeromq import ZmqTransport

NETWORK = NetworkSection(heartbeat_s=0.1, peer_deadline_s=2.0, startup_deadline_s=20.0, shutdown_deadline_s=2.0)


def say(value: Any) -> None:
    print(msgspec.json.encode(value).decode(), flush=True)


async def serve(incarnation: int) -> None:
    """Engine 0. Incarnation 0 answers nothing for ever, but emits one part; later ones answer at once."""
    transport = ZmqTransport(Peer("engine", 0, incarnation), "run", Addresses(), NETWORK)

    async def handler(message: m.Message, peer: Peer, emit: Emit) -> m.Message:
        say(type(message).__name__)
        if isinstance(message, m.Generate):
            token = np.ones(1, np.int32)
            await emit(m.GenerateReply(token_ids=token, logprobs=np.zeros(1, np.float32), versions=token))
        if incarnation == 0:
            await asyncio.Event().wait()
        return m.Serving(version=incarnation, engines=[str(peer)])

    await transport.listen(handler, lambda peer: say(f"lost {peer}"))
    say(transport.address)
    await transport.failed


async def call(incarnation: int, address: Address) -> None:
    """Env 9: one call without end."""
    transport = ZmqTransport(Peer("env", 9, incarnation), "run", Addresses({"buffer-0": address}), NETWORK)
    await transport.client("buffer-0").call(m.NextBatch(step=1), m.BatchReply, deadline_s=60)


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        asyncio.run(serve(int(sys.argv[2])))
    else:
        asyncio.run(call(int(sys.argv[2]), msgspec.convert(json.loads(sys.argv[3]), Address)))

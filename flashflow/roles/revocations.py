"""Leases that ended under their holders, until these are told (contract 3): their attempts only cost tokens by now."""

import asyncio
from collections.abc import Callable

from flashflow.messages import LeaseName, Revoked
from flashflow.records import Purpose
from flashflow.roles.membership import Holding
from flashflow.transport.channel import Peer


class Revocations:
    def __init__(self) -> None:
        self._untold: dict[Peer, list[LeaseName]] = {}
        self._waiting: dict[Peer, asyncio.Event] = {}

    def __len__(self) -> int:
        return sum(map(len, self._untold.values()))

    def add(self, held: Holding, purpose: Purpose) -> None:
        self._untold.setdefault(held.peer, []).append(LeaseName(held.sample, held.epoch, purpose))
        if (waiting := self._waiting.get(held.peer)) is not None:
            waiting.set()

    async def of(self, peer: Peer, timeout_s: float) -> Revoked:
        """What `peer` has not been told, as soon as there is something; nothing after `timeout_s`."""
        if peer not in self._untold:
            waiting = self._waiting.setdefault(peer, asyncio.Event())
            try:
                async with asyncio.timeout(timeout_s):
                    await waiting.wait()
            except TimeoutError:
                pass  # the answer is an empty one
            finally:
                self._waiting.pop(peer, None)
        return Revoked(leases=self._untold.pop(peer, []))

    def forget(self, gone: Callable[[Peer], bool]) -> None:
        """Those whose process is gone, and its attempts with it."""
        for peer in [peer for peer in self._untold if gone(peer)]:
            del self._untold[peer]

"""The transport without sockets: the promises of zeromq.py between roles on one event loop.

For the debugger, fast tests and the simulator: on a loop with virtual time (simulate/clock.py) deadlines and delays
are virtual too. A process dies by `close` of its transport. No frame can be lost, so nothing is sent twice to the
same incarnation, and there are no credits.
"""

import asyncio
from collections import Counter

from flashflow.config.sections import NetworkSection
from flashflow.errors import ContractError
from flashflow.transport.channel import Handler, Peer, PeerLostHook
from flashflow.transport.in_process_client import InProcessClient
from flashflow.transport.in_process_server import Delay, Directory, Endpoint, Wire
from flashflow.transport.sessions import wait_until_ended


class InProcessNetwork:
    """Connects the transports of one loop.

    `through_codec` passes each message through the encoder and decoder, so that what could not cross a socket is found
    here too; `delay` adds seconds to each message (calls may then overtake each other, parts of a stream never do).
    """

    def __init__(self, network: NetworkSection, *, through_codec: bool = True, delay: Delay | None = None) -> None:
        self.section = network
        self.wire = Wire(through_codec=through_codec, delay=delay)
        self.directory = Directory()

    def transport(self, me: Peer) -> "InProcessTransport":
        return InProcessTransport(me, self)


class InProcessTransport:
    """What one role has of the network. `failed` and `counters` as in ZmqTransport. Made on the running loop."""

    def __init__(self, me: Peer, network: InProcessNetwork) -> None:
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.counters: Counter[str] = Counter()
        self._me, self._network = me, network
        self._endpoint: Endpoint | None = None
        self._clients: dict[str, InProcessClient] = {}

    async def listen(self, handler: Handler, on_peer_lost: PeerLostHook) -> None:
        if self._endpoint is not None:
            raise ContractError(f"{self._me} listens already")
        endpoint = Endpoint(
            self._me, self._network.wire, handler, on_peer_lost, counters=self.counters, fail=self._fail
        )
        self._network.directory.open(endpoint)
        self._endpoint = endpoint

    def client(self, name: str) -> InProcessClient:
        if name not in self._clients:
            self._clients[name] = InProcessClient(
                self._me,
                name,
                self._network.wire,
                self._network.directory,
                startup_deadline_s=self._network.section.startup_deadline_s,
                counters=self.counters,
            )
        return self._clients[name]

    async def close(self) -> None:
        """Leave, or die: handlers are cancelled, servers lose this peer, the streams of callers break.

        Raises DeadlineError when a handler does not end within network.shutdown_deadline_s.
        """
        for client in self._clients.values():
            await client.close()
        self._network.directory.leave(self._me)
        self.failed.cancel()
        if self._endpoint is not None:
            await wait_until_ended(self._endpoint.close(), deadline_s=self._network.section.shutdown_deadline_s)

    def _fail(self, error: BaseException) -> None:
        if not self.failed.done():
            self.failed.set_exception(error)

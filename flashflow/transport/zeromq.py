"""The fleet's transport over ZeroMQ: calls between processes (contract 6).

      caller                                        server
      DEALER control  -- Hello, Heartbeat, Cancel -->  ROUTER control      heartbeats and aborts overtake data
      DEALER data     -- Call -------------------->    ROUTER data         a call runs once per (caller, sequence)

Heartbeats detect a death; acknowledgements deliver: a call without an answer is sent again to the next incarnation.
Waits for: nothing.   Unblocked by: frames, the heartbeat.   Never: pickles, or blocks the loop.
"""

import asyncio
from collections import Counter
from collections.abc import Callable

import zmq

from flashflow.config.sections import NetworkSection
from flashflow.errors import ConfigError, ContractError
from flashflow.transport.addresses import Address, Addresses
from flashflow.transport.channel import Handler, Peer, PeerLostHook
from flashflow.transport.security import RunKey, RunKeyAuthenticator, is_loopback
from flashflow.transport.sockets import PlainSocket
from flashflow.transport.zeromq_client import ZmqClient
from flashflow.transport.zeromq_server import ZmqServer

CREDITS = 1024
"""Calls, and as many streams, one caller may have outstanding at one server."""


class ZmqTransport:
    """One process's sockets. Made on the running loop.

    `failed` never has a result: it gets the exception of a handler (or of the transport itself) that is no
    FlashflowError; the role awaits it beside its own work, so that it stops loudly. `close` cancels it.
    `counters` counts refused frames by reason (`refused_*`), `resends`, `duplicates`, `connections_lost`, `peers_lost`.
    """

    def __init__(
        self,
        me: Peer,
        run_id: str,
        addresses: Addresses,
        network: NetworkSection,
        run_key: RunKey | None = None,
        *,
        credits: int = CREDITS,
        on_connected: Callable[[], None] = lambda: None,
    ) -> None:
        """on_connected: called whenever a server has welcomed a client and none waits for its welcome."""
        if run_key is None and not is_loopback(network.address):
            raise ConfigError([f"network.interface: {network.interface} leaves this host, which needs the run's key"])
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.counters: Counter[str] = Counter()
        self._me, self._run_id, self._addresses, self._network = me, run_id, addresses, network
        self._key, self._credits = run_key, credits
        self._on_connected = on_connected
        self._context: zmq.Context[PlainSocket] = zmq.Context()
        self._authenticator: RunKeyAuthenticator | None = None
        self._server: ZmqServer | None = None
        self._clients: dict[str, ZmqClient] = {}
        self._beat = asyncio.create_task(self._watch(), name=f"heartbeat of {me}")

    @property
    def address(self) -> Address:
        """Where this process serves, to be published. Raises ContractError before `listen`."""
        if self._server is None:
            raise ContractError(f"{self._me} has no address: it does not listen")
        return self._server.address

    async def listen(self, handler: Handler, on_peer_lost: PeerLostHook) -> None:
        if self._server is not None:
            raise ContractError(f"{self._me} listens already")
        if self._key is not None:
            self._authenticator = RunKeyAuthenticator(self._context, self._key)
            self._authenticator.start()
        self._server = ZmqServer(
            self._me,
            self._run_id,
            self._network.address,
            self._bind,
            handler,
            on_peer_lost,
            credits=self._credits,
            counters=self.counters,
            fail=self._fail,
        )

    def client(self, name: str) -> ZmqClient:
        if name not in self._clients:
            self._clients[name] = ZmqClient(
                self._me,
                self._run_id,
                name,
                self._addresses,
                self._network,
                self._connect,
                counters=self.counters,
                fail=self._fail,
                on_welcome=self._welcomed,
            )
        return self._clients[name]

    async def close(self) -> None:
        """Say goodbye, cancel handlers, close every socket; what lingers gets network.shutdown_deadline_s / 4.

        Raises DeadlineError when a handler does not end. Not to be awaited by a handler, which would wait for itself.
        """
        self._beat.cancel()
        await asyncio.wait([self._beat])
        for client in self._clients.values():
            await client.close()
        try:
            if self._server is not None:
                await self._server.close(deadline_s=self._network.shutdown_deadline_s, linger_ms=self._linger_ms)
        finally:
            if self._authenticator is not None:
                self._authenticator.stop()
            self.failed.cancel()
            await asyncio.to_thread(self._context.term)

    @property
    def _linger_ms(self) -> int:
        return int(self._network.shutdown_deadline_s * 1000 / 4)

    async def _watch(self) -> None:
        heartbeat_s = self._network.heartbeat_s
        try:
            while True:
                await asyncio.sleep(heartbeat_s)
                # One heartbeat at a time, however late: when this process was stopped, its peers were not silent.
                if self._server is not None:
                    self._server.watch(heartbeat_s, self._network.peer_deadline_s)
                for client in list(self._clients.values()):
                    client.watch(heartbeat_s)
        except Exception as error:
            self._fail(error)

    def _welcomed(self) -> None:
        if all(client.connected for client in self._clients.values()):
            self._on_connected()

    def _fail(self, error: BaseException) -> None:
        if not self.failed.done():
            self.failed.set_exception(error)

    def _bind(self, endpoint: str) -> PlainSocket:
        socket = self._socket(zmq.ROUTER, endpoint)
        socket.router_mandatory = True
        socket.router_handover = False
        if self._key is not None:
            self._key.secure_server(socket)
        socket.bind(endpoint)
        return socket

    def _connect(self, endpoint: str, identity: bytes) -> PlainSocket:
        socket = self._socket(zmq.DEALER, endpoint)
        socket.routing_id = identity
        if self._key is not None:
            self._key.secure_client(socket)
        socket.connect(endpoint)
        return socket

    def _socket(self, kind: int, endpoint: str) -> PlainSocket:
        socket = self._context.socket(kind)
        socket.ipv6 = "[" in endpoint
        socket.linger = self._linger_ms
        socket.sndhwm = socket.rcvhwm = 0
        return socket

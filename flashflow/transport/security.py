"""CURVE encryption and authentication of the fleet's sockets with one key pair per run.

Whoever can read the key file may join the run: servers prove themselves with the key, and admit a client only when
it presents the same key.
"""

import hmac
import ipaddress
import os
from pathlib import Path

import msgspec
import zmq
from zmq.auth.asyncio import AsyncioAuthenticator

from flashflow.errors import ConfigError


class RunKey(msgspec.Struct, frozen=True):
    """The run's CURVE key pair, Z85 text of 40 characters each."""

    public: str
    secret: str

    def __repr__(self) -> str:
        return f"RunKey(public={self.public!r}, secret=...)"

    def secure_server(self, socket: zmq.Socket[bytes]) -> None:
        """Before bind: accept only CURVE connections, and ask the authenticator about each."""
        self._load(socket)
        socket.curve_server = True

    def secure_client(self, socket: zmq.Socket[bytes]) -> None:
        """Before connect: talk only to a server that holds the run key."""
        self._load(socket)
        socket.curve_serverkey = self.public.encode()

    def _load(self, socket: zmq.Socket[bytes]) -> None:
        socket.curve_publickey = self.public.encode()
        socket.curve_secretkey = self.secret.encode()


def create_run_key(path: Path) -> RunKey:
    """Make a key pair and write it to `path`, mode 0600. Raises FileExistsError rather than replace a key in use."""
    public, secret = zmq.curve_keypair()
    key = RunKey(public=public.decode(), secret=secret.decode())
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(msgspec.json.encode(key))
    return key


def load_run_key(path: Path) -> RunKey:
    """Raises ConfigError when the file is damaged, or readable by others."""
    mode = path.stat().st_mode & 0o777
    if mode & 0o077:
        raise ConfigError([f"run key {path} has mode {mode:o}: others can read it; chmod 600, or make a new one"])
    try:
        return msgspec.json.decode(path.read_bytes(), type=RunKey)
    except msgspec.MsgspecError as error:
        raise ConfigError([f"run key {path} is damaged ({error}): delete it, it is made anew for each run"]) from error


def is_loopback(interface: str) -> bool:
    """Whether `network.interface` keeps traffic on this host."""
    try:
        return ipaddress.ip_address(interface).is_loopback
    except ValueError:
        return interface in ("localhost", "lo")


class RunKeyAuthenticator:
    """Answers libzmq's question, for one context, whether a client's public key may connect: only the run's may."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], key: RunKey) -> None:
        self._public = key.public.encode()
        self._authenticator = AsyncioAuthenticator(context)
        self._authenticator.configure_curve_callback(domain="*", credentials_provider=self)
        self.refused = 0
        """Connections refused."""

    def callback(self, domain: str, key: bytes) -> bool:
        """Called by pyzmq with the client's public key in Z85."""
        allowed = hmac.compare_digest(key, self._public)
        self.refused += not allowed
        return allowed

    def start(self) -> None:
        """Before the first bind of the context; on the running loop."""
        self._authenticator.start()

    def stop(self) -> None:
        self._authenticator.stop()

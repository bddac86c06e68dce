"""One connection of a caller to a server: a DEALER for data and one for control, and news of their ends."""

from collections.abc import Callable, Sequence

import zmq
from zmq.utils.monitor import parse_monitor_message

from flashflow.transport.addresses import Address
from flashflow.transport.codec import Frame
from flashflow.transport.envelope import Lane
from flashflow.transport.sockets import LoopSocket, OnError, OnFrames, PlainSocket

ConnectSocket = Callable[[str, bytes], PlainSocket]
"""Makes a DEALER with the routing id, connected to the endpoint."""

REFUSALS = zmq.Event.HANDSHAKE_FAILED_AUTH | zmq.Event.HANDSHAKE_FAILED_PROTOCOL | zmq.Event.HANDSHAKE_FAILED_NO_DETAIL


class Link:
    """Never reconnects by itself: a new connection is a new Link with a new routing id, and starts with a Hello."""

    def __init__(
        self,
        connect: ConnectSocket,
        address: Address,
        identity: bytes,
        *,
        on_frames: OnFrames,
        on_ended: Callable[["Link", str], None],
        on_error: OnError,
    ) -> None:
        self.address = address
        self._on_ended = on_ended
        self._sockets: dict[Lane, PlainSocket] = {
            "data": connect(address.data, identity),
            "control": connect(address.control, identity),
        }
        monitors = [s.get_monitor_socket(zmq.Event.DISCONNECTED | REFUSALS) for s in self._sockets.values()]
        self._monitors = [LoopSocket(monitor, self._on_event, on_error) for monitor in monitors]
        self._lanes = {lane: LoopSocket(socket, on_frames, on_error) for lane, socket in self._sockets.items()}

    def send(self, lane: Lane, frames: Sequence[Frame]) -> None:
        """On data when this turn of the loop ends, on control now."""
        if lane == "data":
            self._lanes[lane].post(frames)
        else:
            self._lanes[lane].send(frames)

    def close(self, *, linger_ms: int) -> None:
        for socket in self._sockets.values():
            if not socket.closed:
                socket.disable_monitor()
        for monitor in self._monitors:
            monitor.close(linger_ms=0)
        for lane in self._lanes.values():
            lane.close(linger_ms=linger_ms)

    def _on_event(self, frames: list[bytes]) -> None:
        event = zmq.Event(parse_monitor_message(frames)["event"])
        if event & REFUSALS:
            self._on_ended(self, "handshake refused: does the other end hold this run's key?")
        elif event == zmq.Event.DISCONNECTED:
            self._on_ended(self, "connection ended")

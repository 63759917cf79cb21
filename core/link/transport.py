"""ZeroMQ transport of the engine link: the control plane binds a ROUTER, engines connect a DEALER.

ZeroMQ reconnects by itself; what is sent while the peer is away waits in a bounded queue. Neither end blocks: the
runtime calls `receive` and `send` on SGLang's step path.
"""

from __future__ import annotations

import errno
import os
import time
from pathlib import Path

import msgspec
import zmq

from core.errors import HarliError
from core.link.messages import FromEngine, ToEngine

_ENCODER = msgspec.msgpack.Encoder()
_HIGH_WATER = 10_000
_PORT_WAIT_S = 1.0


class LinkError(HarliError):
    """The link's address cannot be used, or a peer sent what this version does not understand."""


class EngineEnd:
    """The engine's end. Not thread-safe: one thread owns it."""

    def __init__(self, url: str, engine_id: str) -> None:
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
        self._socket.setsockopt(zmq.IDENTITY, engine_id.encode())
        self._socket.setsockopt(zmq.LINGER, 1000)
        self._socket.setsockopt(zmq.SNDHWM, _HIGH_WATER)
        self._socket.setsockopt(zmq.RECONNECT_IVL, 100)
        self._socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
        # A control plane that stands still does not close the connection; another one may have taken its address.
        self._socket.setsockopt(zmq.HEARTBEAT_IVL, 2000)
        self._socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 6000)
        self._monitor: zmq.Socket[bytes] = self._socket.get_monitor_socket(zmq.EVENT_CONNECTED)
        self._socket.connect(url)
        self._decoder = msgspec.msgpack.Decoder(ToEngine)

    def reconnected(self) -> bool:
        """Whether the connection was made (again) since the last call: the moment to say hello."""
        seen = False
        while self._monitor.poll(0):
            self._monitor.recv_multipart()
            seen = True
        return seen

    @property
    def wake_sockets(self) -> tuple[zmq.Socket[bytes], ...]:
        """Sockets that become readable when a message came or the connection was made."""
        return self._socket, self._monitor

    def send(self, message: FromEngine) -> bool:
        """Queue a message; False when the queue is full (the peer has been away too long) and it was dropped."""
        try:
            self._socket.send(_ENCODER.encode(message), zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def receive(self, timeout_ms: int = 0) -> ToEngine | None:
        """The next message, or None when none came within `timeout_ms`."""
        if not self._socket.poll(timeout_ms):
            return None
        return self._decoder.decode(self._socket.recv())

    def close(self) -> None:
        """Close; what is queued still goes out within a second."""
        self._socket.disable_monitor()
        self._monitor.close()
        self._socket.close()


class ControlEnd:
    """The control plane's end. Not thread-safe: one thread owns it."""

    def __init__(self, url: str) -> None:
        if url.startswith("ipc://"):
            path = Path(url.removeprefix("ipc://"))
            path.parent.mkdir(parents=True, exist_ok=True)
            path.unlink(missing_ok=True)
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.SNDHWM, _HIGH_WATER)
        # A restarted engine may come back under the same identity before the old connection is seen to be dead.
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        try:
            _bind(self._socket, url)
        except zmq.ZMQError as error:
            self._socket.close()
            raise LinkError(
                "link_address", f"the engine link cannot be opened at {url}: {error}; set HARLI_LINK_URL", "link_url"
            ) from error
        if url.startswith("ipc://"):
            os.chmod(url.removeprefix("ipc://"), 0o600)
        self._decoder = msgspec.msgpack.Decoder(FromEngine)

    def send(self, engine_id: str, message: ToEngine) -> bool:
        """Send to one engine; False when it is not connected."""
        try:
            self._socket.send_multipart([engine_id.encode(), _ENCODER.encode(message)], zmq.NOBLOCK)
        except zmq.ZMQError:
            return False
        return True

    def receive(self, timeout_ms: int = 0) -> tuple[str, FromEngine] | None:
        """(engine id, message), or None when none came within `timeout_ms`."""
        if not self._socket.poll(timeout_ms):
            return None
        identity, payload = self._socket.recv_multipart()
        return identity.decode(), self._decoder.decode(payload)

    def close(self) -> None:
        self._socket.close()


def _bind(socket: zmq.Socket[bytes], url: str) -> None:
    """Bind; an end that was just closed gives its port back a moment later, from a thread of ZeroMQ's."""
    deadline = time.monotonic() + _PORT_WAIT_S
    while True:
        try:
            socket.bind(url)
            return
        except zmq.ZMQError as error:
            if error.errno != errno.EADDRINUSE or time.monotonic() >= deadline:
                raise
            time.sleep(0.02)

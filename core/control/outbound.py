"""HTTP to addresses that customers name. Such a request starts inside the platform's network, so it must not reach what
only the platform may: the machine itself, private networks, the cloud's metadata service.

The name is resolved here, every address that it has is checked, and the connection goes to one of those that were
checked: a name that resolves to something else a moment later changes nothing. Redirects are not followed, nothing of
the answer but its status is kept, and the whole exchange is bounded in time and size.
"""

from __future__ import annotations

import functools
import ipaddress
import socket
import ssl
import time
from collections.abc import Iterable
from typing import Any
from urllib.parse import urlsplit

import httpcore

from core.errors import Invalid

TIMEOUT_S = 10.0
_SETTING = "HARLI_WEBHOOKS_TO_PRIVATE_ADDRESSES=true allows it"


@functools.cache
def _trust() -> ssl.SSLContext:
    """The machine's authorities, which take a while to read."""
    return ssl.create_default_context()


class Refused(Exception):
    """The address is none that may be sent to; the message says why."""


def check_url(url: str, private_allowed: bool) -> None:
    """Raise Invalid for an address that no connection would be made to, as far as its spelling tells: what a name
    resolves to is looked at with every delivery."""
    parts = urlsplit(url)
    host = parts.hostname or ""
    if parts.username is not None or parts.password is not None:
        raise Invalid("webhook_url", "the address holds a user or password; leave it out, events are signed", "url")
    if parts.scheme != "https" and not private_allowed:
        raise Invalid("webhook_url", f"{parts.scheme}://{host} is not encrypted; give an https address", "url")
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return
    if not private_allowed and not _is_public(address):
        raise Invalid(
            "webhook_url", f"{host} is an address inside the platform's network; give a public one ({_SETTING})", "url"
        )


def _is_public(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> bool:
    mapped = getattr(address, "ipv4_mapped", None) or getattr(address, "sixtofour", None)
    if mapped is not None:
        return _is_public(mapped)
    # Not is_private alone: 100.64.0.0/10, which clouds use inside, is neither private nor global.
    return address.is_global and not (address.is_multicast or address.is_reserved or address.is_unspecified)


class _Bounded(httpcore.NetworkStream):
    """A connection that ends at a moment (monotonic seconds): a receiver that answers a byte at a time keeps within
    every single time-out for ever."""

    def __init__(self, stream: httpcore.NetworkStream, deadline: float) -> None:
        self._stream, self._deadline = stream, deadline

    def _left(self) -> float:
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise httpcore.ReadTimeout("the receiver took too long")
        return left

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        return self._stream.read(max_bytes, self._left())

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        self._stream.write(buffer, self._left())

    def close(self) -> None:
        self._stream.close()

    def start_tls(
        self, ssl_context: ssl.SSLContext, server_hostname: str | None = None, timeout: float | None = None
    ) -> httpcore.NetworkStream:
        return _Bounded(self._stream.start_tls(ssl_context, server_hostname, self._left()), self._deadline)

    def get_extra_info(self, info: str) -> Any:
        return self._stream.get_extra_info(info)


class _Guard(httpcore.NetworkBackend):
    """Connects to addresses that were checked, until `deadline`."""

    def __init__(self, private_allowed: bool, deadline: float) -> None:
        self._backend = httpcore.SyncBackend()
        self._private_allowed = private_allowed
        self._deadline = deadline

    def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.NetworkStream:
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except OSError as error:
            raise httpcore.ConnectError(f"{host} has no address: {error}") from error
        addresses = list(dict.fromkeys(str(entry[4][0]) for entry in found))
        if not self._private_allowed:
            inside = [text for text in addresses if not _is_public(ipaddress.ip_address(text.split("%")[0]))]
            if inside:
                raise Refused(f"{host} is {inside[0]}, an address inside the platform's network ({_SETTING})")
        stream = self._backend.connect_tcp(addresses[0], port, timeout, local_address, socket_options)
        return _Bounded(stream, self._deadline)

    def connect_unix_socket(self, *args: Any, **kwargs: Any) -> httpcore.NetworkStream:
        raise Refused("an address of this machine")

    def sleep(self, seconds: float) -> None:
        self._backend.sleep(seconds)


def post(url: str, body: bytes, headers: dict[str, str], *, private_allowed: bool, timeout_s: float = TIMEOUT_S) -> int:
    """Send JSON; the status of the answer. Raises Refused, or an httpcore exception when there is no answer in time."""
    guard = _Guard(private_allowed, time.monotonic() + timeout_s)
    sent = {"Content-Type": "application/json", "Content-Length": str(len(body)), **headers}
    request: dict[str, Any] = {
        "headers": [("Host", urlsplit(url).netloc), *sent.items()],
        "content": body,
        "extensions": {"timeout": {"connect": timeout_s, "pool": timeout_s}},
    }
    # What the receiver says is of no interest: the status comes first, and the connection is not kept.
    with (
        httpcore.ConnectionPool(ssl_context=_trust(), network_backend=guard) as pool,
        pool.stream("POST", url, **request) as response,
    ):
        return int(response.status)

"""Calls untrusted URLs by HTTP, without giving access to the operator's network.

The host's name is resolved once, and all of its addresses are checked. The connection goes to a
checked address, so an attacker gains nothing by changing the name's addresses later. Redirects are
not followed, no proxy is used, and little or nothing of the answer's body is read. The whole call
has a time limit, so a receiver cannot prolong it by sending single bytes.
"""

from __future__ import annotations

import http.client
import ipaddress
import socket
import ssl
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from urllib.parse import urlsplit

from promptq.shared.errors import PromptqError

_NAT64 = ipaddress.ip_network("64:ff9b::/96")
_GLOBAL_UNICAST = ipaddress.ip_network("2000::/3")
"""All IPv6 addresses that are routed on the internet;
https://www.iana.org/assignments/ipv6-address-space"""
_SPECIAL = [*map(ipaddress.ip_network, ("192.0.0.0/24", "192.88.99.0/24", "3fff::/20"))]
"""Further networks for special use, which some releases of Python 3.11 treat as global."""
_PORTS = {"http": 80, "https": 443}


class AddressRefusedError(PromptqError):
    """The URL may not be called, now or later."""


class PrivateAddressError(AddressRefusedError):
    """The host is in a private network."""


def is_public(address: str) -> bool:
    """Returns whether an IP address, or the IPv4 address inside it, is on the public internet."""
    ip = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(ip, ipaddress.IPv6Address):
        inner = ip.ipv4_mapped or ip.sixtofour
        if ip in _NAT64:
            inner = ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF)
        if inner is not None:
            return is_public(str(inner))
        if ip not in _GLOBAL_UNICAST:
            return False
    return ip.is_global and not ip.is_multicast and not any(ip in network for network in _SPECIAL)


def post(
    url: str,
    body: bytes,
    headers: Mapping[str, str],
    *,
    timeout: float,
    allow_private: bool = False,
) -> int:
    """Sends the body, and returns the status of the answer. Raises the errors of `call`."""
    try:
        return call("POST", url, body, headers, timeout=timeout, allow_private=allow_private)[0]
    except PrivateAddressError as error:
        raise AddressRefusedError(f"{error}; PROMPTQ_WEBHOOK_ALLOW_PRIVATE=1 allows it") from None


def call(
    method: str,
    url: str,
    body: bytes | None,
    headers: Mapping[str, str],
    *,
    timeout: float,
    allow_private: bool = False,
    most_bytes: int = 0,
) -> tuple[int, bytes]:
    """Returns the status of the answer, and up to `most_bytes` of its body.

    Each wait may take `timeout` seconds, and the whole call three times as long. This does not
    include resolving the host's name, whose time the system limits. Raises AddressRefusedError.
    Raises OSError or http.client.HTTPException for failures after which a retry may succeed.
    """
    until = time.monotonic() + 3 * timeout
    try:
        parts = urlsplit(url)
        host = parts.hostname
        if not host or parts.scheme not in _PORTS:
            raise ValueError("the URL has no http or https host")
        port = parts.port or _PORTS[parts.scheme]
        connection = http.client.HTTPConnection(host, port, timeout=timeout)
        connection.default_port = _PORTS[parts.scheme]  # not in the Host header
        target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        connection.sock = _connect(host, port, timeout, until, allow_private)
        is_late = threading.Event()

        def cut() -> None:
            is_late.set()
            if connection.sock is not None:
                with suppress(OSError):
                    socket.socket.shutdown(
                        connection.sock, socket.SHUT_RDWR
                    )  # not the shutdown of TLS

        timer = threading.Timer(max(0.0, until - time.monotonic()), cut)
        timer.daemon = True
        timer.start()
        try:
            if parts.scheme == "https":
                connection.sock = tls_context().wrap_socket(
                    connection.sock, server_hostname=host, do_handshake_on_connect=False
                )
                connection.sock.do_handshake()
            connection.request(method, target, body, dict(headers))
            response = connection.getresponse()
            content = response.read(most_bytes) if most_bytes else b""
        finally:
            timer.cancel()
            connection.close()
        if is_late.is_set():
            raise TimeoutError("the call took too long")
        return response.status, content
    except OSError:  # an error of a certificate is also a ValueError
        raise
    except (ValueError, http.client.InvalidURL) as error:
        raise AddressRefusedError(f"the URL is not valid: {error}") from None


def _connect(
    host: str, port: int, timeout: float, until: float, allow_private: bool
) -> socket.socket:
    addresses = [answer[4] for answer in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]
    for address in addresses:
        if not (allow_private or is_public(str(address[0]))):
            at = "" if host == address[0] else f", at {address[0]}"
            raise PrivateAddressError(f"{host} is in a private network{at}")
    last: OSError = OSError(f"{host!r} has no address")
    for address in addresses:
        left = until - time.monotonic()
        if left <= 0:
            break
        try:
            connection = socket.create_connection((str(address[0]), port), min(timeout, left))
        except OSError as error:
            last = error
        else:
            connection.settimeout(timeout)
            return connection
    raise last


@cache
def tls_context() -> ssl.SSLContext:
    return ssl.create_default_context()

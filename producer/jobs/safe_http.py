"""One HTTP POST to an address that a stranger named, from inside a network he must not see.

The host is resolved once, every address it has is checked, and the connection goes to one that was:
a name that means something else a moment later gains nothing. No redirect is followed, no proxy
is asked, and nothing of the answer is read but its status.
"""

from __future__ import annotations

import http.client
import ipaddress
import socket
import ssl
from collections.abc import Mapping
from functools import cache
from urllib.parse import urlsplit

from shared.errors import PromptqError

_NAT64 = ipaddress.ip_network("64:ff9b::/96")
_PORTS = {"http": 80, "https": 443}


class AddressRefusedError(PromptqError):
    """The URL leads nowhere that may be called, and will not at another time either."""


def is_public(address: str) -> bool:
    """Whether an IP address is one of the internet's, also where IPv6 only wraps an IPv4 one."""
    ip = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(ip, ipaddress.IPv6Address):
        if ip in _NAT64:
            return is_public(str(ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF)))
        inner = ip.ipv4_mapped or ip.sixtofour or (ip.teredo[1] if ip.teredo else None)
        if inner is not None:
            return is_public(str(inner))
    return ip.is_global and not ip.is_multicast


def post(
    url: str,
    body: bytes,
    headers: Mapping[str, str],
    *,
    timeout: float,
    allow_private: bool = False,
) -> int:
    """The status of the answer. `timeout` in seconds is for each of connecting, sending, answering.

    Raises AddressRefusedError, and OSError or http.client.HTTPException for what may pass.
    """
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port or _PORTS.get(parts.scheme)
    except ValueError as error:
        raise AddressRefusedError(f"{url!r} is no URL: {error}") from None
    if not host or port is None:
        raise AddressRefusedError(f"{url!r} is no http or https URL with a host")
    connection = http.client.HTTPConnection(host, port, timeout=timeout)
    connection.sock = _connect(host, port, timeout, allow_private)
    try:
        if parts.scheme == "https":
            connection.sock = _tls().wrap_socket(connection.sock, server_hostname=host)
        target = parts.path or "/"
        if parts.query:
            target += "?" + parts.query
        try:
            connection.request("POST", target, body, dict(headers))
        except (http.client.InvalidURL, UnicodeEncodeError) as error:
            raise AddressRefusedError(f"{url!r} is no URL: {error}") from None
        return connection.getresponse().status
    finally:
        connection.close()


def _connect(host: str, port: int, timeout: float, allow_private: bool) -> socket.socket:
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except UnicodeError:
        raise AddressRefusedError(f"{host!r} is no host name") from None
    addresses = [entry[4] for entry in found]
    for address in addresses:
        if not (allow_private or is_public(str(address[0]))):
            raise AddressRefusedError(f"{host!r} is in a private network, at {address[0]}")
    last: OSError = OSError(f"{host!r} has no address")
    for address in addresses:
        try:
            return socket.create_connection((str(address[0]), port), timeout)
        except OSError as error:
            last = error
    raise last


@cache
def _tls() -> ssl.SSLContext:
    return ssl.create_default_context()

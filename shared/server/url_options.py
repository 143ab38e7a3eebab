"""Parses the parts of a server's URL: several hosts, and the options after `?`.

Unsupported options are refused by name. redis-py would accept every option as text, even an option
that must be an object. Then the first call would fail, or replies would have another form.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from urllib.parse import SplitResult, parse_qsl, urlsplit, urlunsplit

_YES_OR_NO = ("true", "yes", "1", "false", "no", "0")
_NO_EFFECT = {
    "decode_responses": ("false", "no", "0"),
    "encoding": ("utf-8", "utf8"),
    "encoding_errors": ("strict",),
}
"""The only values that these options may have. They are the defaults, and promptq needs them."""


def _is_duration(value: str) -> bool:
    try:
        return 0 < float(value) < 2**31
    except ValueError:
        return False


def _is_number_from(least: int) -> Callable[[str], bool]:
    return lambda value: value.isascii() and value.isdigit() and least <= int(value) < 2**31


def _is_name(value: str) -> bool:
    return value.isascii() and value.isprintable() and " " not in value


_DURATION = (_is_duration, "a number of seconds above 0")
_SWITCH = (lambda value: value.lower() in _YES_OR_NO, "true or false")
_NAME = (_is_name, "printable ASCII characters without spaces")
_TEXT = (bool, "a text")
_FILE = (
    lambda value: os.path.isfile(value) and os.access(value, os.R_OK),
    "a file that can be read here",
)
_FOLDER = (os.path.isdir, "a folder that can be read here")

MIN_CONNECTIONS = 2
"""The smallest `max_connections`: each subscription keeps a connection, and calls need others."""

_OPTIONS: dict[str, tuple[Callable[[str], bool], str]] = {
    "db": (_is_number_from(0), "the number of a database"),
    "username": _TEXT,
    "password": _TEXT,
    "client_name": _NAME,
    "lib_name": _NAME,
    "lib_version": _NAME,
    "protocol": (lambda value: value in ("2", "3"), "2 or 3"),
    "socket_timeout": _DURATION,
    "socket_connect_timeout": _DURATION,
    "socket_keepalive": _SWITCH,
    "socket_read_size": (_is_number_from(1), "a number of bytes"),
    "retry_on_timeout": _SWITCH,
    "max_connections": (
        _is_number_from(MIN_CONNECTIONS),
        f"a number of connections from {MIN_CONNECTIONS} on",
    ),
    "health_check_interval": (_is_number_from(0), "a whole number of seconds"),
    **{f"ssl_{name}": _FILE for name in ("keyfile", "certfile", "ca_certs")},
    "ssl_ca_path": _FOLDER,
    **{f"ssl_{name}": _TEXT for name in ("password", "cert_reqs", "ca_data", "ciphers")},
    **{f"ssl_{name}_verify_flags": _TEXT for name in ("include", "exclude")},
    "ssl_min_version": (lambda value: value in ("771", "772"), "771 (TLS 1.2) or 772 (TLS 1.3)"),
    "ssl_check_hostname": _SWITCH,
}
_OF_SENTINELS = {"sentinel_username": _TEXT, "sentinel_password": _TEXT}


def several_hosts(
    parts: SplitResult, path: str, kind: str, port: int
) -> tuple[str, list[tuple[str, int]]]:
    """Returns the URL with the word `host` instead of its hosts, and the hosts as (host, port).

    `path` replaces the URL's path. `kind` is the word for a host in messages. `port` is the port of
    hosts without a port. Raises ValueError.
    """
    credentials, at, hosts = parts.netloc.rpartition("@")
    if not hosts:
        raise ValueError(f"the URL names no {kind}")
    addresses = []
    for host in hosts.split(","):
        address = urlsplit(f"//{host}")
        if not address.hostname:
            raise ValueError(f"{host!r} is not the address of a {kind}")
        addresses.append((address.hostname, address.port or port))
    scheme = parts.scheme.partition("+")[0]
    return urlunsplit((scheme, f"{credentials}{at}host", path, parts.query, "")), addresses


def without_defaults(query: str, is_of_sentinels: bool, is_secure: bool) -> str:
    """Returns a URL's query without options that may only have their default value, such as
    `encoding`. Raises ValueError for a wrong option."""
    options = _OPTIONS | (_OF_SENTINELS if is_of_sentinels else {})
    kept = []
    for part in query.split("&") if query else ():
        for name, value in parse_qsl(part, keep_blank_values=True):
            if not value:
                raise ValueError(f"the option {name!r} has no value")
            if name in _NO_EFFECT:
                if value.lower() not in _NO_EFFECT[name]:
                    raise ValueError(
                        f"the option {name}={value} would change what promptq reads; leave it out"
                    )
                continue
            if name not in options:
                raise ValueError(f"there is no option {name!r}; options are {', '.join(options)}")
            if name.startswith("ssl_") and not is_secure:
                raise ValueError(f"the option {name!r} is for rediss://, which speaks TLS")
            is_right, right = options[name]
            if not is_right(value):
                raise ValueError(f"the option {name!r} is {value!r} and not {right}")
            kept.append(part)
    if "ssl_keyfile=" in query and "ssl_certfile=" not in query:
        raise ValueError("the option 'ssl_keyfile' needs 'ssl_certfile', the key's certificate")
    return "&".join(kept)

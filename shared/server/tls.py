"""Finds out whether a client uses TLS, and explains each TLS error with a remedy."""

from __future__ import annotations

import re
import ssl
from typing import Any

import redis
import redis.asyncio

_ADVICE = (
    ("certificate.required|handshake failure", "present one: ?ssl_certfile=FILE&ssl_keyfile=FILE"),
    ("protocol.version|unsupported.protocol", "let both speak TLS 1.2 or 1.3 (?ssl_min_version=)"),
    (
        " alert .*(certificate|unknown ca|access denied|decrypt)",
        "the server refuses the certificate in ?ssl_certfile",
    ),
    ("expired|not yet valid", "renew the server's certificate, or set this machine's clock"),
    ("key.values.mismatch", "?ssl_keyfile is not the key of the certificate in ?ssl_certfile"),
    ("mismatch|doesn't match|not valid for", "use a name that the certificate has in the address"),
    ("PEM lib|decrypt", "?ssl_certfile and ?ssl_keyfile are PEM, and ?ssl_password is the key's"),
    ("too weak|purpose", "give the server a strong certificate that is made for servers"),
    ("self-signed|issuer|verify", "name the file of its authority: ?ssl_ca_certs=FILE"),
    ("EOF occurred", "if the server wants a certificate: ?ssl_certfile=FILE&ssl_keyfile=FILE"),
    ("wrong.version|record layer", "the server speaks no TLS: give redis:// instead of rediss://"),
)


def scheme_of(pool: Any) -> str:
    """Returns the URL scheme of a redis-py pool: `rediss` with TLS, otherwise `redis`."""
    is_secure = issubclass(pool.connection_class, redis.SSLConnection | redis.asyncio.SSLConnection)
    return "rediss" if is_secure else "redis"


def what_is_wrong(error: BaseException) -> str:
    """Returns a sentence about the TLS fault that caused an error; empty for other errors."""
    cause: BaseException | None = error
    seen = set[int]()  # an error that was raised again may be in its own context
    while cause is not None and not isinstance(cause, ssl.SSLError) and id(cause) not in seen:
        seen.add(id(cause))
        cause = cause.__cause__ or cause.__context__
    if not isinstance(cause, ssl.SSLError):
        return ""
    text = re.sub(r"\[.*?\] | \(_ssl\.c:\d+\)", "", str(cause.args[-1])).rstrip(".")
    code = f"{getattr(cause, 'reason', '')} {text}"
    for pattern, advice in _ADVICE:
        if re.search(pattern, code, re.IGNORECASE):
            return f"{text}; {advice}"
    return text

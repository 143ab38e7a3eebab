"""Finds a client's server, and converts errors of redis-py to promptq's errors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import redis
import redis.asyncio

from promptq.shared.errors import (
    ConfigurationError,
    RedisBusyError,
    RedisProtocolError,
    RedisUnavailableError,
)
from promptq.shared.server.advertised import advertised
from promptq.shared.server.cluster import address_of_nodes
from promptq.shared.server.connection import explain
from promptq.shared.server.sentinel import address_of_sentinels
from promptq.shared.server.tls import scheme_of

DEFAULT_QUEUE = "default"
HOW_TO_GET_A_SERVER = (
    "start `promptq up` in another terminal, or give the URL of a server"
    " (--redis of a command, an argument of a client, or PROMPTQ_REDIS_URL)"
)


def server_url(url: str | None = None) -> str:
    """Returns `url`, or else the URL in the settings, or else the URL of this user's `promptq up`.
    Raises RedisUnavailableError if none of these exists."""
    if url:
        return url
    from promptq.shared.settings.common import read_settings

    known_url = read_settings().redis_url or advertised()
    if known_url is None:
        raise RedisUnavailableError(f"there is no Redis server to talk to: {HOW_TO_GET_A_SERVER}")
    return known_url


def without_server(error: RedisUnavailableError) -> RedisUnavailableError:
    """Returns the error with advice on how to start a server, unless a server has answered."""
    if isinstance(error, RedisBusyError | RedisProtocolError):
        return error
    return RedisUnavailableError(f"{error}; {HOW_TO_GET_A_SERVER}")


def address_of(pool: redis.ConnectionPool | redis.asyncio.ConnectionPool) -> str:
    """Returns the address of the server that a redis-py client uses, for error messages."""
    if several := address_of_nodes(pool) or address_of_sentinels(pool):
        return several
    options = pool.connection_kwargs
    if path := options.get("path"):
        return f"unix://{path}"
    host = options.get("host", "localhost")
    if ":" in host:
        host = f"[{host}]"  # IPv6
    database = f"/{options['db']}" if options.get("db") else ""
    return f"{scheme_of(pool)}://{host}:{options.get('port', 6379)}{database}"


def check_replies_are_bytes(pool: redis.ConnectionPool | redis.asyncio.ConnectionPool) -> None:
    """Raises ConfigurationError if the pool's connections decode replies to texts, or use another
    encoding than UTF-8."""
    options = pool.connection_kwargs
    if options.get("decode_responses"):
        raise ConfigurationError("redis: give a client that was made without decode_responses=True")
    if (encoding := str(options.get("encoding", "utf-8"))).lower() not in ("utf-8", "utf8"):
        raise ConfigurationError(f"redis: give a client that was made without {encoding=}")


def check_one_of(model: str | None, queue: str | None) -> None:
    """Raises ConfigurationError if the caller names both a model and a queue."""
    if model is not None and queue is not None:
        raise ConfigurationError(
            f"model: {model!r} finds its queue by itself; name it or the queue {queue!r}, not both"
        )


@contextmanager
def explained(url: str) -> Iterator[None]:
    """Context manager that converts redis-py's errors to promptq's errors. Messages name the
    `url`."""
    try:
        yield
    except (redis.ConnectionError, redis.TimeoutError, redis.ResponseError) as error:
        raise explain(error, url) from error

"""Opens connections to a server, and explains failures in one sentence each."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, TypeVar
from urllib.parse import urlsplit

import hiredis
import redis
import redis.asyncio
import redis.asyncio.retry
import redis.retry
from redis.backoff import EqualJitterBackoff
from redis.exceptions import (
    AskError,
    AuthenticationError,
    InvalidResponse,
    MaxConnectionsError,
    NoPermissionError,
    OutOfMemoryError,
    RedisError,
    ResponseError,
)
from redis.exceptions import TimeoutError as RedisTimeoutError

from promptq.shared.errors import (
    ConfigurationError,
    PromptqError,
    RedisAuthError,
    RedisBusyError,
    RedisFullError,
    RedisProtocolError,
    RedisSideError,
    RedisTooOldError,
    RedisUnavailableError,
)
from promptq.shared.server.advertised import liveness_of
from promptq.shared.server.cluster import (
    CLUSTER_RETRIES,
    CLUSTER_SCHEMES,
    ClusterChangedError,
    NoClusterError,
    make_of_cluster,
)
from promptq.shared.server.retry import WORTH_TRYING, is_busy, parser_with_busy
from promptq.shared.server.sentinel import NOT_FOUND, SENTINEL_SCHEMES, in_short, make_of_sentinels
from promptq.shared.server.tls import what_is_wrong
from promptq.shared.server.url_options import without_defaults

T = TypeVar("T")

_REDIS_PY = int(redis.__version__.partition(".")[0])
"""The major version of redis-py. Versions 5 to 8 work, because other packages of a program may need
an old version."""

MIN_REDIS = 7
MIN_VALKEY = 8
_CONNECT_TIMEOUT_SECONDS = 5.0
_ANSWER_TIMEOUT_SECONDS = 5.0
_RETRIES = 10
_NO_LIMIT = 2**31  # redis-py takes None as 100
_MOST_UNSENT_BYTES = 1 << 15
"""Unsent bytes of a connection for which a command does not wait. asyncio waits at 65,536."""
_CREDENTIALS = re.compile(r"([a-z0-9+.-]+://)?([^:/?#@]*:)?.*@", re.IGNORECASE | re.DOTALL)
_DATABASE = re.compile(r"/?|/\d+")
_PASSWORD_OPTION = re.compile(r"(?<=password=)[^&]*")
_PLACE_IN_SCRIPT = re.compile(r" script: (\w+, )?on @.*")
_NO_PASSWORD = ("NOAUTH", "Authentication required", "HELLO must be called with the client already")
_WRONG_URL = (ValueError, TypeError, RedisError)


def without_password(url: str) -> str:
    """Returns the address with its passwords masked, even if the address is not a valid URL."""
    match = _CREDENTIALS.match(url)
    if match is None:
        return _PASSWORD_OPTION.sub("***", url)
    scheme, user = match.groups("")
    if "password=" in match[0]:  # an option with an @, or a password that looks like an option
        return f"{scheme}***"
    return f"{scheme}{user}***@{_PASSWORD_OPTION.sub('***', url[match.end() :])}"


def open_redis(url: str) -> redis.Redis:
    """Returns a client of the server at `url`, after connecting and checking the server's version.
    Raises RedisUnavailableError, RedisAuthError, RedisTooOldError, ConfigurationError."""
    client: redis.Redis = _make(redis.Redis, url)
    try:
        check_version(client.info("server"), url)
    except PromptqError:
        client.close()
        raise
    except (RedisError, OSError) as error:
        if not hides_info(error):
            client.close()
            raise explain(error, url) from error
    client.set_retry(_retry(redis.retry.Retry, url))
    return client


async def open_async_redis(url: str) -> redis.asyncio.Redis:
    """Returns an asyncio client for `url`, with the checks and errors of `open_redis`."""
    client = make_async_redis(url)
    try:
        check_version(await client.info("server"), url)
    except PromptqError:
        await client.aclose()
        raise
    except (RedisError, OSError) as error:
        if not hides_info(error):
            await client.aclose()
            raise explain(error, url) from error
    client.set_retry(_retry(redis.asyncio.retry.Retry, url))
    return client


def hides_info(error: Exception) -> bool:
    """Returns whether an error means that the server refuses INFO. Then the server's version stays
    unknown, and later commands fail if the version is too old."""
    return isinstance(error, NoPermissionError) or _is_unknown(error, "INFO")


def make_async_redis(url: str) -> redis.asyncio.Redis:
    """Returns an unconnected asyncio client without retries. Raises ConfigurationError."""
    client: redis.asyncio.Redis = _make(redis.asyncio.Redis, url)
    pool: Any = client.connection_pool
    pool.connection_class = _adapted(pool.connection_class)
    return client


@cache
def _adapted(kind: Any) -> Any:
    """Returns an asyncio connection class that packs commands in C, as the synchronous client does.

    In Python, packing a publish (seven arguments for each token) costs more than the rest of the
    call. Commands with a `memoryview` are not packed in C, because this would copy the large data.
    A connection that the server has just closed counts as lost. Otherwise uvloop would raise a
    RuntimeError, and redis-py would not reconnect. Before Python 3.12, redis-py makes a task for
    each command that it sends.
    """

    def pack_command(connection: Any, *args: Any) -> list[bytes]:
        if args[0] == "EVALSHA" and memoryview not in set(map(type, args)):
            return [hiredis.pack_command(args)]
        packed: list[bytes] = kind.pack_command(connection, *args)
        return packed

    async def send_packed_command(connection: Any, command: Any, check_health: bool = True) -> None:
        if not connection.is_connected or connection.health_check_interval:
            await kind.send_packed_command(connection, command, check_health)
            return
        try:
            if connection._writer.is_closing():
                raise ConnectionResetError("the server has closed the connection")
            connection._writer.writelines(command)
            if connection._writer.transport.get_write_buffer_size() > _MOST_UNSENT_BYTES:
                async with asyncio.timeout(connection.socket_timeout or None):
                    await connection._writer.drain()
        except BaseException as error:
            await connection.disconnect(nowait=True)
            if isinstance(error, TimeoutError):
                raise RedisTimeoutError("Timeout writing to socket") from None
            if isinstance(error, OSError):
                raise redis.ConnectionError(f"Error while writing to socket: {error}") from error
            raise

    methods = {"pack_command": pack_command, "send_packed_command": send_packed_command}
    return type("AdaptedConnection", (kind,), methods)


def _make(kind: Any, url: str) -> Any:
    try:
        return _try_to_make(kind, url)
    except _WRONG_URL:
        raise ConfigurationError(
            f"redis: {without_password(url)!r} is not a Redis URL ({_what_is_wrong(kind, url)});"
            " it looks like redis://localhost:6379/0, rediss://..., unix:///path,"
            " redis+sentinel://host:port,host:port/service or redis+cluster://host:port,host:port"
        ) from None  # the error itself may show a password


def _what_is_wrong(kind: Any, url: str) -> str:
    """Returns a sentence about the fault in a URL. The sentence does not show the password."""
    try:
        _try_to_make(kind, without_password(url))
    except _WRONG_URL as error:
        return str(error)
    return (
        "in a password, special characters must be percent-encoded,"
        " as a/b# is in redis://:a%2Fb%23@localhost"
    )


def _try_to_make(kind: Any, url: str) -> Any:
    parts = urlsplit(url)
    is_of_sentinels = parts.scheme in SENTINEL_SCHEMES
    if parts.scheme in ("redis", "rediss") and not _DATABASE.fullmatch(parts.path):
        raise ValueError(f"the database {parts.path[1:]!r} is not a number")
    query = without_defaults(parts.query, is_of_sentinels, parts.scheme.startswith("rediss"))
    if parts.fragment:
        raise ValueError("nothing may follow a #")
    if query != parts.query:
        url = url.replace(f"?{parts.query}", f"?{query}")
    if is_of_sentinels:
        client = make_of_sentinels(kind, url, _options_of(kind, url))
    elif parts.scheme in CLUSTER_SCHEMES:
        client = make_of_cluster(kind, url, _options_of(kind, url))
    else:
        client = kind.from_url(url, **_options_of(kind, url), **_checks_of(kind, url))
    pool = client.connection_pool
    pool.connection_class(**pool.connection_kwargs)  # raises if it does not know an option
    # An @ after the host belongs to a password, a part of which was read as the host.
    options = [option.partition("=")[0] for option in parts.query.split("&")]
    is_socket = parts.scheme == "unix" and (not parts.netloc or parts.netloc.endswith("@"))
    path = "" if is_socket else parts.path
    if any("@" in piece for piece in (path, parts.fragment, *options)):
        raise ValueError("there is an @ after the host")
    return client


def _options_of(kind: Any, url: str) -> dict[str, Any]:
    """Returns the default options of connections. Options in the URL replace them.

    - Timeouts: a server that does not answer within them counts as gone.
    - Maintenance notifications are off. They cost each connection a round trip. With them, redis-py
      also passes a connection with an unread reply to another call. Only Redis Enterprise has them.
    - The pool has no limit: at a limit, redis-py fails calls as if the server were gone. The pool
      stays small, as a thread seldom needs two connections and `AsyncRequestQueue` limits its
      calls.
    """
    options: dict[str, Any] = {
        "max_connections": _NO_LIMIT,
        "socket_connect_timeout": _CONNECT_TIMEOUT_SECONDS,
        "socket_timeout": _ANSWER_TIMEOUT_SECONDS,
        "parser_class": parser_with_busy(
            redis.asyncio.connection.DefaultParser
            if kind is redis.asyncio.Redis
            else redis.connection.DefaultParser
        ),
    }
    if (8 if kind is redis.asyncio.Redis else 7) <= _REDIS_PY:
        from redis.maint_notifications import MaintNotificationsConfig

        options["maint_notifications_config"] = MaintNotificationsConfig(enabled=False)
    if _REDIS_PY < 6:  # redis-py 5 would reconnect, but not send again
        options["retry_on_error"] = list(WORTH_TRYING)
    if not url.startswith("unix:"):
        # Otherwise a connection that only listens would not notice a lost server.
        options["socket_keepalive"] = True
    return options


def _checks_of(kind: Any, url: str) -> dict[str, Any]:
    """Returns options that make each new connection check that the embedded server still lives; {}
    for another server. After the server ends, another user's program may listen on the port."""
    lives = liveness_of(url)
    if lives is None:
        return {}

    def check() -> None:
        if not lives():
            raise redis.ConnectionError(
                "the embedded server there has ended, and another program has its port"
            )

    def greet(connection: Any) -> None:
        check()
        connection.on_connect()

    async def greet_async(connection: Any) -> None:
        check()
        await connection.on_connect()

    return {"redis_connect_func": greet_async if kind is redis.asyncio.Redis else greet}


def _retry(kind: Callable[..., T], url: str) -> T:
    """Returns a policy that retries for some seconds after a lost connection.

    Retries are safe: if a call was carried out already, the scripts reply `duplicate` or
    `finished`. If the server accepts a connection but does not answer, the call is not retried.
    Each try connects again, so the host name or load balancer may lead to a new master.
    """
    retries = CLUSTER_RETRIES if urlsplit(url).scheme in CLUSTER_SCHEMES else _RETRIES
    return kind(EqualJitterBackoff(cap=1, base=0.01), retries, supported_errors=WORTH_TRYING)


def check_version(info: Mapping[str, Any], url: str) -> None:
    """Raises RedisTooOldError unless `info` comes from Redis 7+ or Valkey 8+."""
    if "valkey_version" in info:
        name, version, needed = "Valkey", str(info["valkey_version"]), MIN_VALKEY
    else:
        name, version, needed = "Redis", str(info.get("redis_version", "0")), MIN_REDIS
    if int(version.split(".", 1)[0]) < needed:
        raise RedisTooOldError(
            f"the server at {without_password(url)} is {name} {version}; promptq needs"
            f" Redis {MIN_REDIS} or Valkey {MIN_VALKEY}, or later"
        )


def explain(
    error: Exception,
    url: str,
    if_not_permitted: str = "may not do this (docs/operations.md, Access, says which role may)",
) -> PromptqError:
    """Returns promptq's error for an error of redis-py. `if_not_permitted` explains NOPERM."""
    shown = without_password(url)
    if isinstance(error, (AuthenticationError, ResponseError)):
        text = _PLACE_IN_SCRIPT.sub("", str(error))
        if text.startswith(_NO_PASSWORD):
            return RedisAuthError(
                f"the server at {shown} wants a user and a password, but the address has none"
            )
        if isinstance(error, AuthenticationError) or text.startswith("WRONGPASS"):
            return RedisAuthError(f"the server at {shown} refused the credentials: {text}")
        if isinstance(error, NoPermissionError):
            user = urlsplit(url).username
            who = f"the user {user!r}" if user else "this user"
            if "channel" in text:
                grant = f"ACL SETUSER {user or 'NAME'} '&promptq:*'"
                if_not_permitted += f"; a user made by hand needs channels too: {grant}"
            return RedisAuthError(f"{who} {if_not_permitted}; the server at {shown} said: {text}")
    if _is_unknown(error, "HELLO"):  # HELLO came with Redis 6
        return RedisTooOldError(
            f"the server at {shown} does not know HELLO, so it is older than promptq can use"
            f" (Redis {MIN_REDIS} or Valkey {MIN_VALKEY} is needed), or the command was renamed"
            " (then add protocol=2 to the address's options)"
        )
    if isinstance(error, NoClusterError):
        return RedisSideError(
            f"the server at {shown} is no node of a Redis Cluster; give redis:// instead of"
            " redis+cluster://"
        )
    if isinstance(error, ClusterChangedError):
        return RedisUnavailableError(
            f"the cluster at {shown} has no node for the queue yet: {error}"
        )
    if is_busy(error):
        return RedisBusyError(f"the server at {shown} cannot serve yet: {error}")
    if isinstance(error, AskError):
        return RedisSideError(
            f"the server at {shown} is a node of a Redis Cluster, but the queue is on another node;"
            " give redis+cluster:// instead of redis://"
        )
    if isinstance(error, OutOfMemoryError):
        return RedisFullError(
            f"the memory of the server at {shown} is full (maxmemory), so it accepts no request:"
            " raise the limit, or lower result_ttl_ms"
        )
    if isinstance(error, ResponseError):
        return RedisSideError(f"the server at {shown} refuses a command: {text}")
    if isinstance(error, MaxConnectionsError):
        return RedisUnavailableError(
            f"all connections that the redis-py client may have to {shown} are in use: allow more"
            " (max_connections)"
        )
    if fault := what_is_wrong(error):
        return RedisProtocolError(f"the server at {shown} cannot be reached by TLS: {fault}")
    if isinstance(error, NOT_FOUND):
        error = in_short(error)  # from a client that promptq did not make
    text = str(error).rstrip(".")  # more text may follow this message
    if isinstance(error, InvalidResponse):
        return RedisProtocolError(
            f"the program at {shown} answers, but not as a Redis server does: {text}"
        )
    if shown.startswith("rediss") and isinstance(error, RedisTimeoutError):
        text += " (a server without TLS does not answer rediss://)"
    elif shown.startswith("redis:") and re.search("reset by peer|closed by server", text):
        text += " (a server with TLS needs rediss://)"
    return RedisUnavailableError(f"no Redis server answers at {shown}: {text}")


def _is_unknown(error: Exception, command: str) -> bool:
    """Returns whether the error says that the server has no command of this name."""
    text = str(error).lower()
    unknown = f"unknown command '{command}'".lower()
    return isinstance(error, ResponseError) and unknown in text.replace("`", "'")

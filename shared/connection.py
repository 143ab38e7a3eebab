"""Opens connections to a server and says in one sentence why that does not work."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, TypeVar
from urllib.parse import urlsplit, urlunsplit

import hiredis
import redis
import redis.asyncio
import redis.asyncio.retry
import redis.retry
from redis.backoff import ExponentialWithJitterBackoff
from redis.exceptions import AuthenticationError, NoPermissionError, RedisError, ResponseError

from shared.errors import (
    ConfigurationError,
    PromptqError,
    RedisAuthError,
    RedisSideError,
    RedisTooOldError,
    RedisUnavailableError,
)

T = TypeVar("T")

MIN_REDIS = 7
MIN_VALKEY = 8
_CONNECT_TIMEOUT_SECONDS = 5.0
_RETRIES = 10


def without_password(url: str) -> str:
    """The address as it may be shown: a password is masked."""
    url = re.sub(r"(?<=password=)[^&]*", "***", url)
    try:
        parts = urlsplit(url)
    except ValueError:  # no address at all; what stands behind the last @ is no password
        return url.rpartition("@")[2]
    if parts.password is None:
        return url
    host = parts.netloc.rpartition("@")[2]
    return urlunsplit(parts._replace(netloc=f"{parts.username or ''}:***@{host}"))


def open_redis(url: str) -> redis.Redis:
    """A client of the server at `url`, which was reached and is new enough.

    Raises RedisUnavailableError, RedisAuthError, RedisTooOldError, ConfigurationError.
    """
    client: redis.Redis = _make(redis.Redis, url)
    try:
        check_version(client.info("server"), url)
        client.set_retry(_retry(redis.retry.Retry))
    except NoPermissionError:
        pass  # the role may not ask for the version; whatever it may do will tell
    except PromptqError:
        client.close()
        raise
    except (RedisError, OSError) as error:
        client.close()
        raise explain(error, url) from error
    except TypeError as error:  # options in the URL that a connection does not know
        client.close()
        raise _no_url(error, url) from error
    return client


async def open_async_redis(url: str) -> redis.asyncio.Redis:
    """Like `open_redis`, for asyncio."""
    client: redis.asyncio.Redis = _make(redis.asyncio.Redis, url)
    pool: Any = client.connection_pool
    pool.connection_class = _packing_in_c(pool.connection_class)
    try:
        check_version(await client.info("server"), url)
        client.set_retry(_retry(redis.asyncio.retry.Retry))
    except NoPermissionError:
        pass  # as above
    except PromptqError:
        await client.aclose()
        raise
    except (RedisError, OSError) as error:
        await client.aclose()
        raise explain(error, url) from error
    except TypeError as error:  # as above
        await client.aclose()
        raise _no_url(error, url) from error
    return client


@cache
def _packing_in_c(kind: Any) -> Any:
    """Connections of this kind that write a command in C, as those of the sync client do.

    A publish has seven arguments a token, which cost more than the rest of a call.
    """

    def pack_command(connection: Any, *args: Any) -> list[bytes]:
        if args[0] == "EVALSHA":
            return [hiredis.pack_command(args)]
        packed: list[bytes] = kind.pack_command(connection, *args)
        return packed

    return type("PackingConnection", (kind,), {"pack_command": pack_command})


def _make(kind: Any, url: str) -> Any:
    try:
        return kind.from_url(url, socket_connect_timeout=_CONNECT_TIMEOUT_SECONDS)
    except ValueError as error:
        raise _no_url(error, url) from error


def _no_url(error: Exception, url: str) -> ConfigurationError:
    return ConfigurationError(
        f"redis: {without_password(url)!r} is not a Redis URL ({error}); it looks like"
        " redis://localhost:6379/0, rediss://... or unix:///path"
    )


def _retry(kind: Callable[..., T]) -> T:
    """What a dropped connection is worth: some seconds of trying. `from_url` would try nothing.

    Repeating is safe: the scripts say `duplicate` or `finished` of what they have done already. A
    server that takes the connection and then says nothing is not asked again.
    """
    backoff = ExponentialWithJitterBackoff(cap=1, base=0.01)
    return kind(backoff, _RETRIES, supported_errors=(redis.exceptions.ConnectionError,))


def check_version(info: Mapping[str, Any], url: str) -> None:
    """Raise RedisTooOldError unless `info` is that of Redis 7+ or Valkey 8+."""
    if "valkey_version" in info:
        name, version, needed = "Valkey", str(info["valkey_version"]), MIN_VALKEY
    else:
        name, version, needed = "Redis", str(info.get("redis_version", "0")), MIN_REDIS
    if int(version.split(".", 1)[0]) < needed:
        raise RedisTooOldError(
            f"the server at {without_password(url)} is {name} {version}; promptq needs"
            f" Redis {MIN_REDIS} or Valkey {MIN_VALKEY}, or later"
        )


def explain(error: Exception, url: str) -> PromptqError:
    """The error of ours that says what a client library's error means."""
    shown = without_password(url)
    refused = isinstance(error, ResponseError) and str(error).startswith(("NOAUTH", "WRONGPASS"))
    if isinstance(error, AuthenticationError) or refused:
        return RedisAuthError(f"the server at {shown} refused the credentials: {error}")
    if isinstance(error, ResponseError) and "unknown command" in str(error):
        return RedisTooOldError(  # it does not even know the greeting, which came with Redis 6
            f"the server at {shown} is older than promptq can use: Redis {MIN_REDIS} or"
            f" Valkey {MIN_VALKEY} is needed"
        )
    if isinstance(error, ResponseError):
        return RedisSideError(f"the server at {shown} refuses a command: {error}")
    return RedisUnavailableError(f"no Redis server answers at {shown}: {error}")

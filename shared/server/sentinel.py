"""Sentinel: clients of the server that the sentinels call the master of a service."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

import redis
import redis.asyncio
import redis.asyncio.retry
import redis.asyncio.sentinel
import redis.retry
import redis.sentinel
from redis.backoff import NoBackoff

from promptq.shared.server.tls import scheme_of
from promptq.shared.server.url_options import several_hosts

SENTINEL_SCHEMES = ("redis+sentinel", "rediss+sentinel")
_PORT = 26379
_POOLS = (redis.sentinel.SentinelConnectionPool, redis.asyncio.sentinel.SentinelConnectionPool)
NOT_FOUND = (redis.sentinel.MasterNotFoundError, redis.asyncio.sentinel.MasterNotFoundError)


def make_of_sentinels(kind: Any, url: str, pool_options: Mapping[str, Any]) -> Any:
    """Returns a client of the server that the sentinels name as a service's master at any time.

    The URL is `redis+sentinel://[[user]:password@]host[:port][,host[:port]...]/service[/db]`. It
    takes the options of other URLs. The sentinels' credentials, if they need any, are the options
    `sentinel_username` and `sentinel_password`. `pool_options` are those of connections and pools.
    Raises ValueError.
    """
    parts = urlsplit(url)
    service, _, database = parts.path.strip("/").partition("/")
    if not service:
        raise ValueError("it names no service")
    if not database.isdigit() and database:
        raise ValueError(f"the database {database!r} is not a number")
    plain, addresses = several_hosts(parts, f"/{database}", "sentinel", _PORT)
    is_async = kind is redis.asyncio.Redis
    pool_kind = redis.asyncio.ConnectionPool if is_async else redis.ConnectionPool
    pool = pool_kind.from_url(plain, **pool_options)  # it keeps those that are not for connections
    options = {**pool_options, **pool.connection_kwargs, "max_connections": pool.max_connections}
    sentinel_options = {
        name: options.pop(f"sentinel_{name}")
        for name in ("username", "password")
        if f"sentinel_{name}" in options
    }
    del options["host"]
    kept = ("socket_", "maint_", "max_connections", "ssl")
    sentinel_options |= {name: options[name] for name in options if name.startswith(kept)}
    options["ssl"] = sentinel_options["ssl"] = plain.startswith("rediss")
    retry_kind = redis.asyncio.retry.Retry if is_async else redis.retry.Retry
    sentinel_options["retry"] = retry_kind(NoBackoff(), 0)  # if one is gone, the next follows
    sentinel_kind = _AsyncSentinel if is_async else _Sentinel
    if is_async:
        options["connection_pool_class"] = _PoolWithSentinels
    else:
        options["connection_class"] = _TLSConnection if options["ssl"] else _Connection
    sentinels = sentinel_kind(addresses, sentinel_kwargs=sentinel_options)
    return sentinels.master_for(service, kind, **options)


class _Sentinel(redis.sentinel.Sentinel):
    def discover_master(self, service_name: str) -> Any:
        try:
            return super().discover_master(service_name)  # type: ignore[no-untyped-call]  # as in redis-py
        except NOT_FOUND as error:
            raise in_short(error) from None


class _AsyncSentinel(redis.asyncio.sentinel.Sentinel):
    async def discover_master(self, service_name: str) -> Any:
        try:
            return await super().discover_master(service_name)
        except NOT_FOUND as error:
            raise in_short(error) from None


def in_short(error: redis.ConnectionError) -> redis.ConnectionError:
    """The error without the options of each unreached sentinel. redis-py shows them all, in some
    versions with passwords."""
    text, _, unreached = str(error).partition(" : ")
    if unreached:
        text += "; a sentinel does not answer, or refuses the connection or its credentials"
    return type(error)(text)


def address_of_sentinels(pool: Any) -> str | None:
    """The URL of the sentinels and the service that a pool is for, without credentials.

    None for a pool of another kind.
    """
    if not isinstance(pool, _POOLS):
        return None
    sentinels = (each.connection_pool.connection_kwargs for each in pool.sentinel_manager.sentinels)
    hosts = ",".join(f"{each['host']}:{each['port']}" for each in sentinels)
    database = f"/{db}" if (db := pool.connection_kwargs.get("db")) else ""
    return f"{scheme_of(pool)}+sentinel://{hosts}/{pool.service_name}{database}"


class _Connection(redis.sentinel.SentinelManagedConnection):
    """A connection that closes when an exception, such as one of a signal's handler, interrupts a
    call. Otherwise the next call would get the reply to the interrupted one. redis-py's other
    connections do this already."""

    def read_response(self, *args: Any, **options: Any) -> Any:
        options = {"disconnect_on_error": True, **options}
        return super().read_response(*args, **options)


class _TLSConnection(_Connection, redis.sentinel.SentinelManagedSSLConnection):
    pass


class _PoolWithSentinels(redis.asyncio.sentinel.SentinelConnectionPool):
    """A pool that closes the connections to the sentinels too, because nothing else does."""

    async def disconnect(self, inuse_connections: bool = True) -> None:
        """Closes all connections; after a change of the master only idle ones.

        redis-py closes an idle connection only some turns of the event loop later. By then another
        call may have taken the connection, and would fail with an AttributeError. So idle
        connections leave the pool first.
        """
        if inuse_connections:
            await super().disconnect()
            for sentinel in self.sentinel_manager.sentinels:
                await sentinel.connection_pool.disconnect()
        else:
            idle, self._available_connections = self._available_connections, []
            await asyncio.gather(*(each.disconnect() for each in idle), return_exceptions=True)

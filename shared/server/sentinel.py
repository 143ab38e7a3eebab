"""Redis Sentinel: clients of the server that the sentinels name as the master of a service."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Iterator, Mapping
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

_FRESH_SECONDS = 1.0
"""How long a client trusts a sentinel's answer. A former master that starts again may take writes
for ten seconds, until Sentinel makes it a replica."""
_MOST_TIME_ASKING = 0.1
"""The most of its time that a client waits for silent sentinels."""


def make_of_sentinels(kind: Any, url: str, pool_options: Mapping[str, Any]) -> Any:
    """Returns a client of a service's master, which is the server that the sentinels name.

    The URL is `redis+sentinel://[[user]:password@]host[:port][,host[:port]...]/service[/db]`, with
    the same options as other URLs. If the sentinels need credentials, the options
    `sentinel_username` and `sentinel_password` have them. `pool_options` are the options of
    connections and pools. Raises ValueError.
    """
    parts = urlsplit(url)
    service, _, database = parts.path.strip("/").partition("/")
    if not service:
        raise ValueError("the URL names no service")
    if not database.isdigit() and database:
        raise ValueError(f"the database {database!r} is not a number")
    plain, addresses = several_hosts(parts, f"/{database}", "sentinel", _PORT)
    is_async = kind is redis.asyncio.Redis
    pool_kind = redis.asyncio.ConnectionPool if is_async else redis.ConnectionPool
    # The pool takes out the options that are not for connections.
    pool = pool_kind.from_url(plain, **pool_options)
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
    # No retries: if a sentinel is gone, redis-py asks the next one.
    sentinel_options["retry"] = retry_kind(NoBackoff(), 0)
    sentinel_kind = _AsyncSentinel if is_async else _Sentinel
    if is_async:
        options["connection_pool_class"] = _PoolWithSentinels
        options["connection_class"] = _AsyncTLSConnection if options["ssl"] else _AsyncConnection
    else:
        options["connection_class"] = _TLSConnection if options["ssl"] else _Connection
    sentinels = sentinel_kind(addresses, sentinel_kwargs=sentinel_options)
    return sentinels.master_for(service, kind, **options)


class _Named:
    """Remembers the master that a sentinel named last. Ignores sentinels that may name a former:

    - The sentinel that leads a failover names the former master until all replicas follow the new.
    - Others name the former master until they hear of the failover, which increases `config-epoch`.
    """

    _address: tuple[str, int] | None = None
    _epoch = 0
    _ask_at = 0.0

    def check_master_state(self, state: Mapping[str, Any], service_name: str) -> bool:
        inherited: Any = super()
        if "failover_in_progress" in state["flags"] or state["config-epoch"] < self._epoch:
            return False
        is_alive: bool = inherited.check_master_state(state, service_name)
        if is_alive:
            self._epoch = state["config-epoch"]
        return is_alive

    @contextlib.contextmanager
    def _asking(self) -> Iterator[None]:
        began, self._ask_at = time.monotonic(), math.inf  # meanwhile, no other call asks again
        try:
            yield
        except NOT_FOUND as error:
            short = in_short(error)
            if str(short) == str(error):  # all sentinels answer: somebody has set them up anew
                self._epoch = 0
            raise short from None
        finally:
            now = time.monotonic()
            self._ask_at = now + max(_FRESH_SECONDS, (now - began) / _MOST_TIME_ASKING)


class _Sentinel(_Named, redis.sentinel.Sentinel):
    def discover_master(self, service_name: str) -> Any:
        with self._asking():
            self._address = super().discover_master(service_name)  # type: ignore[no-untyped-call]  # as in redis-py
            return self._address

    def names(self, connection: Any) -> bool:
        """Returns whether a connection leads to the master, as far as sentinels answer."""
        if time.monotonic() >= self._ask_at:
            with contextlib.suppress(redis.RedisError):
                self.discover_master(connection.connection_pool.service_name)
        return self._address == (connection.host, connection.port)


class _AsyncSentinel(_Named, redis.asyncio.sentinel.Sentinel):
    async def discover_master(self, service_name: str) -> Any:
        with self._asking():
            self._address = await super().discover_master(service_name)
            return self._address

    async def names(self, connection: Any) -> bool:
        """Returns whether a connection leads to the master, as far as sentinels answer."""
        if time.monotonic() >= self._ask_at:
            with contextlib.suppress(redis.RedisError):
                await self.discover_master(connection.connection_pool.service_name)
        return self._address == (connection.host, connection.port)


def in_short(error: redis.ConnectionError) -> redis.ConnectionError:
    """Returns the error without the options of unreached sentinels, which may contain passwords."""
    text, _, unreached = str(error).partition(" : ")
    if unreached:
        text += "; a sentinel does not answer, or refuses the connection or its credentials"
    return type(error)(text)


def address_of_sentinels(pool: Any) -> str | None:
    """Returns the URL of a pool's sentinels and service, without credentials; None for others."""
    if not isinstance(pool, _POOLS):
        return None
    sentinels = (each.connection_pool.connection_kwargs for each in pool.sentinel_manager.sentinels)
    hosts = ",".join(f"{each['host']}:{each['port']}" for each in sentinels)
    database = f"/{db}" if (db := pool.connection_kwargs.get("db")) else ""
    return f"{scheme_of(pool)}+sentinel://{hosts}/{pool.service_name}{database}"


class _Connection(redis.sentinel.SentinelManagedConnection):
    """A connection that closes if an exception, such as a signal handler's, interrupts a call.
    Otherwise the next call would read the reply to the interrupted call."""

    def connect(self) -> None:
        """Connects to the master. A pool calls this method before each use of a connection, which
        may still lead to a former master."""
        super().connect()  # type: ignore[no-untyped-call]  # as in redis-py
        if not self.connection_pool.sentinel_manager.names(self):
            self.disconnect()  # type: ignore[no-untyped-call]  # as in redis-py
            super().connect()  # type: ignore[no-untyped-call]  # as in redis-py

    def read_response(self, *args: Any, **options: Any) -> Any:
        options = {"disconnect_on_error": True, **options}
        return super().read_response(*args, **options)


class _TLSConnection(_Connection, redis.sentinel.SentinelManagedSSLConnection):
    pass


class _AsyncConnection(redis.asyncio.sentinel.SentinelManagedConnection):
    async def connect(self) -> None:
        """Connects to the master like `_Connection`."""
        await super().connect()  # type: ignore[no-untyped-call]  # as in redis-py
        if not await self.connection_pool.sentinel_manager.names(self):
            await self.disconnect()
            await super().connect()  # type: ignore[no-untyped-call]  # as in redis-py


class _AsyncTLSConnection(_AsyncConnection, redis.asyncio.sentinel.SentinelManagedSSLConnection):
    pass


class _PoolWithSentinels(redis.asyncio.sentinel.SentinelConnectionPool):
    """A pool that also closes the connections to the sentinels. redis-py does not close them."""

    async def disconnect(self, inuse_connections: bool = True) -> None:
        """Closes all connections. After a change of the master, closes only idle connections, and
        first removes them from the pool, so that no call takes a connection that is being closed.
        """
        if inuse_connections:
            await super().disconnect()
            for sentinel in self.sentinel_manager.sentinels:
                await sentinel.connection_pool.disconnect()
        else:
            idle, self._available_connections = self._available_connections, []
            await asyncio.gather(*(each.disconnect() for each in idle), return_exceptions=True)

"""Redis Cluster: clients whose connections go to the node that has a queue's slot.

All keys of a queue are in one slot, so a client of one queue talks to one node at a time. Each new
connection asks the nodes which of them has the slot. If a node replies that the slot is on another
node, or is moving, the connection counts as lost. Then redis-py waits, connects and sends again, as
after any lost connection. Meanwhile the nodes may have agreed on a new owner.

redis-py's `RedisCluster` is not enough: its asynchronous subscriptions stay on a node that has
died, and its retries do not wait.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from typing import Any
from urllib.parse import parse_qs, urlsplit

import redis
import redis.asyncio
import redis.asyncio.retry
import redis.retry
from redis.backoff import EqualJitterBackoff, NoBackoff
from redis.crc import key_slot
from redis.exceptions import AskError, AuthenticationError, ClusterDownError, TryAgainError

from promptq.shared.protocol.keys import QUEUES, Keys
from promptq.shared.server.tls import scheme_of
from promptq.shared.server.url_options import several_hosts

CLUSTER_SCHEMES = ("redis+cluster", "rediss+cluster")
_PORT = 6379
_OWNERS = ("CLUSTER", "SLOTS")
_ELSEWHERE = (AskError, TryAgainError, ClusterDownError)
"""Errors for a slot on another node; MOVED and MASTERDOWN are subclasses. ASK is not followed:
scripts need all keys of a slot on one node, so the queue waits until its slot has moved."""
_NO_CLUSTER = "cluster support disabled"
CLUSTER_RETRIES = 40
"""Enough retries for the half minute of a failover with a `cluster-node-timeout` of 15 s."""
_RETRIES_OF_CHANGES = 8
_RETRIES_AT_THE_END = 4
_BACKOFF = EqualJitterBackoff(cap=0.5, base=0.01)
_QUERY_SECONDS = 1.0

Address = tuple[str, int]


class ClusterChangedError(redis.ConnectionError):
    """This node does not have the queue's slot, or no node that answers has the slot."""


class NoClusterError(redis.ResponseError):
    """The server is not a node of a cluster."""


class Nodes:
    """The known addresses of a cluster's nodes."""

    def __init__(self, first: Iterable[Address]) -> None:
        self.first = [*first]
        """The addresses in the URL."""
        self._reported: list[Address] = []

    def __iter__(self) -> Iterator[Address]:
        """Yields the known addresses in random order, because a node may name a former owner of a
        slot. The addresses in the URL come last, because these nodes may no longer exist."""
        reported, first = (random.sample(each, len(each)) for each in (self._reported, self.first))
        yield from dict.fromkeys([*reported, *first])

    def owner(self, slot: int, reply: list[Any], host: str) -> Address:
        """Returns the owner of the slot, from the reply of the node `host` to CLUSTER SLOTS. Raises
        ClusterChangedError if no node has the slot."""
        self._reported = [_address(node, host) for _, _, *nodes in reply for node in nodes]
        for first, last, primary, *_ in reply:
            if first <= slot <= last:
                return _address(primary, host)
        raise ClusterChangedError(f"no node of the cluster has the slot {slot}")


def _address(node: list[Any], queried: str) -> Address:
    """Returns a node's address. If a node does not know its host name, its host is `queried`."""
    host = (node[0] or b"").decode()
    return (queried if host in ("", "?") else host), int(node[1])


class _Cluster:
    """The addresses of a cluster's nodes, and one client for each slot that this process uses."""

    def __init__(self, kind: Any, url: str, options: Mapping[str, Any], nodes: Nodes) -> None:
        """`url` has the word `host` in place of the hosts, which are in `nodes`."""
        self.nodes = nodes
        self.clients: dict[int, Any] = {}
        self._kind = kind
        self._url = url
        self._options = options

    def client_for(self, slot: int, retry: Any) -> Any:
        client = self.clients.get(slot)
        if client is None:
            client = self.clients.setdefault(slot, self._make(slot, retry))
        return client

    def _make(self, slot: int, retry: Any) -> Any:
        pool_kind = _AsyncPool if self._kind is redis.asyncio.Redis else _Pool
        pool: Any = pool_kind.from_url(self._url, **self._options)
        pool.cluster = self
        pool.connection_class = _following(pool.connection_class)
        pool.connection_kwargs |= {"slot": slot, "nodes": self.nodes}
        del pool.connection_kwargs["host"]
        client = self._kind(connection_pool=pool)
        client.auto_close_connection_pool = True
        client.set_retry(retry)
        return client


def client_of(client: Any, keys: Keys) -> Any:
    """Returns the client for a queue's keys. On a Cluster, this is the client of the queue's slot,
    otherwise `client` itself. Closing `client` closes the returned client too."""
    return client_at(client, keys.pending)


def client_at(client: Any, key: str) -> Any:
    """Returns the client for the node that has a key's slot; without a Cluster, `client` itself."""
    pool = getattr(client, "connection_pool", None)
    if not isinstance(pool, (_Pool, _AsyncPool)):
        return client
    return pool.cluster.client_for(key_slot(key.encode()), pool.connection_kwargs["retry"])


def try_once(client: redis.asyncio.Redis) -> None:
    """Makes calls of this client raise at the first failure. Call this when a process ends, because
    the server may not answer. On a Cluster, a few quick retries remain."""
    retries = _RETRIES_AT_THE_END if isinstance(client.connection_pool, _AsyncPool) else 0
    client.set_retry(redis.asyncio.retry.Retry(_BACKOFF, retries, (redis.ConnectionError,)))


def make_of_cluster(kind: Any, url: str, options: Mapping[str, Any]) -> Any:
    """Returns a client of the class `kind` for
    `redis+cluster://[[user]:password@]host[:port][,host:port...]`. Raises ValueError.

    This client talks to the node that has the set of queue names. See `client_of` for a queue.
    """
    parts = urlsplit(url)
    databases = parse_qs(parts.query).get("db", [])
    if parts.path.strip("/") not in ("", "0") or any(database != "0" for database in databases):
        raise ValueError("a Cluster has no database but 0")
    plain, hosts = several_hosts(parts, "", "node", _PORT)
    retry_kind = redis.asyncio.retry.Retry if kind is redis.asyncio.Redis else redis.retry.Retry
    # A change of the cluster is no fault, so clients retry even if they do not wait for a server
    # that does not answer.
    retry = retry_kind(_BACKOFF, _RETRIES_OF_CHANGES, (ClusterChangedError,))
    return _Cluster(kind, plain, options, Nodes(hosts)).client_for(key_slot(QUEUES.encode()), retry)


def address_of_nodes(pool: Any) -> str | None:
    """Returns the URL of a pool's cluster, without credentials; None for any other pool."""
    if not isinstance(pool, (_Pool, _AsyncPool)):
        return None
    hosts = ",".join(f"{host}:{port}" for host, port in pool.cluster.nodes.first)
    return f"{scheme_of(pool)}+cluster://{hosts}"


class _SlotPool:
    """Base of the synchronous and the asynchronous pool of connections for one slot."""

    cluster: _Cluster

    def others(self) -> list[Any]:
        """Returns the pools to close when this pool closes. For the first pool, these are all other
        pools; for another pool, none."""
        first, *others = list(self.cluster.clients.values())
        return [other.connection_pool for other in others] if first.connection_pool is self else []


class _Pool(_SlotPool, redis.ConnectionPool):
    def disconnect(self, inuse_connections: bool = True) -> None:
        super().disconnect(inuse_connections)
        for pool in self.others():
            pool.disconnect(inuse_connections)


class _AsyncPool(_SlotPool, redis.asyncio.ConnectionPool):
    async def disconnect(self, inuse_connections: bool = True) -> None:
        await super().disconnect(inuse_connections)
        for pool in self.others():
            await pool.disconnect(inuse_connections)


@cache
def _following(kind: Any) -> Any:
    """Returns a subclass of the connection class `kind` that connects to the node of its slot."""
    is_async = issubclass(kind, redis.asyncio.connection.AbstractConnection)
    mixin = _AsyncFollowing if is_async else _Following
    return type("FollowingConnection", (mixin, kind), {"plain": kind})


class _FollowsSlot:
    """Base of connections that look up their slot's host and port each time they open."""

    plain: Any  # the connection class of redis-py

    def __init__(self, *, slot: int, nodes: Nodes, **options: Any) -> None:
        super().__init__(**options)
        self._slot, self._nodes = slot, nodes
        # Queries for the slot's owner give up soon, because other nodes know the owner too.
        self._query_options = {
            **options,
            "retry": type(options["retry"])(NoBackoff(), 0),
            "socket_connect_timeout": _QUERY_SECONDS,
            "socket_timeout": _QUERY_SECONDS,
        }


class _Following(_FollowsSlot):
    def connect_check_health(
        self, check_health: bool = True, retry_socket_connect: bool = True
    ) -> None:
        # The caller retries already. Retries here would query all nodes many times for each try.
        super().connect_check_health(  # type: ignore[misc]  # of the other base class
            check_health=check_health, retry_socket_connect=False
        )

    def _connect(self) -> Any:
        self.host, self.port = self._owner()
        try:
            return super()._connect()  # type: ignore[misc]  # as above
        except OSError as error:
            raise _away(self.host, self.port, error) from None

    def _owner(self) -> Address:
        lost: Exception = ClusterChangedError("no node of the cluster is known")
        for host, port in self._nodes:
            connection = self.plain(**{**self._query_options, "host": host, "port": port})
            try:
                connection.connect()
                connection.send_command(*_OWNERS)
                return self._nodes.owner(self._slot, connection.read_response(), host)
            except redis.RedisError as error:
                lost = _more_informative(lost, error)
            finally:
                connection.disconnect()
        raise lost

    def read_response(self, *args: Any, **options: Any) -> Any:
        try:
            return super().read_response(*args, **options)  # type: ignore[misc]  # as above
        except _ELSEWHERE as error:
            self.disconnect()  # type: ignore[attr-defined]  # as above
            raise _changed(error) from None


class _AsyncFollowing(_FollowsSlot):
    """`_Following` for asyncio. Unwraps the exception of `_owner`, which redis-py wraps."""

    async def connect_check_health(
        self, check_health: bool = True, retry_socket_connect: bool = True
    ) -> None:
        try:
            await super().connect_check_health(  # type: ignore[misc]  # of the other base class
                check_health=check_health, retry_socket_connect=False
            )
        except redis.ConnectionError as error:
            raise _unwrapped(error) from None

    async def connect(self) -> None:
        try:
            await super().connect()  # type: ignore[misc]  # as above
        except redis.ConnectionError as error:
            raise _unwrapped(error) from None

    async def _connect(self) -> None:
        self.host, self.port = await self._owner()
        try:
            await super()._connect()  # type: ignore[misc]  # as above
        except OSError as error:
            raise _away(self.host, self.port, error) from None

    async def _owner(self) -> Address:
        lost: Exception = ClusterChangedError("no node of the cluster is known")
        for host, port in self._nodes:
            connection = self.plain(**{**self._query_options, "host": host, "port": port})
            try:
                await connection.connect()
                await connection.send_command(*_OWNERS)
                return self._nodes.owner(self._slot, await connection.read_response(), host)
            except redis.RedisError as error:
                lost = _more_informative(lost, error)
            finally:
                await connection.disconnect()
        raise lost

    async def read_response(self, *args: Any, **options: Any) -> Any:
        try:
            return await super().read_response(*args, **options)  # type: ignore[misc]  # as above
        except _ELSEWHERE as error:
            await self.disconnect()  # type: ignore[attr-defined]  # as above
            raise _changed(error) from None


def _away(host: str, port: int, error: OSError) -> ClusterChangedError:
    """Returns an error after which calls are sent again: another node may take over the slot."""
    return ClusterChangedError(f"{host}:{port} has the queue, and does not answer ({error})")


def _unwrapped(error: redis.ConnectionError) -> Exception:
    return error.__cause__ if isinstance(error.__cause__, redis.RedisError) else error


def _changed(error: Exception) -> ClusterChangedError:
    return ClusterChangedError(f"the cluster changes ({type(error).__name__}: {error})")


def _more_informative(one: Exception, other: redis.RedisError) -> Exception:
    if isinstance(other, redis.ResponseError):
        return NoClusterError(str(other)) if _NO_CLUSTER in str(other) else other
    if isinstance(one, (redis.ResponseError, AuthenticationError)):
        return one
    return redis.ConnectionError(str(other)) if isinstance(other, redis.TimeoutError) else other

"""Redis Cluster: clients whose connections go to the node that has a queue's slot.

All keys of a queue are in one slot, so a client of one queue talks to one node at a time. Each new
connection asks the nodes which of them has the slot. A reply that says that the slot is elsewhere,
or between two nodes, counts as a lost connection: redis-py waits, connects and sends again, as it
does after any other loss, and by then the nodes may name another owner.

redis-py's own `RedisCluster` does not serve. Its asynchronous subscriptions stay on a node that has
died, and it asks again without waiting.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import redis
import redis.asyncio
import redis.asyncio.retry
import redis.retry
from redis.backoff import EqualJitterBackoff, NoBackoff
from redis.crc import key_slot
from redis.exceptions import AskError, AuthenticationError, ClusterDownError, TryAgainError

from promptq.shared.protocol.keys import QUEUES, Keys

CLUSTER_SCHEMES = {"redis+cluster": "redis", "rediss+cluster": "rediss"}
_PORT = 6379
_OWNERS = ("CLUSTER", "SLOTS")
_ELSEWHERE = (AskError, TryAgainError, ClusterDownError)
"""MOVED and MASTERDOWN are among them. ASK is not followed: the queue stands still while its slot
moves, as scripts need all of its keys in one place."""
_NO_CLUSTER = "cluster support disabled"
CLUSTER_RETRIES = 40
"""For the half minute that a failover takes where `cluster-node-timeout` is 15 s."""
_RETRIES_OF_CHANGES = 8

Address = tuple[str, int]


class ClusterChangedError(redis.ConnectionError):
    """The queue is not on the node that was asked, or on none that answers."""


class NoClusterError(redis.ResponseError):
    """The server is no node of a cluster."""


class Nodes:
    """The addresses of a cluster's nodes, as far as they are known."""

    def __init__(self, first: Iterable[Address]) -> None:
        self._first = [*first]
        self._told: list[Address] = []

    def __iter__(self) -> Iterator[Address]:
        """In random order, as a node that is cut off from the others may name a former owner.

        Those that the URL names come last, as they may be gone for long.
        """
        told = random.sample(self._told, len(self._told))
        yield from told
        yield from (it for it in random.sample(self._first, len(self._first)) if it not in told)

    def owner(self, slot: int, reply: list[Any], asked: str) -> Address:
        """The node that has the slot, by the reply to CLUSTER SLOTS of the node at host `asked`.

        Raises ClusterChangedError if no node has it.
        """
        self._told = [_address(node, asked) for _, _, *nodes in reply for node in nodes]
        for first, last, primary, *_ in reply:
            if first <= slot <= last:
                return _address(primary, asked)
        raise ClusterChangedError(f"no node of the cluster has the slot {slot}")


def _address(node: list[Any], asked: str) -> Address:
    """A node that does not know its own host has the host at which it was asked."""
    host = (node[0] or b"").decode()
    return (asked if host in ("", "?") else host), int(node[1])


class Slot:
    """A slot of a cluster, and the clients of all its slots that a program uses."""

    def __init__(self, number: int, nodes: Nodes, clients: dict[int, Any]) -> None:
        self.number = number
        self.nodes = nodes
        self.clients = clients

    def beside(self, number: int) -> Slot:
        return Slot(number, self.nodes, self.clients)


def client_of(client: Any, keys: Keys) -> Any:
    """The client for a queue's keys: `client` itself, except on a Cluster.

    Closing `client` closes it too.
    """
    return client_at(client, keys.pending)


def client_at(client: Any, key: str) -> Any:
    """As `client_of`, for one key."""
    pool = getattr(client, "connection_pool", None)
    if not isinstance(pool, (_Pool, _AsyncPool)):
        return client
    number = key_slot(key.encode())
    clients = pool.slot.clients
    if number not in clients:
        clients[number] = pool.sibling(client, number)
    return clients[number]


def make_of_cluster(kind: Any, url: str, options: Mapping[str, Any]) -> Any:
    """A client of `kind` for `redis+cluster://[[user]:password@]host[:port][,host:port...]`.

    By itself it talks to the node that has the list of queues. Raises ValueError.
    """
    parts = urlsplit(url)
    credentials, at, hosts = parts.netloc.rpartition("@")
    if parts.path.strip("/") not in ("", "0"):
        raise ValueError("a Cluster has no database but 0")
    if not hosts:
        raise ValueError("it names no node")
    nodes = Nodes(_host_and_port(host) for host in hosts.split(","))
    # redis-py reads the rest of the URL, with one host in the place of all.
    plain = urlunsplit(
        (CLUSTER_SCHEMES[parts.scheme], f"{credentials}{at}host", "", parts.query, "")
    )
    pool_kind = _AsyncPool if kind is redis.asyncio.Redis else _Pool
    pool = pool_kind.from_url(plain, **options)
    slot = Slot(key_slot(QUEUES.encode()), nodes, {})
    pool.connection_class = _following(pool.connection_class)
    pool.connection_kwargs["slot"] = slot
    del pool.connection_kwargs["host"]
    client = _client(kind, pool)
    # A change of the cluster is no fault of it, so also those ask again who do not wait for a
    # server that is away.
    backoff = EqualJitterBackoff(cap=0.5, base=0.01)
    client.set_retry(_retry_kind(kind)(backoff, _RETRIES_OF_CHANGES, (ClusterChangedError,)))
    slot.clients[slot.number] = client
    return client


def _retry_kind(kind: Any) -> Any:
    return redis.asyncio.retry.Retry if kind is redis.asyncio.Redis else redis.retry.Retry


def _client(kind: Any, pool: Any) -> Any:
    client = kind(connection_pool=pool)
    client.auto_close_connection_pool = True
    return client


class _SlotPool:
    """What both pools have in common."""

    connection_class: Any
    connection_kwargs: dict[str, Any]
    max_connections: int

    @property
    def slot(self) -> Slot:
        slot: Slot = self.connection_kwargs["slot"]
        return slot

    def sibling(self, client: Any, number: int) -> Any:
        """A client like this one for another slot."""
        options = {**self.connection_kwargs, "slot": self.slot.beside(number)}
        pool = type(self)(
            connection_class=self.connection_class,
            max_connections=self.max_connections,
            **options,  # type: ignore[call-arg]  # those of the pool beside it
        )
        return _client(type(client), pool)

    def others(self) -> list[Any]:
        """The pools of the other slots, if this one is that of the first client."""
        first, *others = self.slot.clients.values()
        return [it.connection_pool for it in others] if first.connection_pool is self else []


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
    """Connections of this kind that open to the owner of a slot."""
    is_async = issubclass(kind, redis.asyncio.connection.AbstractConnection)
    mixin = _AsyncFollowing if is_async else _Following
    return type("FollowingConnection", (mixin, kind), {"plain": kind})


class _Following:
    """A connection whose host and port are set whenever it opens."""

    plain: Any
    """The kind of connection that does not follow."""

    def __init__(self, *, slot: Slot, **options: Any) -> None:
        super().__init__(**options)
        self._slot = slot
        self._options = {**options, "retry": redis.retry.Retry(NoBackoff(), 0)}

    def _connect(self) -> Any:
        self.host, self.port = self._owner()
        return super()._connect()  # type: ignore[misc]  # of the kind beside it

    def _owner(self) -> Address:
        lost: Exception = ClusterChangedError("no node of the cluster is known")
        for host, port in self._slot.nodes:
            asking = self.plain(**{**self._options, "host": host, "port": port})
            try:
                asking.connect()
                asking.send_command(*_OWNERS)
                return self._slot.nodes.owner(self._slot.number, asking.read_response(), host)
            except (redis.ConnectionError, redis.TimeoutError, redis.ResponseError) as error:
                lost = _heeded(error)
            finally:
                asking.disconnect()
        raise lost

    def read_response(self, *args: Any, **options: Any) -> Any:
        try:
            return super().read_response(*args, **options)  # type: ignore[misc]  # as above
        except _ELSEWHERE as error:
            self.disconnect()  # type: ignore[attr-defined]  # as above
            raise _changed(error) from None


class _AsyncFollowing:
    """The same for asyncio."""

    plain: Any

    def __init__(self, *, slot: Slot, **options: Any) -> None:
        super().__init__(**options)
        self._slot = slot
        self._options = {**options, "retry": redis.asyncio.retry.Retry(NoBackoff(), 0)}

    async def connect(self) -> None:
        try:
            await super().connect()  # type: ignore[misc]  # of the kind beside it
        except redis.ConnectionError as error:
            if isinstance(error.__cause__, redis.RedisError):  # redis-py wraps what `_owner` raises
                raise error.__cause__ from None
            raise

    async def _connect(self) -> None:
        self.host, self.port = await self._owner()
        await super()._connect()  # type: ignore[misc]  # of the kind beside it

    async def _owner(self) -> Address:
        lost: Exception = ClusterChangedError("no node of the cluster is known")
        for host, port in self._slot.nodes:
            asking = self.plain(**{**self._options, "host": host, "port": port})
            try:
                await asking.connect()
                await asking.send_command(*_OWNERS)
                reply = await asking.read_response()
                return self._slot.nodes.owner(self._slot.number, reply, host)
            except (redis.ConnectionError, redis.TimeoutError, redis.ResponseError) as error:
                lost = _heeded(error)
            finally:
                await asking.disconnect()
        raise lost

    async def read_response(self, *args: Any, **options: Any) -> Any:
        try:
            return await super().read_response(*args, **options)  # type: ignore[misc]  # as above
        except _ELSEWHERE as error:
            await self.disconnect()  # type: ignore[attr-defined]  # as above
            raise _changed(error) from None


def _changed(error: Exception) -> ClusterChangedError:
    return ClusterChangedError(f"the cluster changes ({type(error).__name__}: {error})")


def _heeded(error: Exception) -> Exception:
    """The error of a node. It is raised at once if all nodes would say the same."""
    if isinstance(error, AuthenticationError):
        raise error
    if isinstance(error, redis.ResponseError):
        if _NO_CLUSTER in str(error):
            raise NoClusterError("it is no node of a Redis Cluster") from None
        raise error
    return error


def _host_and_port(address: str) -> Address:
    parts = urlsplit(f"//{address}")
    if not parts.hostname:
        raise ValueError(f"{address!r} is not the address of a node")
    return parts.hostname, parts.port or _PORT

"""Databases of one server share its channels, but their queues hear nothing of each other."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from typing import Any

import pytest

from promptq.shared.protocol.request import FinishReason
from promptq.shared.queue import scripts
from promptq.shared.queue.request_queue import RequestQueue
from tests.support.requests import ROOM, put, row
from tests.support.servers import Server

IN_0, IN_7 = "promptq:{default}:", "promptq:{default}:7:"


@pytest.fixture
def queue_in(server: Server) -> Iterator[Callable[[int], RequestQueue]]:
    with ExitStack() as stack:
        yield lambda db: RequestQueue(stack.enter_context(closing(server.connect(db=db))))


def use_every_channel(queue: RequestQueue) -> None:
    put(queue, "runs")
    (claim,) = queue.take_batch(ROOM)
    put(queue, "waits")
    queue.publish([row(claim, 0)])
    queue.cancel("runs")
    queue.publish([row(claim, 1, reason=FinishReason.STOP)])
    queue.cancel("waits")
    queue.run(scripts.wake_workers(queue.keys))
    for channel in (queue.keys.drain, queue.keys.control):
        queue.run(scripts.drain(channel, None))


def heard(client: Any, channel: Any) -> list[tuple[str, bytes]]:
    """The messages so far, without their events, which have times in them."""
    channel.subscribe("end")
    messages = []
    for message in channel.listen():
        name = message["channel"].decode()
        if (name, message["type"]) == ("end", "subscribe"):
            client.publish("end", "")
        elif (name, message["type"]) == ("end", "message"):
            channel.unsubscribe("end")
            return messages
        elif "message" in message["type"]:
            messages.append((name, b"" if ":events:" in name else message["data"]))
    raise AssertionError("the subscription ended")


def test_channels_of_another_database_carry_its_number(
    server: Server, queue_in: Callable[[int], RequestQueue]
) -> None:
    """Messages of database 0 keep their channels' names."""
    told: dict[int, list[tuple[str, bytes]]] = {}
    with closing(server.connect()) as client, client.pubsub() as channel:
        channel.psubscribe("promptq:*")
        heard(client, channel)
        for db in (0, 7):
            use_every_channel(queue_in(db))
            told[db] = heard(client, channel)
    names = {name.removeprefix(IN_0) for name, _ in told[0]}
    assert names == {"control", "drain", "events:runs", "events:waits"}
    assert (f"{IN_0}control", b"cancel:runs") in told[0]
    assert told[7] == [(name.replace(IN_0, IN_7), data) for name, data in told[0]]


def test_shard_channels_of_another_database_carry_its_number(
    server: Server, queue_in: Callable[[int], RequestQueue]
) -> None:
    queue = queue_in(7)
    queue.redis.hset(queue.keys.config, "pubsub", "sharded")
    with closing(server.connect()) as client, client.pubsub() as channel:
        channel.ssubscribe(f"{IN_0}events:runs", f"{IN_7}events:runs")
        heard(client, channel)
        use_every_channel(queue)
        names = {name for name, _ in heard(client, channel)}
    assert names == {f"{IN_7}events:runs"}


def test_a_plain_client_names_the_channels_of_its_database(
    server: Server, queue_in: Callable[[int], RequestQueue]
) -> None:
    """By the names in docs/protocol.md alone; one that waits hears at once that work came."""
    queue = queue_in(7)
    with closing(server.connect(db=7)) as client, client.pubsub() as channel:
        channel.subscribe(queue.keys.control)
        heard(client, channel)
        client.hset("promptq:{default}:request:plain", "payload", '{"prompt":"a"}')
        client.zadd("promptq:{default}:pending", {"plain": 1})
        client.publish("promptq:{default}:7:control", "pending")
        assert heard(client, channel) == [("promptq:{default}:7:control", b"pending")]
    assert queue_in(0).count() == 0
    assert [claim.request_id for claim in queue.take_batch(ROOM)] == ["plain"]

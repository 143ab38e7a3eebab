"""Each request wakes a few workers; many workers get one message for requests in a row."""

from __future__ import annotations

from contextlib import closing
from typing import Any

import pytest
import redis

from promptq.shared.queue import scripts
from promptq.shared.queue.request_queue import RequestQueue
from promptq.shared.server.acl import user_rules
from tests.support.requests import new, put
from tests.support.roles import as_role
from tests.support.servers import Server

FEW, MANY = 8, 16_000
"""So many workers need no second message for 2 s: longer than the server takes for two calls."""


def let_live(client: Any, queue: RequestQueue, num_workers: int) -> None:
    client.zadd(queue.keys.workers, dict.fromkeys(map(str, range(num_workers)), 10**14))


def num_messages(client: Any, queue: RequestQueue, channel: Any) -> int:
    """Returns the number of messages `pending` since the last call."""
    client.publish(queue.keys.control, "end")
    found = 0
    for message in channel.listen():
        if message["data"] == b"end":
            return found
        found += message["data"] == b"pending"
    raise AssertionError("the subscription ended")


@pytest.fixture
def channel(client: Any, queue: RequestQueue) -> Any:
    with client.pubsub() as channel:
        channel.subscribe(queue.keys.control)
        yield channel


def test_each_request_wakes_a_few_workers(client: Any, queue: RequestQueue, channel: Any) -> None:
    let_live(client, queue, FEW)
    for _ in range(3):
        put(queue)
    assert num_messages(client, queue, channel) == 3


def test_many_workers_get_one_message_until_an_eighth_of_them_has_looked(
    client: Any, queue: RequestQueue, channel: Any
) -> None:
    let_live(client, queue, MANY)
    queue.run([scripts.enqueue([new(**more)], 0) for more in ({}, {"tenant": "acme"})])
    assert num_messages(client, queue, channel) == 1
    woken = queue.keys.prefix + "woken"
    assert 0 < client.pttl(woken) <= MANY
    client.set(woken, int(client.get(woken)) - MANY // 8)
    queue.run([scripts.enqueue([new()], 0) for _ in range(2)])
    assert num_messages(client, queue, channel) == 1


@pytest.mark.parametrize("value", [str(10**14), "x", "nan", "-inf", ["a list"]])
def test_no_strange_key_keeps_workers_asleep(
    client: Any, queue: RequestQueue, channel: Any, value: str | list[str]
) -> None:
    let_live(client, queue, MANY)
    key = queue.keys.prefix + "woken"
    client.rpush(key, *value) if isinstance(value, list) else client.set(key, value)
    put(queue)
    assert num_messages(client, queue, channel) == 1


@pytest.mark.parametrize("server", ["embedded", "redis-server"], indirect=True)
def test_producers_with_the_rules_of_an_earlier_release_wake_workers(
    server: Server, client: Any, queue: RequestQueue, channel: Any
) -> None:
    let_live(client, queue, MANY)
    rules = [rule for rule in user_rules("producer", "*", "pw") if not rule.endswith(":woken")]
    client.execute_command("ACL", "SETUSER", "earlier", *rules)
    url = as_role("producer", server.url).replace("producer:change-me-producer", "earlier:pw")
    try:
        with closing(redis.Redis.from_url(url)) as earlier:
            for _ in range(2):
                put(RequestQueue(earlier))
    finally:
        client.execute_command("ACL", "DELUSER", "earlier")
    assert num_messages(client, queue, channel) == 2

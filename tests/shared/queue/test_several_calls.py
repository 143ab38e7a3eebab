"""Several calls in one round trip: their order, scripts among them, errors, and all or none."""

from __future__ import annotations

from typing import Any

import pytest
from redis.exceptions import RedisError, ResponseError

from promptq.shared.errors import QueueClosedError
from promptq.shared.protocol.request import RequestState
from promptq.shared.queue import lookups
from promptq.shared.queue.call import Call
from promptq.shared.queue.request_queue import AsyncRequestQueue, RequestQueue
from tests.support.requests import put
from tests.support.servers import Server, counted_round_trips


def looking(queue: RequestQueue | AsyncRequestQueue) -> list[Call[Any]]:
    """Two scripts and a plain command between them."""
    keys = queue.keys
    return [lookups.count(keys), lookups.state(keys, "a"), lookups.contains(keys, "b")]


def added(name: str, amount: int | str = 1) -> Call[int]:
    return Call("", ["HINCRBY", "promptq:{default}:config", name, amount], int)


def test_calls_go_out_together_and_are_answered_in_their_order(
    queue: RequestQueue, server: Server
) -> None:
    put(queue, "a")
    expected = [1, RequestState.WAITING, False]
    assert queue.run(looking(queue)) == expected
    with counted_round_trips() as sent:
        assert queue.run(looking(queue)) == expected
        assert queue.run(looking(queue)[:1]) == expected[:1]
        assert queue.run([]) == []
    assert len(sent) == 2


async def test_so_they_do_with_asyncio(queue: RequestQueue, server: Server) -> None:
    put(queue, "a")
    client = server.connect_async()
    other = AsyncRequestQueue(client)
    expected = [1, RequestState.WAITING, False]
    assert await other.run(looking(other)) == expected
    with counted_round_trips() as sent:
        assert await other.run(looking(other)) == expected
    assert len(sent) == 1
    await other.close()
    with pytest.raises(QueueClosedError):
        await other.run(looking(other))
    await client.aclose()


async def test_a_script_that_the_server_has_forgotten_is_loaded_again(embedded_url: str) -> None:
    """This happens after a restart of the server, and to the first caller."""
    import redis.asyncio

    with redis.Redis.from_url(embedded_url) as client:
        client.flushall()
        queue = RequestQueue(client)
        put(queue, "a")
        client.script_flush()
        assert queue.run(looking(queue)) == [1, RequestState.WAITING, False]
        client.script_flush()
    async with redis.asyncio.Redis.from_url(embedded_url) as async_client:
        other = AsyncRequestQueue(async_client)
        assert await other.run(looking(other)) == [1, RequestState.WAITING, False]


def test_of_several_calls_an_error_is_raised_and_the_others_are_carried_out(
    client: Any, queue: RequestQueue
) -> None:
    with pytest.raises(ResponseError):
        queue.run([added("a"), added("b", "no number"), added("c")])
    assert client.hmget("promptq:{default}:config", "a", "b", "c") == [b"1", None, b"1"]


def test_atomic_calls_are_carried_out_all_or_none(client: Any, queue: RequestQueue) -> None:
    """If the server does not understand one call of a MULTI, it executes none."""
    unknown = Call("", ["HINCRBY", "promptq:{default}:config"], int)
    with pytest.raises(RedisError):
        queue.run([added("a"), unknown], atomic=True)
    assert client.hget("promptq:{default}:config", "a") is None
    assert queue.run([added("a"), added("a")], atomic=True) == [1, 2]


def test_a_call_may_say_what_a_strangers_key_gives(client: Any, queue: RequestQueue) -> None:
    client.set(queue.keys.config, "a stranger's")
    args: list[str | bytes | int] = ["HGET", queue.keys.config, "model"]
    strict, lenient = Call("", args, bytes), Call("", args, bytes, lambda: b"none")
    assert queue.run(lenient) == b"none"
    assert queue.run([lenient, lenient]) == [b"none", b"none"]
    for call in (strict, [lenient, strict]):
        with pytest.raises(ResponseError, match="WRONGTYPE"):
            queue.run(call)  # type: ignore[call-overload] # both kinds in turn

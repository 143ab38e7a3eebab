"""A queue takes a request in once, and refuses some."""

from __future__ import annotations

import time
from typing import Any

import pytest

from promptq.shared.errors import InvalidRequestError, QueueFullError, RequestExistsError
from promptq.shared.protocol.claims import Held
from promptq.shared.protocol.pictures import data_url, picture_part
from promptq.shared.protocol.request import FinishReason, NewRequest, Request, RequestState
from promptq.shared.queue.request_queue import RequestQueue
from tests.programs.engines.pngs import png
from tests.support.requests import ROOM, ids, new, put, put_plainly, row


def test_an_id_can_be_used_once(queue: RequestQueue) -> None:
    put(queue, "a")
    with pytest.raises(RequestExistsError, match="'a'"):
        put(queue, "a")


def test_a_batch_goes_in_whole_or_not_at_all(queue: RequestQueue) -> None:
    put(queue, "taken")
    with pytest.raises(RequestExistsError):
        queue.enqueue([new("fresh"), new("taken")])
    assert not queue.contains("fresh")


@pytest.mark.parametrize("bad", ["", "with space", "é", "a" * 201, "new\nline"])
def test_refuses_ids_that_no_key_should_hold(queue: RequestQueue, bad: str) -> None:
    with pytest.raises(InvalidRequestError, match=r"^id: "):
        queue.enqueue([NewRequest(bad, Request.build({"prompt": "a"}))])


def test_the_same_idempotency_key_gives_the_same_request(queue: RequestQueue) -> None:
    first = put(queue, idempotency_key="order-1")
    again = put(queue, idempotency_key="order-1")
    other = put(queue, idempotency_key="order-2")
    assert first == again != other
    assert queue.count() == 2


def test_a_full_queue_says_when_to_come_back(client: Any, queue: RequestQueue) -> None:
    client.hset(queue.keys.config, "max_pending", "2")
    put(queue)
    put(queue)
    with pytest.raises(QueueFullError) as caught:
        put(queue)
    assert caught.value.retry_after_ms > 0
    assert queue.count() == 2


def test_a_delayed_request_waits_for_its_time(client: Any, queue: RequestQueue) -> None:
    put(queue, "later", delay_ms=60_000)
    assert queue.take_batch(ROOM) == []
    due = client.zscore(queue.keys.delayed, "later")
    assert 0 < due - time.time() * 1000 <= 60_000
    client.zadd(queue.keys.delayed, {"later": time.time() * 1000 - 1})
    assert ids(queue.take_batch(ROOM)) == ["later"]


def test_an_id_cannot_stand_twice_in_a_batch(queue: RequestQueue) -> None:
    with pytest.raises(RequestExistsError, match="'a'"):
        queue.enqueue([new("a"), new("a")])
    assert queue.is_empty()


def test_an_idempotency_key_holds_within_a_batch_and_for_its_time(client: Any) -> None:
    queue = RequestQueue(client, idempotency_ms=500_000)
    first, again = queue.enqueue([new(idempotency_key="k"), new(idempotency_key="k")])
    assert first == again
    assert queue.count() == 1
    assert 0 < client.pttl(queue.keys.prefix + "idempotency:k") <= 500_000


def test_an_idempotency_key_is_never_taken_for_an_id(queue: RequestQueue) -> None:
    assert queue.enqueue([new("a"), new("b", idempotency_key="id a")]) == ["a", "b"]
    assert queue.enqueue([new("c", idempotency_key="id d"), new("d")]) == ["c", "d"]
    assert queue.count() == 4


def test_an_idempotency_key_holds_while_its_request_is_kept(client: Any) -> None:
    queue = RequestQueue(client, max_crashes=1)
    put(queue, "a", idempotency_key="k")
    for _ in range(2):
        (claim,) = queue.take_batch(ROOM)
        queue.release([Held(claim.request_id, claim.fence)], crashed=True)
    assert put(queue, "b", idempotency_key="k") == "a"
    assert queue.purge(["a"]) == 1
    assert put(queue, "b", idempotency_key="k") == "b"
    assert put(queue, "c", idempotency_key="k") == "b"
    assert queue.state("b") is RequestState.WAITING


def test_nothing_is_left_of_a_purged_request(client: Any) -> None:
    """Not even where a plain client put it into the queue once more."""
    queue = RequestQueue(client, max_crashes=1)
    put(queue, "a")
    for _ in range(2):
        (claim,) = queue.take_batch(ROOM)
        queue.release([Held(claim.request_id, claim.fence)], crashed=True)
    client.zadd(queue.keys.pending, {"a": 1})
    assert queue.purge(["a"]) == 1
    assert queue.is_empty()
    assert queue.take_batch(ROOM) == []
    assert not client.exists(queue.keys.request("a"), queue.keys.tokens("a"))


def test_an_id_that_was_ended_without_a_payload_is_taken(client: Any, queue: RequestQueue) -> None:
    """A last event of it was published, so that it cannot begin."""
    client.zadd(queue.keys.pending, {"a": 1})
    assert queue.take_batch(ROOM) == []
    with pytest.raises(RequestExistsError):
        put(queue, "a")
    assert queue.state("a") is RequestState.FAILED


def test_a_full_queue_still_knows_its_idempotency_keys(client: Any, queue: RequestQueue) -> None:
    first = put(queue, idempotency_key="k")
    client.hset(queue.keys.config, "max_pending", "1")
    put_plainly(client, queue, "beyond the limit", 1, "{}")
    assert put(queue, idempotency_key="k") == first


def test_delayed_requests_count_for_the_limit(client: Any, queue: RequestQueue) -> None:
    client.hset(queue.keys.config, "max_pending", "1")
    put(queue, delay_ms=60_000)
    with pytest.raises(QueueFullError):
        put(queue)


def test_a_full_queue_estimates_by_the_rate_of_the_last_finishes(
    client: Any, queue: RequestQueue
) -> None:
    for _ in range(2):
        put(queue)
    for claim in queue.take_batch(ROOM):
        queue.publish([row(claim, 0, reason=FinishReason.STOP)])
        time.sleep(0.3)
    client.hset(queue.keys.config, "max_pending", "1")
    with pytest.raises(QueueFullError) as caught:
        queue.enqueue([new() for _ in range(3)])
    assert caught.value.retry_after_ms >= 2 * 290


def test_an_id_whose_key_is_of_another_type_is_taken(client: Any, queue: RequestQueue) -> None:
    client.set(queue.keys.request("a"), "text")
    with pytest.raises(RequestExistsError):
        put(queue, "a")


def test_a_picture_counts_as_a_short_text_and_a_text_about_one_as_it_is(
    queue: RequestQueue, client: Any
) -> None:
    url = data_url(png(1, 300, 300))

    def tokens(request_id: str, *parts: Any) -> int:
        messages = [{"role": "user", "content": [*parts]}]
        put(queue, request_id, messages=messages, max_tokens=1)
        return int(client.hget(queue.keys.request(request_id), "tokens"))

    text = {"type": "text", "text": "What is this?"}
    alone, one = tokens("text", text), tokens("one", picture_part(url), text)
    assert 1024 < one - alone < 1064
    assert 2 * 1024 < tokens("two", picture_part(url), picture_part(url), text) - alone < 2 * 1064
    quoted = {"type": "text", "text": f'"{url}"'}
    assert tokens("quoted", quoted) > len(url) // 4
    claims = {claim.request_id: claim for claim in queue.take_batch(ROOM)}
    assert claims["one"].cost < 1064 + 300 < claims["quoted"].cost


@pytest.mark.parametrize("is_strict", [False, True])
@pytest.mark.parametrize("tenant", [None, "t"])
def test_of_requests_with_windows_the_earliest_deadline_runs_first(
    client: Any, queue: RequestQueue, tenant: str | None, is_strict: bool
) -> None:
    """They come after requests without windows, but not after those of a less urgent tier."""
    client.hset(queue.keys.config, "strict_priority", int(is_strict))
    windows = {"day": "24h", "hours": "2h", "soon": "5m", "hour": "1h"}
    for name, window in windows.items():
        put(queue, name, completion_window=window, tenant=tenant)
    put(queue, "flex", completion_window="30m", service_tier="flex", tenant=tenant)
    put(queue, "without", tenant=tenant)  # behind `soon`, even in the same millisecond
    order = ids(queue.take_batch(ROOM))
    without_flex = [name for name in order if name != "flex"]
    assert without_flex == ["soon", "without", "hour", "hours", "day"]
    # Without strict priority, the tier costs only 10 minutes.
    assert order.index("flex") == (5 if is_strict else 2)

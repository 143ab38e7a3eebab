"""What strangers and bad luck leave behind hinders nobody for long."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from shared import lookups, scripts
from shared.errors import QueueFullError, RequestExistsError
from shared.request_queue import RequestQueue
from shared.schemas import FinishReason, RequestState
from shared.script_values import CancelStatus
from tests.helpers import Server
from tests.shared.test_request_queue import ROOM, held, ids, last_event, new, put, put_plainly, row


@pytest.fixture
def client(server: Server) -> Iterator[Any]:
    client = server.connect()
    yield client
    client.close()


@pytest.fixture
def queue(client: Any) -> RequestQueue:
    return RequestQueue(client, worker_id="w1")


def test_a_log_that_takes_no_more_events_ends_its_request_at_once(
    client: Any, queue: RequestQueue
) -> None:
    put(queue, "a")
    put(queue, "b")
    a, b = queue.take_batch(ROOM)
    client.set(queue.keys.tokens("a"), "no stream any more")
    assert queue.publish([row(a, 0), row(a, 1), row(b, 0)]).rows == ["error", "finished", "ok"]
    record = queue.run(lookups.record(queue.keys, "a"))
    assert record["state"] == "failed"
    assert "tokens: " in record["last_event"]
    assert client.zrange(queue.keys.leases, 0, -1) == [b"b"]


def test_many_that_only_newer_workers_take_hide_nothing(client: Any, queue: RequestQueue) -> None:
    """However many they are: one call looks at so many, the next goes on behind."""
    for n in range(1300):
        put_plainly(client, queue, f"newer-{n}", n, '{"prompt":"a","version":2}')
    put(queue, "good")
    calls = [ids(queue.take_batch(ROOM)) for _ in range(4)]
    assert ["good"] in calls
    put(queue, "later")
    put_plainly(client, queue, "first", -1, '{"prompt":"a"}')
    calls = [ids(queue.take_batch(ROOM)) for _ in range(8)]
    assert [it for call in calls for it in call] == ["first", "later"]


def test_take_finds_what_is_behind_them_without_waiting(client: Any, queue: RequestQueue) -> None:
    for n in range(1300):
        put_plainly(client, queue, f"newer-{n}", n, '{"prompt":"a","version":2}')
    put(queue, "good")
    claim = queue.take(timeout=0)
    assert claim is not None
    assert claim.request_id == "good"


@pytest.mark.parametrize("kind", ["text", "list of no lengths"])
def test_a_spoilt_list_of_outputs_costs_only_the_estimate(
    client: Any, queue: RequestQueue, kind: str
) -> None:
    outputs = queue.keys.prefix + "outputs"
    if kind == "text":
        client.set(outputs, "text")
    else:
        client.rpush(outputs, "junk", "1790000000000 x", "")
    for name in "ab":
        put(queue, name)
    a, b = queue.take_batch(ROOM)
    rows = [row(a, 0, reason=FinishReason.STOP), row(b, 0)]
    assert queue.publish(rows, [held(b)]).rows == ["ok", "ok"]
    assert queue.state("a") is RequestState.COMPLETED
    assert client.zrange(queue.keys.leases, 0, -1) == [b"b"]
    client.hset(queue.keys.config, "max_pending", "1")
    with pytest.raises(QueueFullError):
        queue.enqueue([new(), new()])


def test_the_flag_of_what_was_never_enqueued_goes_away(client: Any, queue: RequestQueue) -> None:
    """Workers hear of it by the message that the protocol asks for."""
    client.hset(queue.keys.request("never"), "cancelled", "1")
    assert queue.run(scripts.cancel(["never"], "flagged")) == [CancelStatus.UNKNOWN]
    assert 0 < client.pttl(queue.keys.request("never")) <= 3_600_000
    put(queue, "never")
    assert client.pttl(queue.keys.request("never")) == -1
    assert queue.take_batch(ROOM) == []
    assert last_event(client, queue, "never")["finish_reason"] == "cancelled"


def test_an_enqueue_that_is_sent_again_is_known(client: Any, queue: RequestQueue) -> None:
    """As redis-py does when the reply is lost; a second call with the same id is refused."""
    call = scripts.enqueue([new("mine"), new(idempotency_key="k")], 1000, nonce="n")
    assert queue.run(call) == queue.run(call)
    assert queue.count() == 2
    with pytest.raises(RequestExistsError, match="'mine'"):
        queue.enqueue([new("mine")])
    claims = queue.take_batch(ROOM)
    queue.publish([row(claim, 0, reason=FinishReason.STOP) for claim in claims])
    assert queue.run(call)[0] == "mine"
    assert queue.is_empty()

"""Leftovers of strangers and bad luck hinder nobody for long."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from redis.exceptions import ResponseError

from promptq.shared.errors import ModelMismatchError, QueueFullError, RequestExistsError
from promptq.shared.protocol.claims import ModelIdentity, Room
from promptq.shared.protocol.events import Result, TokenEvent, Usage
from promptq.shared.protocol.replies import CancelStatus
from promptq.shared.protocol.request import FinishReason, RequestState
from promptq.shared.protocol.rows import Row, RowStatus
from promptq.shared.queue import lookups, scripts
from promptq.shared.queue.call import Call
from promptq.shared.queue.request_queue import RequestQueue
from tests.support.requests import ROOM, held, ids, last_event, new, put, put_plainly, row


def test_a_finished_request_is_not_run_again_and_its_end_is_sent_again(
    client: Any, queue: RequestQueue
) -> None:
    put(queue, "a")
    (claim,) = queue.take_batch(ROOM)
    queue.publish([row(claim, 0, reason=FinishReason.STOP)])
    with client.pubsub() as channel:
        channel.subscribe(queue.keys.events("a"))
        messages = channel.listen()
        assert next(messages)["type"] == "subscribe"
        client.zadd(queue.keys.pending, {"a": 1})
        assert queue.take_batch(ROOM) == []
        assert json.loads(next(messages)["data"])["finish_reason"] == "stop"
    assert queue.is_empty()


def test_a_model_key_of_another_type_stops_no_worker(client: Any, queue: RequestQueue) -> None:
    ours = queue.model = ModelIdentity("ours", "f")
    client.set(queue.keys.model, "text")
    put(queue, "a")
    assert ids(queue.take_batch(ROOM)) == ["a"]
    client.hset(queue.keys.config, mapping={"model": "theirs", "fingerprint": "g"})
    with pytest.raises(ModelMismatchError, match="theirs"):
        queue.take_batch(ROOM)
    for field in ("model", "fingerprint"):  # it is shown, but not whole
        client.hset(queue.keys.config, field, "\x1b[2J" + "t" * 10_000)
        with pytest.raises(ModelMismatchError, match="t" * 100) as caught:
            queue.take_batch(ROOM)
        assert len(str(caught.value)) < 1000
        assert "\x1b" not in str(caught.value)
    client.delete(queue.keys.config, queue.keys.model)
    queue.take_batch(ROOM)
    assert client.hget(queue.keys.model, "fingerprint") == ours.fingerprint.encode()


def test_what_runs_is_not_run_twice(client: Any, queue: RequestQueue) -> None:
    put(queue, "a")
    queue.take_batch(ROOM)
    client.zadd(queue.keys.pending, {"a": 1})
    assert queue.take_batch(ROOM) == []
    assert queue.state("a") is RequestState.ACTIVE


def test_ids_without_a_proper_request_end_with_an_error(client: Any, queue: RequestQueue) -> None:
    client.zadd(queue.keys.pending, {"no-hash": 1, "with space": 2, "wrong-type": 3, "bad-log": 4})
    client.hset(queue.keys.request("with space"), "payload", '{"prompt":"a"}')
    client.set(queue.keys.request("wrong-type"), "text")
    client.hset(queue.keys.request("bad-log"), "payload", '{"prompt":"a"}')
    client.set(queue.keys.tokens("bad-log"), "text")
    put(queue, "good")
    assert ids(queue.take_batch(ROOM)) == ["good"]
    assert queue.is_empty()
    messages = {
        name: last_event(queue, name)["error"]["message"]
        for name in ("no-hash", "with space", "wrong-type")
    }
    assert messages["no-hash"].startswith("payload: ")
    assert messages["with space"].startswith("id: ")
    assert messages["wrong-type"].startswith("request: ")
    assert queue.state("bad-log") is RequestState.FAILED


WRONG_IDS = [b"", b"a" * 201, b"a b", b" a", b"a\n", b"\x00", b"\x7f", "é".encode(), b"\xff"]


@pytest.mark.parametrize("wrong", WRONG_IDS, ids=repr)
def test_an_id_that_no_request_may_have_ends_and_harms_no_other(
    client: Any, queue: RequestQueue, wrong: bytes
) -> None:
    key = queue.keys.request("").encode() + wrong
    client.hset(key, "payload", '{"prompt":"a"}')
    client.zadd(queue.keys.pending, {wrong: 1})
    client.zadd(queue.keys.delayed, {wrong + b"x": 1})
    client.zadd(queue.keys.leases, {wrong + b"y": 1})
    put(queue, "good")
    assert ids(queue.take_batch(ROOM)) == ["good"]
    queue.reap()
    assert queue.is_empty()
    state, reason, last = client.hmget(key, "state", "finish_reason", "last_event")
    assert (state, reason) == (b"failed", b"error")
    assert "1 to 200 printable ASCII" in json.loads(last)["error"]["message"]
    assert client.ttl(key) > 0


@pytest.mark.parametrize("wrong", WRONG_IDS, ids=repr)
def test_the_scripts_take_in_no_such_id(client: Any, queue: RequestQueue, wrong: bytes) -> None:
    args = [*queue._enqueue([new("it")]).args, wrong, '{"prompt":"a"}']
    with pytest.raises(ResponseError, match="id: is not 1 to 200"):
        queue.run(Call("enqueue", args, list))
    client.zadd(queue.keys.dead, {"dead": 1})
    client.hset(queue.keys.request("dead"), "payload", '{"prompt":"a"}')
    with pytest.raises(ResponseError, match="id: is not 1 to 200"):
        queue.run(Call("requeue", ["dead", wrong], list))
    assert queue.is_empty()
    assert queue.state("it") is None


def test_a_newer_version_is_left_to_newer_workers(client: Any, queue: RequestQueue) -> None:
    put_plainly(client, queue, "newer", 1, '{"prompt":"a","version":2}')
    put_plainly(client, queue, "nested", 2, '{"prompt":"a","metadata":{"version":2}}')
    put_plainly(client, queue, "broken", 3, '{"prompt":"a","version":2')
    assert ids(queue.take_batch(ROOM)) == ["nested", "broken"]
    assert queue.contains("newer")


def test_a_plain_request_brings_its_priority_for_preemption(
    client: Any, queue: RequestQueue
) -> None:
    put_plainly(client, queue, "plain", 1, '{"prompt":"a","max_tokens":4,"priority":-7}')
    full = Room(max_count=0, token_budget=0, capacity=1000, preemptible=[(-6, 500)])
    assert ids(queue.take_batch(full)) == ["plain"]


def test_long_queues_of_cancelled_requests_are_worked_off(client: Any, queue: RequestQueue) -> None:
    """One call looks at a bounded number; the next goes on."""
    batch = [new() for _ in range(1500)]
    queue.enqueue(batch)
    for item in batch:
        client.hset(queue.keys.request(item.request_id), "cancelled", "1")
    put(queue, "good")
    for _ in range(10):
        if claims := queue.take_batch(ROOM):
            break
    assert ids(claims) == ["good"]
    assert queue.state(batch[0].request_id) is RequestState.CANCELLED


SPOILT = [
    ("attempt", "x"),
    ("prompt_tokens", "abc"),
    ("prompt_tokens", "1.5"),
    ("enqueued_at", "2026-01-01T00:00:00"),
    ("enqueued_at", "1790000000.5"),
    ("seed", "abc"),
    ("seed", "-"),
    ("passed", "x"),
    ("crashes", "x"),
    ("priority", "x"),
    ("priority", "nan"),
    ("score", "soon"),
    ("score", "nan"),
    ("state", "queued"),
]


@pytest.mark.parametrize(("name", "value"), SPOILT)
def test_a_spoilt_field_hinders_neither_the_request_nor_others(
    client: Any, name: str, value: str
) -> None:
    queue = RequestQueue(client, lease_ms=1)
    for request_id in ("bad", "late"):
        payload = {"payload": '{"prompt":"a"}', name: value}
        client.hset(queue.keys.request(request_id), mapping=payload)
    client.zadd(queue.keys.pending, {"bad": 1})
    client.zadd(queue.keys.delayed, {"late": 1})
    assert queue.state("bad") is RequestState.WAITING
    put(queue, "good")
    assert sorted(ids(queue.take_batch(ROOM))) == ["bad", "good", "late"]
    client.hset(queue.keys.request("bad"), name, value)
    time.sleep(0.01)
    assert queue.reap().returned == 3
    claims = {claim.request_id: claim for claim in queue.take_batch(ROOM)}
    assert sorted(claims) == ["bad", "good", "late"]
    client.hset(queue.keys.request("bad"), name, value)
    assert queue.release([held(claims["bad"]), held(claims["good"])]) == ["waiting", "waiting"]
    assert queue.contains("bad")
    assert queue.cancel("bad") is CancelStatus.CANCELLED
    assert last_event(queue, "bad")["finish_reason"] == "cancelled"


@pytest.mark.parametrize(
    "name",
    [
        *("aging_ms", "max_pending", "log_ttl_ms", "result_ttl_ms", "strict_priority", "pubsub"),
        "shortest_first_ms",
    ],
)
@pytest.mark.parametrize("value", ["abc", "inf", "nan", "", "1e300"])
def test_a_setting_without_sense_counts_as_left_out(
    client: Any, queue: RequestQueue, name: str, value: str
) -> None:
    client.hset(queue.keys.config, name, value)
    put(queue, "a", priority=-1)
    (claim,) = queue.take_batch(ROOM)
    queue.publish([row(claim, 0, reason=FinishReason.STOP)])
    assert queue.state("a") is RequestState.COMPLETED
    assert 0 < client.pttl(queue.keys.tokens("a")) <= 60_000
    assert 60_000 < client.pttl(queue.keys.request("a")) <= 3_600_000


def test_an_entry_in_the_log_that_is_no_event_does_not_hinder_the_end(
    client: Any, queue: RequestQueue
) -> None:
    put(queue, "a")
    (claim,) = queue.take_batch(ROOM)
    queue.publish([row(claim, 0)])
    client.xadd(queue.keys.tokens("a"), {"event": "junk"}, id="2-0")
    queue.cancel("a")
    assert queue.publish([], [held(claim)]).held == [RowStatus.CANCELLED]
    record = queue.run(lookups.record(queue.keys, "a"))
    assert record["state"] == "cancelled"
    assert json.loads(record["result"])["text"] == "x"
    assert client.zcard(queue.keys.leases) == 0


def test_a_request_whose_hash_was_deleted_while_it_ran_gets_its_last_event(client: Any) -> None:
    queue = RequestQueue(client, lease_ms=1)
    put(queue, "a")
    (claim,) = queue.take_batch(ROOM)
    queue.publish([row(claim, 0)])
    client.delete(queue.keys.request("a"))
    assert queue.publish([row(claim, 1)], [held(claim)]).rows == [RowStatus.FENCED]
    time.sleep(0.01)
    assert queue.reap().ended == 1
    end = last_event(queue, "a")
    assert end["error"]["message"].startswith("request: ")
    assert end["usage"]["completion_tokens"] == 1
    assert client.pttl(queue.keys.tokens("a")) > 0


def test_a_payload_beyond_the_limit_is_refused_before_it_travels(
    client: Any, queue: RequestQueue
) -> None:
    put_plainly(client, queue, "huge", 1, '{"prompt":"' + "x" * 2**23 + '"}')
    put_plainly(client, queue, "b" * 201, 2, '{"prompt":"a"}')
    assert queue.take_batch(ROOM) == []
    assert last_event(queue, "huge")["error"]["message"].startswith("payload: 83886")
    assert last_event(queue, "b" * 201)["error"]["message"].startswith("id: ")


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


@pytest.mark.matrix(7)
@pytest.mark.parametrize(
    "name", ["tenants", "deadlines", "delayed", "dead", "workers", "alone", "orphans"]
)
def test_a_key_of_the_queue_of_another_type_stops_nothing_half_way(client: Any, name: str) -> None:
    queue = RequestQueue(client, worker_id="w1", lease_ms=300, max_crashes=1)
    put(queue, "a", tenant="one")
    put(queue, "b", tenant="two")
    client.set(queue.keys.prefix + name, "text")
    claims = queue.take_batch(ROOM)
    assert sorted(ids(claims)) == ["a", "b"]
    queue.publish([row(claims[0], 0, reason=FinishReason.STOP)])
    assert queue.state(claims[0].request_id) is RequestState.COMPLETED
    time.sleep(0.35)
    assert queue.reap().returned == 1
    (claim,) = queue.take_batch(ROOM)
    assert claim.request_id == claims[1].request_id
    time.sleep(0.35)
    assert queue.reap().dead == 1
    assert queue.state(claim.request_id) is RequestState.DEAD
    # A dead letter is kept for as long as it can be found.
    expires = client.pttl(queue.keys.request(claim.request_id)) > 0
    assert expires is (name == "dead")


@pytest.mark.parametrize("name", ["deadlines", "delayed"])
def test_whoever_needs_a_key_of_another_type_is_refused_whole(client: Any, name: str) -> None:
    """And where one is not needed it hinders nobody: a backoff is only left out."""
    queue = RequestQueue(client, lease_ms=50)
    put(queue, "a")
    put(queue, "b")
    client.set(queue.keys.prefix + name, "text")
    with pytest.raises(ResponseError, match="WRONGTYPE"):
        queue.enqueue([new("c"), new("d", deadline_ms=60_000, delay_ms=60_000)])
    assert not client.exists(queue.keys.request("c"), queue.keys.request("d"))
    for _ in range(2):
        assert sorted(ids(queue.take_batch(ROOM))) == ["a", "b"]
        time.sleep(0.1)
        assert queue.reap().returned == 2
    assert queue.count() == (2 if name == "delayed" else 0), "the others wait for their backoff"
    assert queue.run(scripts.cancel(["a", "b"], "any")) == [CancelStatus.CANCELLED] * 2
    assert queue.is_empty()


NO_EVENTS = [
    '{"index":0,"token_ids":["y"],"text":""}',
    '{"index":0,"token_ids":[0.5],"text":""}',
    '{"index":0,"token_ids":[7],"text":null}',
    '{"index":0,"token_ids":[7],"text":{}}',
    '{"index":0,"token_ids":[7],"text":"","logprobs":[1e999]}',
    '{"index":0,"token_ids":[7],"text":"","usage":[1e999],"error":{"a":[1e999]}}',
]


@pytest.mark.parametrize("entry", NO_EVENTS)
@pytest.mark.parametrize("end", ["cancel", "reap", "publish"])
def test_a_log_that_a_stranger_wrote_into_keeps_no_request_from_its_end(
    client: Any, entry: str, end: str
) -> None:
    """Nor others: one call ends it whole, and the calls after it go on."""
    queue = RequestQueue(client, lease_ms=50, max_crashes=1)
    put(queue, "a")
    (claim,) = queue.take_batch(ROOM)
    client.xadd(queue.keys.tokens("a"), {"event": entry}, id="1-0")
    if end == "publish":
        failed = TokenEvent(
            index=1, token_ids=[], text="", finish_reason=FinishReason.ERROR, attempt=1,
            usage=Usage(prompt_tokens=1, completion_tokens=1),
        )  # fmt: skip
        queue.publish([Row.of("a", claim.fence, failed)])
    elif end == "cancel":
        client.hset(queue.keys.request("a"), "cancelled", "1")
        queue.publish([], [held(claim)])
    else:
        time.sleep(0.1)
        queue.reap()
        put(queue, "b")
        claim_of_both = {it.request_id: it for it in queue.take_batch(ROOM)}
        assert claim_of_both["a"].is_spoilt
        queue.run(scripts.cancel(["a"], "any"))
        queue.publish([], [held(claim_of_both["a"])])
    record = queue.run(lookups.record(queue.keys, "a"))
    assert record["state"] == ("failed" if end == "publish" else "cancelled")
    result = Result.model_validate_json(record["result"])
    assert result.finish_reason == ("error" if end == "publish" else "cancelled")
    assert client.zscore(queue.keys.leases, "a") is None
    queue.reap()


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
    assert last_event(queue, "never")["finish_reason"] == "cancelled"


def test_an_enqueue_that_is_sent_again_is_known(queue: RequestQueue) -> None:
    """redis-py sends it again when the reply is lost; a second call with the same id is refused."""
    call = scripts.enqueue([new("mine"), new(idempotency_key="k")], 1000)
    assert queue.run(call) == queue.run(call)
    assert queue.count() == 2
    with pytest.raises(RequestExistsError, match="'mine'"):
        queue.enqueue([new("mine")])
    claims = queue.take_batch(ROOM)
    queue.publish([row(claim, 0, reason=FinishReason.STOP) for claim in claims])
    assert queue.run(call)[0] == "mine"
    assert queue.is_empty()

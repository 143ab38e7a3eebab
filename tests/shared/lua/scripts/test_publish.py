"""Rows of a holder are written once, refused one by one, or given back."""

from __future__ import annotations

import json
import time
from typing import Any

from promptq.shared.protocol.claims import Held
from promptq.shared.protocol.events import ErrorInfo, Result, Stats, TokenEvent, TokenLogprob, Usage
from promptq.shared.protocol.request import FinishReason, RequestState
from promptq.shared.protocol.rows import Row, RowStatus
from promptq.shared.queue import lookups
from promptq.shared.queue.request_queue import RequestQueue
from tests.support.requests import ROOM, entries_of, event, held, ids, put, row


def test_publishes_to_log_and_channel_and_finishes(client: Any, queue: RequestQueue) -> None:
    put(queue, "a")
    (claim,) = queue.take_batch(ROOM)
    with client.pubsub() as channel:
        channel.subscribe(queue.keys.events("a"))
        messages = channel.listen()
        assert next(messages)["type"] == "subscribe"
        rows = [row(claim, 0, "Hé"), row(claim, 1, " 🦊", FinishReason.STOP)]
        assert queue.publish(rows).rows == [RowStatus.OK, RowStatus.OK]
        live = [next(messages)["data"].decode() for _ in rows]
    assert [at for at, _ in entries_of(client, queue, "a")] == ["1-0", "2-1"]
    assert live == [entry.event_json for entry in rows]
    assert queue.state("a") is RequestState.COMPLETED
    record = queue.run(lookups.record(queue.keys, "a"))
    result = json.loads(record["result"])
    assert result["text"] == "Hé 🦊"
    assert result["token_ids"] == [7, 7]
    assert result["finish_reason"] == "stop"
    assert json.loads(record["last_event"]) == json.loads(live[-1])
    assert client.zcard(queue.keys.leases) == 0
    assert 0 < client.pttl(queue.keys.tokens("a")) <= 60_000
    assert 60_000 < client.pttl(queue.keys.request("a")) <= 3_600_000


def test_a_row_is_written_once_however_often_it_is_sent(client: Any, queue: RequestQueue) -> None:
    put(queue, "a")
    (claim,) = queue.take_batch(ROOM)
    assert queue.publish([row(claim, 0)]).rows == [RowStatus.OK]
    assert queue.publish([row(claim, 0)]).rows == [RowStatus.DUPLICATE]
    assert queue.publish([row(claim, 2)]).rows == [RowStatus.GAP]
    last = row(claim, 1, reason=FinishReason.LENGTH)
    assert queue.publish([last]).rows == [RowStatus.OK]
    assert queue.publish([last]).rows == [RowStatus.FINISHED]
    assert [at for at, _ in entries_of(client, queue, "a")] == ["1-0", "2-1"]


def test_a_row_that_is_refused_does_not_stop_the_others(client: Any, queue: RequestQueue) -> None:
    for name in "abcde":
        put(queue, name)
    a, b, c, d, e = queue.take_batch(ROOM)
    queue.publish([row(b, 0)])
    queue.cancel("d")
    queue.release([held(e)])
    statuses = queue.publish(
        [row(a, 0), row(b, 0), row(c, 5), row(d, 0), row(e, 0), row(b, 1)]
    ).rows
    assert statuses == ["ok", "duplicate", "gap", "cancelled", "fenced", "ok"]
    assert len(entries_of(client, queue, "a")) == 1
    assert len(entries_of(client, queue, "b")) == 2


def test_an_earlier_attempt_is_fenced_off(client: Any) -> None:
    """A zombie's writes are refused and change nothing."""
    quick = RequestQueue(client, worker_id="zombie", lease_ms=100)
    other = RequestQueue(client, worker_id="heir")
    put(quick, "a")
    (old,) = quick.take_batch(ROOM)
    quick.publish([row(old, 0, "one")])
    time.sleep(0.15)
    assert other.reap().returned == 1
    (fresh,) = other.take_batch(ROOM)
    assert fresh.attempt == 2
    assert [item.text for item in fresh.events] == ["one"]
    assert quick.publish([row(old, 1, "no")], [held(old)]).rows == [RowStatus.FENCED]
    assert quick.publish([], [held(old)]).held == [RowStatus.FENCED]
    assert quick.release([held(old)]) == ["fenced"]
    assert other.publish([row(fresh, 1, "two", FinishReason.STOP)]).rows == [RowStatus.OK]
    assert [item["text"] for _, item in entries_of(client, quick, "a")] == ["one", "two"]


def test_leases_are_renewed_for_all_that_is_held(client: Any) -> None:
    queue = RequestQueue(client)
    put(queue, "kept", priority=-1)
    put(queue, "forgotten")
    kept, _forgotten = queue.take_batch(ROOM)
    client.zadd(queue.keys.leases, {"kept": 1, "forgotten": 1})
    assert queue.publish([], [held(kept)]).held == [RowStatus.OK]
    assert queue.reap().returned == 1
    assert queue.state("kept") is RequestState.ACTIVE
    assert queue.state("forgotten") is RequestState.WAITING


def test_release_brings_back_the_old_place_and_the_progress(queue: RequestQueue) -> None:
    put(queue, "a")
    put(queue, "b")
    a, b = queue.take_batch(ROOM)
    queue.publish([row(b, 0, "so far")])
    assert queue.release([held(b), held(a)]) == ["waiting", "waiting"]
    assert queue.state("a") is RequestState.WAITING
    claims = queue.take_batch(ROOM)
    assert ids(claims) == ["a", "b"]
    assert [item.text for item in claims[1].events] == ["so far"]


def test_large_numbers_stay_exact(queue: RequestQueue) -> None:
    """Token ids beyond 14 digits' rounding and empty lists survive a fold by the server."""
    put(queue, "a")
    (claim,) = queue.take_batch(ROOM)
    first = TokenEvent(index=0, token_ids=[2**31 - 1], text='"\\/\n\x7f', attempt=1)
    queue.publish([Row.of("a", claim.fence, first)])
    queue.cancel("a")
    queue.publish([], [held(claim)])
    result = json.loads(queue.run(lookups.record(queue.keys, "a"))["result"])
    assert result["token_ids"] == [2**31 - 1]
    assert result["text"] == '"\\/\n\x7f'
    put(queue, "b")
    queue.cancel("b")
    assert json.loads(queue.run(lookups.record(queue.keys, "b"))["result"])["token_ids"] == []


def test_statuses_are_settled_row_by_row_before_any_is_written(
    client: Any, queue: RequestQueue
) -> None:
    put(queue, "a")
    put(queue, "b")
    a, b = queue.take_batch(ROOM)
    queue.cancel("b")
    sent = [row(a, 0), row(a, 1, reason=FinishReason.STOP), row(a, 2), row(b, 0), row(b, 1)]
    published = queue.publish(sent, [held(a), held(b)])
    assert published.rows == ["ok", "ok", "finished", "cancelled", "finished"]
    assert published.held == ["finished", "finished"]
    assert [at for at, _ in entries_of(client, queue, "a")] == ["1-0", "2-1"]
    assert [at for at, _ in entries_of(client, queue, "b")] == ["0-1"]


def test_a_row_that_cannot_be_written_does_not_stop_the_others(
    client: Any, queue: RequestQueue
) -> None:
    put(queue, "spoilt", priority=-1)
    put(queue, "good")
    spoilt, good = queue.take_batch(ROOM)
    client.set(queue.keys.tokens("spoilt"), "no stream any more")
    assert queue.publish([row(spoilt, 0), row(good, 0)]).rows == ["error", "ok"]
    assert len(entries_of(client, queue, "good")) == 1


def test_a_result_that_the_worker_gives_is_kept_as_it_is(queue: RequestQueue) -> None:
    put(queue, "a")
    (claim,) = queue.take_batch(ROOM)
    queue.publish([Row.of("a", claim.fence, event(0, reason=FinishReason.STOP), '{"given":true}')])
    assert queue.run(lookups.record(queue.keys, "a"))["result"] == '{"given":true}'


def test_a_result_that_the_server_folds_lacks_nothing(queue: RequestQueue) -> None:
    put(queue, "a")
    (claim,) = queue.take_batch(ROOM)
    chosen = TokenLogprob(token_id=7, logprob=-0.5, rank=2, top=None)
    first = TokenEvent(
        index=0, token_ids=[7], text="x", logprobs=[chosen], attempt=1,
        prompt_logprobs=[None, chosen], prompt_texts=["a", "\u00fc"],
    )  # fmt: skip
    last = TokenEvent(
        index=1, token_ids=[], text="", finish_reason=FinishReason.ERROR, attempt=1,
        usage=Usage(prompt_tokens=3, completion_tokens=1), stats=Stats(attempts=1),
        error=ErrorInfo(type="internal_error", message='"quoted"'),
    )  # fmt: skip
    queue.publish([Row.of("a", claim.fence, first), Row.of("a", claim.fence, last)])
    folded = Result.model_validate_json(queue.run(lookups.record(queue.keys, "a"))["result"])
    assert folded == Result.fold([first, last])


def test_nothing_is_added_behind_a_last_event(client: Any, queue: RequestQueue) -> None:
    """Neither when the hash has forgotten that there is one, nor when the log has expired."""
    for name in ("forgotten", "expired"):
        put(queue, name)
        (claim,) = queue.take_batch(ROOM)
        queue.publish([row(claim, 0, reason=FinishReason.STOP)])
        if name == "forgotten":
            client.hset(queue.keys.request(name), "state", "active")
        else:
            client.delete(queue.keys.tokens(name))
        published = queue.publish([row(claim, 0), row(claim, 1)], [held(claim)])
        assert published.rows == [RowStatus.FINISHED, RowStatus.FINISHED]
        assert published.held == [RowStatus.FINISHED]
    client.delete(queue.keys.request("forgotten"))
    client.zadd(queue.keys.pending, {"forgotten": 1})
    assert queue.take_batch(ROOM) == []
    assert [at for at, _ in entries_of(client, queue, "forgotten")] == ["1-1"]
    assert not queue.contains("forgotten")


def test_a_finished_request_cannot_be_given_back(queue: RequestQueue) -> None:
    put(queue, "a")
    (claim,) = queue.take_batch(ROOM)
    queue.publish([row(claim, 0, reason=FinishReason.STOP)])
    assert queue.release([held(claim)]) == ["finished"]
    assert queue.state("a") is RequestState.COMPLETED
    assert queue.is_empty()


def test_sharded_queues_publish_to_shard_channels(client: Any, queue: RequestQueue) -> None:
    client.hset(queue.keys.config, "pubsub", "sharded")
    put(queue, "a")
    (claim,) = queue.take_batch(ROOM)
    with client.pubsub() as channel:
        channel.ssubscribe(queue.keys.events("a"))
        messages = channel.listen()
        assert next(messages)["type"] == "ssubscribe"
        queue.publish([row(claim, 0, "live")])
        assert json.loads(next(messages)["data"])["text"] == "live"


def test_logs_and_results_live_as_long_as_the_queue_says(client: Any, queue: RequestQueue) -> None:
    client.hset(queue.keys.config, mapping={"log_ttl_ms": "500000", "result_ttl_ms": "900000"})
    put(queue, "a")
    queue.cancel("a")
    assert 60_000 < client.pttl(queue.keys.tokens("a")) <= 500_000
    assert 500_000 < client.pttl(queue.keys.request("a")) <= 900_000


def test_a_hash_lives_at_least_as_long_as_its_log(client: Any, queue: RequestQueue) -> None:
    """Else the id might be used again while a last event stands in its log."""
    client.hset(queue.keys.config, mapping={"log_ttl_ms": "900000", "result_ttl_ms": "1"})
    put(queue, "a")
    queue.cancel("a")
    assert client.pttl(queue.keys.request("a")) >= client.pttl(queue.keys.tokens("a")) > 1


def test_only_answers_that_ended_by_themselves_are_measured(
    client: Any, queue: RequestQueue
) -> None:
    for _ in range(140):
        put(queue)
    for claim in queue.take_batch(ROOM)[:135]:
        queue.publish([row(claim, 0, reason=FinishReason.STOP)])
    assert client.llen(queue.keys.prefix + "outputs") == 128
    for request_id in [put(queue) for _ in range(140)]:
        queue.cancel(request_id)
    newest = put(queue)
    (claim,) = queue.take_batch(ROOM)
    payload = client.hget(queue.keys.request(newest), "payload")
    assert claim.cost == -(-len(payload) // 4) + 1


def test_times_are_kept(queue: RequestQueue) -> None:
    before = int(time.time() * 1000)
    put(queue, "a")
    (first,) = queue.take_batch(ROOM)
    time.sleep(0.01)
    queue.release([Held("a", first.fence, prompt_tokens=9)])
    (second,) = queue.take_batch(ROOM)
    assert second.enqueued_at_ms == first.enqueued_at_ms >= before - 1000
    assert second.claimed_at_ms > first.claimed_at_ms
    assert second.prompt_tokens == 9, "a release tells the length too"
    queue.publish([row(second, 0, reason=FinishReason.STOP)])
    record = queue.run(lookups.record(queue.keys, "a"))
    assert int(record["finished_at"]) >= second.claimed_at_ms


def test_what_is_put_back_wakes_the_workers(client: Any, queue: RequestQueue) -> None:
    """Whether a worker gives it back, a lease runs out or a dead letter is run again."""
    crashing = RequestQueue(client, lease_ms=1, max_crashes=2)
    with client.pubsub() as channel:
        channel.subscribe(queue.keys.control)
        messages = channel.listen()
        assert next(messages)["type"] == "subscribe"

        def is_woken() -> bool:
            return bool(next(messages)["data"] == b"pending")

        put(queue, "a")
        assert is_woken()
        (claim,) = crashing.take_batch(ROOM)
        crashing.release([held(claim)])
        assert is_woken()
        for returned in (1, 0):
            crashing.take_batch(ROOM)
            time.sleep(0.01)
            assert crashing.reap().returned == returned
            assert not returned or is_woken()
        crashing.requeue("a")
        assert is_woken()


def test_a_renewal_restores_a_lease_that_was_lost(client: Any, queue: RequestQueue) -> None:
    put(queue, "a")
    (claim,) = queue.take_batch(ROOM)
    client.delete(queue.keys.leases)
    assert queue.publish([], [held(claim)]).held == [RowStatus.OK]
    assert client.zscore(queue.keys.leases, "a") is not None

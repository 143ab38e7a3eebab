"""Cancelling, removing, and clearing a queue."""

from __future__ import annotations

from typing import Any

from promptq.shared.protocol.claims import Held, Room
from promptq.shared.protocol.replies import CancelStatus
from promptq.shared.protocol.request import FinishReason, RequestState
from promptq.shared.protocol.rows import RowStatus
from promptq.shared.queue import scripts
from promptq.shared.queue.request_queue import RequestQueue
from tests.support.requests import ROOM, entries_of, held, last_event, new, put, put_plainly, row


def test_cancelling_a_waiting_request_ends_it_at_once(client: Any, queue: RequestQueue) -> None:
    put(queue, "a")
    assert queue.cancel("a") is CancelStatus.CANCELLED
    assert queue.take_batch(ROOM) == []
    assert queue.state("a") is RequestState.CANCELLED
    assert last_event(queue, "a")["finish_reason"] == "cancelled"
    assert queue.cancel("a") is CancelStatus.FINISHED
    assert queue.cancel("never") is CancelStatus.UNKNOWN
    assert len(entries_of(client, queue, "a")) == 1


def test_cancelling_a_running_request_ends_it_with_its_next_row(
    client: Any, queue: RequestQueue
) -> None:
    put(queue, "a")
    (claim,) = queue.take_batch(ROOM)
    queue.publish([row(claim, 0)], [Held("a", claim.fence, prompt_tokens=3)])
    assert queue.cancel("a") is CancelStatus.FLAGGED
    assert queue.publish([row(claim, 1)]).rows == [RowStatus.CANCELLED]
    entries = entries_of(client, queue, "a")
    assert [at for at, _ in entries] == ["1-0", "1-1"]
    assert entries[-1][1]["usage"] == {
        "prompt_tokens": 3, "completion_tokens": 1, "cached_tokens": 0,
    }  # fmt: skip
    assert queue.publish([row(claim, 1)]).rows == [RowStatus.FINISHED]


def test_the_flag_alone_cancels(client: Any, queue: RequestQueue) -> None:
    put_plainly(client, queue, "waiting", 1, '{"prompt":"a"}')
    put_plainly(client, queue, "running", 0, '{"prompt":"a"}')
    (claim,) = queue.take_batch(Room(max_count=1, token_budget=10**6))
    for name in ("waiting", "running"):
        client.hset(queue.keys.request(name), "cancelled", "1")
    assert queue.take_batch(ROOM) == []
    assert queue.publish([], [held(claim)]).held == [RowStatus.CANCELLED]
    for name in ("waiting", "running"):
        assert last_event(queue, name)["finish_reason"] == "cancelled"


def test_remove_takes_out_what_waits_only(queue: RequestQueue) -> None:
    put(queue, "waits", priority=1)
    put(queue, "runs")
    queue.take_batch(Room(max_count=1, token_budget=10**6))
    assert queue.remove("waits")
    assert not queue.remove("runs")
    assert not queue.remove("never")
    assert queue.state("runs") is RequestState.ACTIVE
    assert queue.is_empty()


def test_clear_removes_all_that_wait(queue: RequestQueue) -> None:
    put(queue, "runs")
    queue.take_batch(ROOM)
    queue.enqueue([new() for _ in range(1200)])
    put(queue, "later", delay_ms=60_000)
    assert queue.clear() == 1201
    assert queue.is_empty()
    assert queue.state("later") is RequestState.CANCELLED
    assert queue.state("runs") is RequestState.ACTIVE


def test_a_message_alone_cancels_nothing_that_waits(queue: RequestQueue) -> None:
    put(queue, "a")
    assert queue.run(scripts.cancel(["a"], "flagged")) == [CancelStatus.ACTIVE]
    assert queue.contains("a")


def test_removing_what_runs_does_not_flag_it(queue: RequestQueue) -> None:
    put(queue, "a")
    (claim,) = queue.take_batch(ROOM)
    assert not queue.remove("a")
    assert queue.publish([row(claim, 0)]).rows == [RowStatus.OK]


def test_clear_ends_whatever_strangers_left_in_the_queue(client: Any, queue: RequestQueue) -> None:
    put(queue, "runs", priority=-1)
    put(queue, "over")
    runs, over = queue.take_batch(ROOM)
    queue.publish([row(over, 0, reason=FinishReason.STOP)])
    client.zadd(queue.keys.pending, {"runs": 1, "over": 2, b"\xff": 3, "no-hash": 4})
    put(queue, "waits")
    assert queue.clear() == 3
    assert queue.is_empty()
    assert queue.publish([row(runs, 0)]).rows == [RowStatus.OK]
    assert queue.state("over") is RequestState.COMPLETED

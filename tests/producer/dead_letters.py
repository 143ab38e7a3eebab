"""Dead letters, made by crashes of workers that nobody sees."""

from __future__ import annotations

from promptq import Client
from promptq.shared.protocol.request import RequestState
from promptq.shared.queue.request_queue import RequestQueue
from tests.producer.playing import KEYS, HandWorker
from tests.support.roles import QueueClient, as_role


def bury(redis_url: str, *request_ids: str) -> None:
    """Make dead letters of new requests, by crashes of workers that nobody sees."""
    with Client(redis_url) as client:
        for request_id in request_ids:
            client.enqueue("[bold]boom[/]", request_id=request_id, max_tokens=9)
    crash_until_dead(redis_url, *request_ids)


def crash_until_dead(redis_url: str, *request_ids: str) -> None:
    """Make dead letters of the requests that wait, which are these alone."""
    by_hand = QueueClient.from_url(as_role("", redis_url))
    with by_hand as connection, Client(redis_url) as client:
        connection.hset(KEYS.config, "crash_backoff_ms", "0")
        queue = RequestQueue(connection, worker_id="victim", max_crashes=2)
        hand = HandWorker(connection)
        hand.queue = queue
        while any(client.state(it) is not RequestState.DEAD for it in request_ids):
            claim = hand.take()
            hand.send(claim, "x")
            connection.zadd(KEYS.leases, {claim.request_id: 1})
            queue.reap()

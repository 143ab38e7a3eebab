"""API keys are charged the tokens that they cause, as they come, and once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

import openai
import pytest

from promptq.shared.protocol.request import FinishReason, TokenAccount
from promptq.shared.protocol.rows import RowStatus
from promptq.shared.queue.request_queue import RequestQueue
from promptq.shared.queue.scripts import Rate, take_of_rates
from tests.producer.gateway.living import LiveGateway
from tests.producer.playing import KEYS, HandWorker
from tests.support.requests import ROOM, held, put, row
from tests.support.roles import QueueClient, as_role
from tests.support.waiting import until

IN_DEBT = r"has used more than its 200 tokens a minute; try again in [345] min"

RATE = f"{KEYS.prefix}rate:web"

MINUTE_MS = 60_000


@pytest.fixture
def connection(server: Any) -> Iterator[Any]:
    with closing(server.connect()) as connection:
        yield connection


def charged(client: Any, began_ms: int, key: str = RATE) -> float:
    """Tokens that an account of one token a minute was charged since."""
    return int((float(client.hget(key, "tokens") or began_ms) - began_ms) / MINUTE_MS)


def server_ms(client: Any) -> int:
    seconds, microseconds = client.time()
    return int(seconds) * 1000 + int(microseconds) // 1000


def test_only_what_the_log_takes_is_charged_and_once(connection: Any) -> None:
    """Not what is repeated, comes too early or from an attempt that lost the request."""
    queue, began = RequestQueue(connection, lease_ms=1), server_ms(connection)
    put(queue, "a", account=TokenAccount("web", 1))
    (first,) = queue.take_batch(ROOM)
    assert not connection.exists(RATE), "nothing has come yet"
    assert queue.publish([row(first, 0), row(first, 1)]).rows == [RowStatus.OK] * 2
    assert charged(connection, began) == 2
    assert queue.publish([row(first, 1), row(first, 5)]).rows == [
        RowStatus.DUPLICATE,
        RowStatus.GAP,
    ]
    while not queue.reap().returned:  # its worker died
        pass
    (second,) = queue.take_batch(ROOM)
    statuses = queue.publish([row(first, 2), row(second, 1), row(second, 2)]).rows
    assert statuses == [RowStatus.FENCED, RowStatus.DUPLICATE, RowStatus.OK]
    assert charged(connection, began) == 3
    last = row(second, 3, reason=FinishReason.STOP)
    assert queue.publish([last]).rows == [RowStatus.OK]
    assert queue.publish([last]).rows == [RowStatus.FINISHED]
    assert charged(connection, began) == 4
    assert connection.pttl(RATE) > 3 * MINUTE_MS, "a debt is not forgotten before it is paid"


def test_a_debt_outlives_what_else_is_taken(connection: Any) -> None:
    """Uploads take no tokens, so they are let in; the debt stays."""
    queue = RequestQueue(connection)
    put(queue, "a", account=TokenAccount("web", 1))
    (claim,) = queue.take_batch(ROOM)
    queue.publish([row(claim, n) for n in range(5)])
    assert queue.run(take_of_rates("web", [Rate("requests", 1, 60)])).wait_ms == 0
    assert connection.pttl(RATE) > 4 * MINUTE_MS
    answer = queue.run(take_of_rates("web", [Rate("tokens", 1, 1), Rate("requests", 1, 60)]))
    assert answer.wait_ms is not None
    assert 4 * MINUTE_MS < answer.wait_ms <= 5 * MINUTE_MS
    assert answer.remaining["tokens"] == 0


def test_each_pays_for_its_own_in_one_step(connection: Any) -> None:
    """A cancelled request is not charged, and one without an account costs nobody."""
    queue, began = RequestQueue(connection), server_ms(connection)
    for name, holder in (("a", "web"), ("b", "web"), ("c", "web:batches"), ("d", None), ("e", "e")):
        put(queue, name, account=TokenAccount(holder, 1) if holder else None)
    a, b, c, d, e = queue.take_batch(ROOM)
    queue.cancel("e")
    queue.publish([row(a, 0), row(a, 1), row(b, 0), row(c, 0), row(d, 0), row(e, 0)], [held(a)])
    assert charged(connection, began) == 3
    assert charged(connection, began, f"{RATE}:batches") == 1
    assert {it.decode() for it in connection.scan_iter(f"{KEYS.prefix}rate:*")} == {
        RATE,
        f"{RATE}:batches",
    }


@pytest.mark.parametrize("account", ["0 web", "x web", "1 we{b", "1", "1e9 web", "9" * 400])
def test_an_account_without_sense_hinders_no_step(connection: Any, account: str) -> None:
    queue, began = RequestQueue(connection), server_ms(connection)
    put(queue, "a", account=None)
    put(queue, "b", account=TokenAccount("web", 1))
    a, b = queue.take_batch(ROOM)
    connection.hset(KEYS.request("a"), "account", account)
    assert queue.publish([row(a, 0), row(b, 0)]).rows == [RowStatus.OK] * 2
    assert charged(connection, began) == 1


@pytest.mark.parametrize("spoilt", ["another type", "inf", "nan", "-inf", "junk", "1e300"])
def test_a_spoilt_bucket_hinders_no_step(connection: Any, spoilt: str) -> None:
    if spoilt == "another type":
        connection.set(RATE, "x")
    else:
        connection.hset(RATE, "tokens", spoilt)
    queue = RequestQueue(connection)
    put(queue, "a", account=TokenAccount("web", 1))
    (claim,) = queue.take_batch(ROOM)
    assert queue.publish([row(claim, 0)], [held(claim)]).rows == [RowStatus.OK]
    last = row(claim, 1, reason=FinishReason.STOP)
    assert queue.publish([last]).rows == [RowStatus.OK]
    if spoilt != "another type":
        connection.hset(RATE, "tokens", spoilt)
        queue.run(take_of_rates("web", [Rate("tokens", 1, 1)]))


def test_a_dead_letter_that_runs_again_is_charged_again(connection: Any) -> None:
    queue = RequestQueue(connection, lease_ms=1, max_crashes=1)
    put(queue, "a", account=TokenAccount("web", 1))
    queue.take_batch(ROOM)
    while queue.state("a") != "dead":
        queue.reap()
        queue.take_batch(ROOM)
    began = server_ms(connection)
    queue.requeue("a")
    claims = []
    while not claims:
        claims = queue.take_batch(ROOM)
    queue.publish([row(claims[0], 0)])
    assert charged(connection, began) == 1


def test_a_chat_without_max_tokens_is_charged_what_it_makes(
    start: Callable[..., LiveGateway], make_key: Callable[..., str], redis_url: str
) -> None:
    """Its stream goes on beyond the key's rate; what comes next is refused until it is paid."""
    gateway = start()
    secret = make_key("web", tokens_per_minute=200)
    other = make_key("other", tokens_per_minute=200)
    asked: dict[str, Any] = {"model": "", "messages": [{"role": "user", "content": "Once"}]}
    options: dict[str, Any] = {"base_url": gateway.base_url, "max_retries": 0}
    with (
        QueueClient.from_url(as_role("", redis_url)) as connection,
        openai.OpenAI(api_key=secret, **options) as client,
        openai.OpenAI(api_key=other, **options) as neighbour,
        ThreadPoolExecutor(1) as pool,
    ):
        worker = HandWorker(connection)
        reading = pool.submit(
            lambda: [
                chunk.choices[0].delta.content or ""
                for chunk in client.chat.completions.create(**asked, stream=True)
            ]
        )
        until(worker.queue.count)
        claim = worker.take()
        for _ in range(4):
            worker.send(claim, "x" * 200)
        with pytest.raises(openai.RateLimitError, match=IN_DEBT) as refused:
            client.chat.completions.create(**asked)
        assert refused.value.code == "rate_limit_exceeded"
        headers = refused.value.response.headers
        assert 180 <= int(headers["retry-after"]) <= 250, "800 at 200 a minute, less a minute's"
        assert headers["x-ratelimit-remaining-tokens"] == "0"
        assert not reading.done()
        worker.finish(claim, "the end")
        assert "".join(reading.result()) == "x" * 800 + "the end"
        with worker.finishing(["ok"]):
            answer = neighbour.chat.completions.with_raw_response.create(**asked)
        left = int(answer.headers["x-ratelimit-remaining-tokens"])
        assert 150 < left < 200, "nothing but its own prompt"

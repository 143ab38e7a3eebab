"""Requests of the pages to the gateway, without a browser."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx2
import pytest
import redis.asyncio

from promptq import AsyncClient
from promptq.producer.gateway.dashboard.request_search import search
from promptq.shared.errors import InvalidRequestError
from promptq.shared.protocol.events import TokenEvent
from promptq.shared.protocol.request import FinishReason
from promptq.shared.queue.request_queue import AsyncRequestQueue
from tests.producer.gateway.living import serving
from tests.producer.playing import KEYS, Start
from tests.support.model_free import running_worker, text_of
from tests.support.roles import as_role


@pytest.fixture
async def http(redis_url: str) -> AsyncIterator[httpx2.AsyncClient]:
    async with (
        serving(redis_url) as gateway,
        httpx2.AsyncClient(base_url=gateway.url, timeout=None) as http,
    ):
        yield http


@pytest.fixture
async def client(redis_url: str) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(redis_url) as client:
        yield client


def messages_of(text: str) -> Iterator[tuple[str, Any]]:
    for part in text.split("\n\n"):
        if part.startswith("event: "):
            event, data = part.split("\n")
            yield event.removeprefix("event: "), json.loads(data.removeprefix("data: "))


async def test_the_stream_of_a_request_that_is_over_ends(
    redis_url: str, http: httpx2.AsyncClient, client: AsyncClient
) -> None:
    async with running_worker(redis_url):
        request_id = await client.enqueue("Once", max_tokens=50, seed=4)
        await client.result(request_id)
    answer = await http.get("/dashboard/api/live/request", params={"id": request_id})
    assert answer.headers["Content-Type"].startswith("text/event-stream")
    told = list(messages_of(answer.text))
    lives = [data for event, data in told if event == "request"]
    assert lives[0]["value"]["state"] == "completed"
    assert lives[0]["now"] >= lives[0]["value"]["moments"][-1]["at"]
    tokens = [data for event, data in told if event == "tokens"]
    assert "".join(it["text"] for it in tokens) == text_of(4, 50)
    assert tokens[-1]["finish_reason"] == "length"


async def test_the_stream_of_a_request_that_cannot_be_read_says_so_and_ends(
    redis_url: str, http: httpx2.AsyncClient
) -> None:
    end = TokenEvent(index=0, token_ids=[], text="", finish_reason=FinishReason.STOP, attempt=1)
    record = {"state": "completed", "last_event": end.to_json(), "result": "{"}
    async with redis.asyncio.Redis.from_url(redis_url) as connection:
        await connection.hset(KEYS.request("odd"), mapping=record)
    answer = await http.get("/dashboard/api/live/request", params={"id": "odd"})
    problems = [data for event, data in messages_of(answer.text) if event == "problem"]
    assert [it["code"] for it in problems] == ["spoilt_record"]


async def test_of_a_long_payload_the_beginning_is_shown(
    http: httpx2.AsyncClient, client: AsyncClient
) -> None:
    await client.enqueue("x" * 100_000, request_id="a")
    await client.cancel("a")
    answer = await http.get("/dashboard/api/live/request", params={"id": "a"})
    _, life = next(messages_of(answer.text))
    assert 65_000 < len(life["value"]["payload"]) < 66_000
    assert len(answer.content) < 70_000


async def test_a_body_that_is_too_large_is_refused(redis_url: str) -> None:
    async with (
        serving(redis_url, http_max_body_bytes=1000) as gateway,
        httpx2.AsyncClient(base_url=gateway.url, timeout=None) as http,
    ):
        answer = await http.post("/dashboard/api/play", json={"prompt": "x" * 1000})
        assert answer.status_code == 413
        answer = await http.post("/dashboard/api/play", json={"prompt": "x", "self": 1})
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "self"


def test_a_gateway_stops_with_pages_open(start: Start) -> None:
    """Though it lets answers come to their end for long, and pages have none."""
    process = start("gateway", "--port", "0", PROMPTQ_HTTP_DRAIN_SECONDS="100000")
    assert process.stdout is not None
    url = process.stdout.readline().split()[2].rstrip(",")
    with httpx2.stream("GET", f"{url}/dashboard/api/live/overview", timeout=None) as answer:
        pieces = answer.iter_text()
        assert "event: history" in next(pieces)
        process.send_signal(signal.SIGTERM)
        for _ in pieces:
            pass  # until its end, as it should be
    assert process.wait() == 0


async def test_search_pages_through_all_tenants_in_turn(
    redis_url: str, client: AsyncClient
) -> None:
    tenants = [None, "a", "b"]
    names = [f"r{n:03}" for n in range(130)]
    await client.enqueue_many(
        {"prompt": "x", "request_id": name, "tenant": tenants[n % 3]}
        for n, name in enumerate(names)
    )
    await client.enqueue("x", request_id="later", delay_ms=60_000)
    async with redis.asyncio.Redis.from_url(redis_url) as connection:
        queue = AsyncRequestQueue(connection)
        found, cursor = [], ""
        while True:
            page = await search(queue, state="waiting", cursor=cursor)
            found += page.requests
            if page.cursor is None:
                break
            cursor = page.cursor
        assert sorted(it.request_id for it in found) == names
        assert {it.tenant for it in found} == {"", "a", "b"}
        delayed = await search(queue, state="delayed")
        assert [it.request_id for it in delayed.requests] == ["later"]
        assert delayed.searched == "1 to 1 of 1 delayed requests"
        with pytest.raises(InvalidRequestError, match="state: 'asleep'"):
            await search(queue, state="asleep")


async def test_search_tells_what_waits_from_what_is_delayed(
    redis_url: str, client: AsyncClient
) -> None:
    """By the beginning of an id too, and whatever the state."""
    await client.enqueue("x", request_id="job-now")
    await client.enqueue("x", request_id="job-later", delay_ms=3_600_000)
    async with redis.asyncio.Redis.from_url(redis_url) as connection:
        queue = AsyncRequestQueue(connection)
        for prefix in ("", "job-"):
            for state, name in (("waiting", "job-now"), ("delayed", "job-later")):
                [found] = (await search(queue, state=state, prefix=prefix)).requests
                assert (found.request_id, found.state) == (name, state)
            both = (await search(queue, prefix=prefix)).requests
            assert {it.request_id: it.state for it in both} == {
                "job-now": "waiting",
                "job-later": "delayed",
            }


async def test_search_goes_through_some_ten_thousand_keys_a_page(redis_url: str) -> None:
    async with redis.asyncio.Redis.from_url(as_role("", redis_url)) as admin:
        await admin.mset({f"other:{n}": "" for n in range(12_000)})
    async with redis.asyncio.Redis.from_url(redis_url) as connection:
        queue = AsyncRequestQueue(connection)
        page = await search(queue, state="failed")
        words = "about 10,000 of 12,000 keys of the server, in no order"
        assert (page.requests, page.searched) == ([], words)
        assert page.cursor is not None
        rest = await search(queue, state="failed", cursor=page.cursor)
        assert (rest.searched.split(" of ")[0], rest.cursor) == ("the rest", None)


async def test_an_action_takes_a_thousand_dead_letters(
    redis_url: str, http: httpx2.AsyncClient, client: AsyncClient
) -> None:
    names = {f"d{n}": n for n in range(1001)}
    async with redis.asyncio.Redis.from_url(redis_url) as connection:
        await connection.zadd(KEYS.dead, names)
    for num in (1000, 1, 0):
        answer = await http.post("/dashboard/api/dead/purge", json={"all": True})
        assert answer.json() == {"purged": num}
    answer = await http.post("/dashboard/api/dead/purge", json={"ids": list(names)})
    assert answer.status_code == 400
    assert await client.dead_ids() == []


async def test_a_list_of_requests_reads_none_of_their_payloads(
    redis_url: str, client: AsyncClient
) -> None:
    """They may have megabytes each, and one page looks at hundreds of requests."""
    for number in range(4):
        await client.enqueue("x" * 2**20, request_id=f"large-{number}")

    async with (
        redis.asyncio.Redis.from_url(redis_url) as connection,
        redis.asyncio.Redis.from_url(as_role("", redis_url)) as admin,
    ):
        queue = AsyncRequestQueue(connection)
        before = (await admin.info("stats"))["total_net_output_bytes"]
        for options in ({}, {"state": "waiting"}, {"prefix": "large"}):
            assert len((await search(queue, **options)).requests) == 4
        after = (await admin.info("stats"))["total_net_output_bytes"]
    assert after - before < 2**20


async def test_search_among_keys_finds_what_is_over_and_no_other_queues(
    redis_url: str, client: AsyncClient
) -> None:
    names = [f"job[{n}]" for n in range(60)]
    await client.enqueue_many({"prompt": "x", "request_id": it, "tenant": "t"} for it in names)
    for name in names[:55]:
        await client.cancel(name)
    async with AsyncClient(redis_url, "other") as other:
        await other.cancel(await other.enqueue("x", request_id="job[1]"))
    async with redis.asyncio.Redis.from_url(redis_url) as connection:
        queue = AsyncRequestQueue(connection)
        over = await search(queue, state="cancelled", tenant="t")
        assert sorted(it.request_id for it in over.requests) == sorted(names[:55])
        assert over.cursor is None
        begun = await search(queue, prefix="job[5")
        assert sorted(it.request_id for it in begun.requests) == sorted(
            it for it in names if it.startswith("job[5")
        )
        assert all(it.finished_at for it in begun.requests if it.state == "cancelled")


async def test_without_the_right_to_scan_an_id_is_still_found(
    redis_url: str, client: AsyncClient
) -> None:
    await client.enqueue("x", request_id="a")
    async with redis.asyncio.Redis.from_url(as_role("", redis_url)) as admin:
        await admin.execute_command(
            "ACL", "SETUSER", "narrow", "on", "nopass", "~*", "+@all", "-scan"
        )
        async with redis.asyncio.Redis.from_url(
            as_role("", redis_url), username="narrow", password=""
        ) as narrow:
            found = await search(AsyncRequestQueue(narrow), prefix="a")
        await admin.execute_command("ACL", "DELUSER", "narrow")
    assert [it.request_id for it in found.requests] == ["a"]
    assert "may not SCAN" in found.searched


async def test_a_search_that_is_cut_says_so_and_goes_on(
    redis_url: str, client: AsyncClient
) -> None:
    names = [f"r{n}" for n in range(1200)]
    await client.enqueue_many({"prompt": "x", "request_id": it} for it in names)
    async with redis.asyncio.Redis.from_url(redis_url) as connection:
        queue = AsyncRequestQueue(connection)
        page = await search(queue)
        assert re.fullmatch(r"about 500 of 1,2\d\d keys of the server, in no order", page.searched)
        found = page.requests
        while page.cursor is not None:
            page = await search(queue, cursor=page.cursor)
            assert ("about 500 more of" if page.cursor else "the rest of") in page.searched
            found += page.requests
        assert sorted({it.request_id for it in found}) == sorted(names)
        for wrong in ("x", "-1", str(2**64)):
            with pytest.raises(InvalidRequestError, match="cursor: "):
                await search(queue, cursor=wrong)

"""Each page shows the current state, and changes by itself."""

from __future__ import annotations

import asyncio
import re
import time
from typing import Any

import pytest
from playwright.async_api import Page, expect

from promptq import AsyncClient
from promptq.shared.protocol.claims import Held, Room
from promptq.shared.protocol.events import TokenEvent, TokenLogprob
from promptq.shared.protocol.request import FinishReason
from promptq.shared.protocol.rows import Row
from promptq.shared.protocol.worker_stats import WorkerStats
from promptq.shared.queue.request_queue import AsyncRequestQueue
from promptq.shared.queue.scripts import heartbeat
from promptq.shared.server.embedded import EmbeddedServer
from tests.producer.gateway.dashboard.conftest import Open, write_an_hour
from tests.producer.gateway.living import serving
from tests.producer.playing import KEYS, bury
from tests.support.model_free import running_worker, served_model_free, text_of

pytestmark = pytest.mark.asyncio(loop_scope="session")
ONE = Room(max_count=1, token_budget=10**6)


def tile(page: Page, name: str) -> Any:
    """The large figure of a tile."""
    return page.locator(".tile", has_text=name).locator("strong")


async def test_overview(
    redis_url: str, client: AsyncClient, connection: Any, open_page: Open
) -> None:
    await write_an_hour(connection)
    ids = [await client.enqueue("Once", priority=it, max_tokens=3000) for it in (0, 0, -5)]
    page = await open_page()
    await expect(tile(page, "Waiting")).to_have_text("3")
    await expect(page.get_by_text("Affinity hits")).to_have_count(0)
    await connection.hset(client.queue.keys.config, "affinity_ms", 5)
    await expect(page.get_by_text("0 misses, 0 waits, 0 tokens cached")).to_be_visible()
    await expect(page.get_by_text("start one with promptq worker.")).to_be_visible()
    await connection.hset(client.queue.keys.model, "standby_until", 2**53)
    await expect(page.get_by_text("a worker loads it when its turn comes")).to_be_visible()
    await expect(page.locator(".ranking li")).to_have_text(["-51", "02"])
    ids.append(await client.enqueue("Once", priority=7, max_tokens=3000))
    await expect(page.locator(".ranking li")).to_have_text(["-51", "02", "71"])
    for name, median, slow in (("First token", 76, 226), ("Queue time", 45, 174)):
        await expect(tile(page, name)).to_have_text(f"{median} ms")
        latest = page.locator(".tile", has_text=name)
        await expect(latest).to_contain_text(f"95th percentile {slow} ms")
    assert len(await page.locator(".chart path").all()) == 7
    drawn = await page.locator(".chart path").first.get_attribute("d")
    assert drawn is not None
    assert drawn.count("L") > 600, "an hour, a point each 5 s"
    await page.locator(".chart svg").first.hover(position={"x": 250, "y": 60})
    await expect(page.locator(".chart .tip").first).to_have_text(
        re.compile(r"waiting \d+running 8")
    )
    served = served_model_free(max_num_seqs=2, step_seconds=0.01)
    async with running_worker(redis_url, served) as worker:
        await expect(tile(page, "Running")).to_have_text("2")
        await expect(tile(page, "Waiting")).not_to_have_text("4")
        row = page.get_by_role("row", name=worker.worker_id)
        await expect(row).to_contain_text("2 of 2")
        await expect(row).to_contain_text("running")
        await expect(tile(page, "Tokens/s")).not_to_have_text("0")
        await client.enqueue("Once", delay_ms=60_000)
        await expect(page.get_by_text("and 1 delayed")).to_be_visible()
        for request_id in ids:
            await client.cancel(request_id)


async def test_long_times_and_lone_points_are_drawn_whole(connection: Any, open_page: Open) -> None:
    for minutes, ttft in ((50, 200), (20, 594_400)):
        at = int(time.time() * 1000) - minutes * 60_000
        sample = {"ttft_p50_ms": ttft, "waiting": 1}
        await connection.xadd(KEYS.statistics, sample, id=f"{at}-0")
    page = await open_page()
    counts = page.locator(".chart", has_text="Requests").locator(".grid text")
    await expect(counts).to_have_text(["0", "1"])
    chart = page.locator(".chart", has_text="Time to first token")
    labels = chart.locator(".grid text")
    await expect(labels).to_have_text(["0 ms", "5 min", "10 min"])
    lefts = "its => its.map(it => it.getBBox().x)"
    assert min(await labels.evaluate_all(lefts)) >= 0, "cut off at the left"
    drawn = await chart.locator("path").first.get_attribute("d")
    assert drawn is not None
    assert (drawn.count("M"), drawn.count("Z")) == (2, 2), "two circles, and no line between"


async def test_a_chart_spans_as_long_as_there_is_data(connection: Any, open_page: Open) -> None:
    """Five minutes at least, so that a new queue's lines are no dots at the right edge."""
    page = await open_page()
    times = page.locator(".chart").first.locator("text.axis")
    for minutes, labels in (
        (1, ["now", "-1 min", "-2 min", "-3 min", "-4 min"]),
        (12, ["now", "-5 min", "-10 min"]),
    ):
        await connection.delete(KEYS.statistics)
        at = int(time.time() * 1000) - minutes * 60_000
        await connection.xadd(KEYS.statistics, {"waiting": 1}, id=f"{at}-0")
        await page.reload()
        await expect(times).to_contain_text(labels)


async def test_a_worker_that_says_nothing_stands_out(connection: Any, open_page: Open) -> None:
    queue = AsyncRequestQueue(connection)
    for name, late_ms in (("alive", -60_000), ("silent", 7000)):
        await queue.run(heartbeat(WorkerStats(worker_id=name), 60_000))
        at = int(await connection.hget(KEYS.worker(name), "heartbeat_at"))
        await connection.hset(KEYS.worker(name), "heartbeat_at", at - late_ms)
    page = await open_page()
    row = page.get_by_role("row", name="silent")
    await expect(row.locator(".late")).to_have_text(re.compile(r"\d+\ss ago"))
    await expect(page.get_by_role("row", name="alive").locator(".late")).to_have_count(0)
    await page.evaluate("location.hash = '#/worker/silent'")
    await expect(page.locator(".title .late")).to_have_text(re.compile(r"\d+\ss ago"))


async def test_affinity_fits_into_the_row_of_tiles_and_each_worker_has_its_share(
    connection: Any, open_page: Open
) -> None:
    counts = {"affinity_held": 12, "affinity_missed": 3, "affinity_left": 2}
    stats = WorkerStats(worker_id="w", affinity_cached_tokens=45, **counts)
    await AsyncRequestQueue(connection).run(heartbeat(stats, 60_000))
    await connection.hset(KEYS.config, "affinity_ms", 5)
    page = await open_page()
    await expect(tile(page, "Affinity hits")).to_have_text("12")
    tops = "its => its.map(it => it.getBoundingClientRect().top)"
    assert len(set(await page.locator(".tile").evaluate_all(tops))) == 1
    await page.evaluate("location.hash = '#/worker/w'")
    await expect(page.get_by_text("12 hits, 3 misses, 2 waits, 45 tokens cached")).to_be_visible()


async def test_each_page_has_its_name(open_page: Open) -> None:
    page = await open_page("#/playground")
    here = page.locator("nav [aria-current=page]")
    await expect(here).to_have_text("Playground")
    assert await page.title() == "Playground – promptq"
    await page.get_by_role("link", name="Dead letters").click()
    await expect(here).to_have_text("Dead letters")
    assert await page.title() == "Dead letters – promptq"
    for nobody in ("", "100%"):  # no name at all, and what is no percent encoding
        await page.evaluate("it => location.hash = it", f"#/worker/{nobody}")
        await expect(page.get_by_text("This worker is not alive")).to_be_visible()
        await page.evaluate("location.hash = '#/dead'")
        await expect(page.get_by_text("There are no dead letters")).to_be_visible()


async def test_worker(redis_url: str, client: AsyncClient, open_page: Open) -> None:
    """A row a slot; requests of one prompt share its blocks; who is preempted has no slot."""
    served = served_model_free(max_num_seqs=2, step_seconds=0.01, block_size=4, num_blocks=2048)
    prompt = "a prompt of five blocks"
    async with running_worker(redis_url, served) as worker:
        ids = [
            await client.enqueue(prompt, max_tokens=3000, tenant="gold", request_id=f"r{n}")
            for n in range(2)
        ]
        page = await open_page(f"#/worker/{worker.worker_id}")
        rows = page.locator("tbody tr")
        await expect(rows).to_have_count(2)
        await expect(rows.nth(0)).to_contain_text("r0decode")
        await expect(rows.nth(0)).to_contain_text("5 shared")
        await expect(rows.nth(1)).to_contain_text("of 3,000")
        await expect(rows.nth(1)).to_contain_text("gold")
        await expect(page.get_by_text("Shared by several requests 5")).to_be_visible()
        legend = await page.locator(".legend").inner_text()
        told = re.findall(r"(\w[\w ,]*?) ([\d,]+) \(", legend)
        blocks = {name: int(num.replace(",", "")) for name, num in told}
        assert blocks["Used by one request"] > 0
        assert blocks["Free"] > 1000
        assert sum(blocks.values()) == 2048, legend
        await expect(tile(page, "Step time")).to_have_text(re.compile(r"^[1-9]\d+\sms$"))
        await expect(tile(page, "Recomputed")).to_have_text("0")
        await expect(tile(page, "Slots in use")).to_have_text("2")
        refused = page.get_by_text(
            "embed, pictures, prompt_logprobs, response_format, scores, tool_choice"
        )
        await expect(refused).to_be_visible()
        before = await rows.nth(0).locator(".words").inner_text()
        await expect(rows.nth(0).locator(".words")).not_to_have_text(before)
        urgent = await client.enqueue("me first", priority=-9, max_tokens=900, request_id="urgent")
        await expect(page.locator("tbody tr", has_text="preempted")).to_contain_text("–r1")
        await expect(tile(page, "Preemptions")).to_have_text("1")
        await page.get_by_role("link", name="urgent").click()
        await expect(page.get_by_role("heading", name="urgent")).to_be_visible()
        await page.go_back()
        await client.cancel(urgent)
        while worker.heartbeat.stats().recomputed_tokens == 0:  # if its last block was full
            await client.generate("me first", priority=-9, max_tokens=1)
        await expect(tile(page, "Recomputed")).not_to_have_text("0")
        for request_id in ids:
            await client.cancel(request_id)
        await expect(page.get_by_text("No request is in the batch.")).to_be_visible()
        await expect(tile(page, "Slots in use")).to_have_text("0")
    await expect(page.get_by_text("This worker is not alive")).to_be_visible()


async def test_requests_are_found_by_state_tenant_and_id(
    redis_url: str, client: AsyncClient, open_page: Open
) -> None:
    await client.enqueue_many(
        {"prompt": "x", "request_id": f"job-{n:03}", "tenant": "gold" if n % 2 else None}
        for n in range(120)
    )
    await client.cancel("job-007")
    page = await open_page("#/requests?state=waiting")
    rows, searched = page.locator("tbody tr"), page.locator(".searched")
    await expect(searched).to_have_text("Searched 1 to 50 of 119 waiting requests.")
    await page.get_by_role("button", name="Search further").click()
    await expect(searched).to_have_text("Searched 51 to 100 of 119 waiting requests.")
    await page.get_by_role("button", name="Search further").click()
    await expect(rows).to_have_count(119)
    await expect(page.get_by_role("button", name="Search further")).to_be_hidden()

    await page.get_by_label("Tenant").fill("gold")
    await page.get_by_role("button", name="Search").click()
    await expect(searched).to_have_text("Searched 1 to 50 of 59 waiting requests of tenant gold.")

    await page.get_by_label("Tenant").fill("")
    await page.get_by_label("State").select_option("any")
    await page.get_by_label("Id").fill("job-00")
    await page.get_by_label("Id").press("Enter")
    await expect(rows).to_have_count(10)
    await expect(searched).to_have_text(re.compile("Searched all .* keys of the server"))
    await page.get_by_label("Id").fill("")
    await page.get_by_label("State").select_option("cancelled")
    await page.get_by_role("button", name="Search").click()
    await expect(rows).to_have_count(1)
    await page.get_by_role("link", name="job-007").click()
    await expect(page.locator(".timeline li")).to_have_text(
        [re.compile("Enqueued"), re.compile("Finished cancelled")]
    )
    await expect(page.locator(".facts dt", has_text="Output")).to_be_visible()
    await expect(page.locator(".facts dt", has_text="Prompt")).to_have_count(0)  # never counted
    await page.evaluate("location.hash = '#/requests?prefix=no*one'")
    await expect(page.get_by_text("No request matches")).to_be_visible()


async def test_a_list_changes_with_the_queue(client: AsyncClient, open_page: Open) -> None:
    """Of what waits, of one tenant too; what was searched on stays."""
    page = await open_page("#/requests?state=waiting", expected="400")
    rows, searched = page.locator("tbody tr"), page.locator(".searched")
    await expect(page.get_by_text("No request matches.")).to_be_visible()
    await client.enqueue("x", request_id="first")
    await expect(rows).to_have_text([re.compile("first")])
    await client.enqueue_many(
        {"prompt": "x", "request_id": f"g{n:02}", "tenant": "gold"} for n in range(60)
    )
    await expect(searched).to_have_text("Searched 1 to 50 of 61 waiting requests.")
    await client.cancel("first")
    await expect(page.get_by_role("link", name="first")).to_be_hidden()
    await page.get_by_label("Tenant").fill("gold")
    await page.get_by_role("button", name="Search", exact=True).click()
    await expect(searched).to_have_text("Searched 1 to 50 of 60 waiting requests of tenant gold.")
    await client.cancel("g00")
    await expect(searched).to_have_text("Searched 1 to 50 of 59 waiting requests of tenant gold.")
    await page.get_by_role("button", name="Search further").click()
    await expect(rows).to_have_count(59)
    await client.cancel("g01")
    await page.wait_for_timeout(2500)
    await expect(rows).to_have_count(59)

    await page.evaluate("location.hash = '#/requests?state=waiting&tenant=no+one'")
    await expect(page.get_by_text("tenant: 'no one' is not 1 to 64")).to_be_visible()


async def test_dead_letters_come_and_go(
    redis_url: str, client: AsyncClient, open_page: Open
) -> None:
    page = await open_page("#/dead")
    await expect(page.get_by_text("There are no dead letters")).to_be_visible()
    bury(redis_url, "culprit")
    await expect(page.locator("article h2")).to_have_text(["culprit"])
    await client.purge(["culprit"])
    await expect(page.get_by_text("There are no dead letters")).to_be_visible()


async def test_a_requests_life_with_its_text_as_it_comes(
    redis_url: str, client: AsyncClient, connection: Any, open_page: Open
) -> None:
    """Given back by one worker, run by another, preempted there, resumed and finished."""
    slow = await client.enqueue("Once", priority=5, max_tokens=250, seed=3)
    queue = AsyncRequestQueue(connection, worker_id="first")
    (claim,) = await queue.take_batch(ONE)
    await queue.release([Held(claim.request_id, claim.fence)])
    page = await open_page(f"#/request/{slow}")
    life, text = page.locator(".timeline li"), page.locator(".tokens .text")
    await expect(life).to_have_text(
        [re.compile(it) for it in ("Enqueued", "Claimed.*attempt 1 on first", "Given back")]
    )
    waits = page.locator(".facts div", has_text="Has waited").locator("dd")
    before = await waits.inner_text()
    await expect(waits).not_to_have_text(before)
    served = served_model_free(max_num_seqs=1, step_seconds=0.01)
    async with running_worker(redis_url, served) as worker:
        await expect(text).to_have_text(re.compile(f"^{text_of(3, 250)[:20]}"))
        urgent = await client.enqueue("Now", priority=-5, max_tokens=90)
        await expect(life.last).to_have_text(re.compile("Preempted"))
        await client.cancel(urgent)
        await expect(text).to_have_text(text_of(3, 250), use_inner_text=False)
    names = ["Enqueued", "Claimed", "Given back", "Claimed", "Prefill begins", "First token"]
    await expect(life).to_have_text(
        [re.compile(it) for it in (*names, "Preempted", "Resumed", "Finished length")]
    )
    await expect(page.get_by_text(f"attempt 2 on {worker.worker_id}")).to_be_visible()
    await expect(page.locator(".facts")).to_contain_text("250 tokens")
    await page.reload()
    await expect(text).to_have_text(text_of(3, 250))


async def test_tokens_of_a_text_whose_log_is_gone_show_their_probabilities_one_by_one(
    redis_url: str, client: AsyncClient, connection: Any, open_page: Open
) -> None:
    """Though all come as one event."""
    await connection.hset(KEYS.config, "log_ttl_ms", 1)
    async with running_worker(redis_url):
        request_id = await client.enqueue("Once", max_tokens=40, seed=3, logprobs=1)
        await client.result(request_id)
    while await connection.exists(KEYS.tokens(request_id)):
        await asyncio.sleep(0.01)
    page = await open_page(f"#/request/{request_id}")
    tokens = page.locator(".tokens .token")
    await expect(tokens).to_have_count(40)
    letters = await tokens.evaluate_all("its => its.map(it => it.textContent)")
    assert letters == [*text_of(3, 40)]
    await tokens.nth(7).hover()
    letter = letters[7].replace(" ", "␣")
    await expect(page.locator(".tip caption")).to_have_text(
        f"{letter} id {ord(letters[7])}, rank 1"
    )


async def test_tokens_whose_texts_are_none_by_themselves_share_theirs(
    client: AsyncClient, connection: Any, open_page: Open
) -> None:
    """A space that was cut off, halves of a character, a stop string, an end token."""
    tokens = [" Once", " caf", "\ufffd", "\ufffd\ufffd", " a", "EN", "D", "</s>"]
    chosen = [
        TokenLogprob(token_id=nth, logprob=-0.1, rank=1, token=token)
        for nth, token in enumerate(tokens)
    ]
    await client.enqueue("x", request_id="r")
    queue = AsyncRequestQueue(connection)
    (claim,) = await queue.take_batch(ONE)
    event = TokenEvent(
        index=0, token_ids=[*range(len(tokens))], text="Once café a", logprobs=chosen, attempt=1,
        finish_reason=FinishReason.STOP,
    )  # fmt: skip
    await queue.publish([Row.of(claim.request_id, claim.fence, event)])
    page = await open_page("#/request/r")
    spans, captions = page.locator(".tokens .token"), page.locator(".tip caption")
    await expect(page.locator(".tokens .text")).to_have_text("Once café a")
    texts = await spans.evaluate_all("its => its.map(it => it.textContent)")
    assert texts == ["Once", " caf", "é", " a", ""]
    for nth, told in ((0, ["␣Once"]), (2, ["\ufffd", "\ufffd\ufffd"]), (3, ["␣a"])):
        await spans.nth(nth).hover()
        await expect(captions).to_have_text([re.compile(f"^{it} id") for it in told])


async def test_what_was_a_dead_letter_says_so(
    redis_url: str, client: AsyncClient, open_page: Open
) -> None:
    bury(redis_url, "poison")
    page = await open_page(f"#/request/{await client.requeue('poison')}")
    await page.locator(".facts div", has_text="Requeued from").get_by_role("link").click()
    await expect(page.get_by_role("heading", name="poison")).to_be_visible()


async def test_texts_are_never_taken_for_html(
    redis_url: str, client: AsyncClient, connection: Any, open_page: Open
) -> None:
    evil = "<script>document.title='taken'</script><img src=x onerror=\"document.title='taken'\">"
    await client.enqueue(evil, request_id="<b>evil</b>", metadata={evil: evil})
    queue = AsyncRequestQueue(connection, worker_id="<i>worker</i>")
    (claim,) = await queue.take_batch(ONE)
    event = TokenEvent(index=0, token_ids=[1], text=evil, attempt=1)
    await queue.publish([Row.of(claim.request_id, claim.fence, event)])
    page = await open_page("#/requests?state=active")
    await page.get_by_role("link", name="<b>evil</b>").click()
    await expect(page.locator(".tokens .text")).to_have_text(evil)
    await expect(page.locator(".payload")).to_contain_text(
        "<script>document.title='taken'</script>"
    )
    await expect(page.locator(".timeline")).to_contain_text("<i>worker</i>")
    end = TokenEvent(index=1, token_ids=[], text="", finish_reason=FinishReason.STOP, attempt=1)
    await queue.publish([Row.of(claim.request_id, claim.fence, end)])
    await expect(page.locator(".timeline")).to_contain_text("Finished")
    assert await page.locator("main script, main img, main b > i").count() == 0
    assert await page.title() == "<b>evil</b> – promptq"


async def test_nothing_is_read_for_a_page_that_nobody_looks_at(
    client: AsyncClient, connection: Any, open_page: Open
) -> None:
    page = await open_page()
    await expect(tile(page, "Waiting")).to_have_text("0")
    hide = """hidden => {
        Object.defineProperty(document, "hidden", { value: hidden, configurable: true });
        document.dispatchEvent(new Event("visibilitychange"));
    }"""
    await page.evaluate(hide, True)

    async def num_commands() -> int:
        await asyncio.sleep(1.5)  # the poller reads once a second
        return int((await connection.info("commandstats"))["cmdstat_zcard"]["calls"])

    before = await num_commands()
    await client.enqueue("Once")
    assert await num_commands() == before + 1  # the call itself counts the workers
    await page.evaluate(hide, False)
    await expect(tile(page, "Waiting")).to_have_text("1")


async def test_what_no_gateway_wrote_is_shown_as_far_as_it_goes(
    connection: Any, open_page: Open
) -> None:
    record = {"payload": "{", "state": "?", "priority": "high", "enqueued_at": "9" * 15}
    record["attempt"] = "9" * 18
    await connection.hset(KEYS.request("odd"), mapping=record)
    page = await open_page("#/requests?prefix=odd")
    await page.get_by_role("link", name="odd").click()
    await expect(page.locator(".timeline")).to_contain_text("Enqueued")
    await expect(page.locator(".facts div", has_text="Attempts")).to_contain_text("0")
    await expect(page.locator(".payload")).to_have_text("{")
    await expect(page.locator("#banner")).to_be_hidden()


async def test_an_unknown_request_is_said_to_be_so(open_page: Open) -> None:
    page = await open_page("#/request/nobody", expected="404")
    await expect(page.get_by_text("'nobody' is unknown")).to_be_visible()


async def test_of_many_dead_letters_the_latest_are_shown(connection: Any, open_page: Open) -> None:
    """And the page says that they are not all."""
    for n in range(101):
        await connection.hset(KEYS.request(f"d{n}"), mapping={"state": "dead", "payload": "{}"})
        await connection.zadd(KEYS.dead, {f"d{n}": n})
    page = await open_page("#/dead")
    letters = page.locator("article")
    await expect(page.get_by_text("The latest 100; there are more.")).to_be_visible()
    await expect(letters).to_have_count(100)
    await expect(letters.first.locator("h2")).to_have_text("d100")
    await page.get_by_role("button", name="Purge", exact=True).first.click()
    await page.get_by_role("dialog").get_by_role("button", name="Purge").click()
    await expect(page.get_by_text("there are more")).to_be_hidden()
    await expect(letters).to_have_count(100)
    await expect(letters.first.locator("h2")).to_have_text("d99")


async def test_a_server_that_goes_away_and_comes_back(open_page: Open) -> None:
    """The page says so and goes on by itself."""
    with EmbeddedServer() as server:
        url = server.url
        async with serving(url) as gateway:
            page = await open_page("#/", expected="503|net::ERR", url=gateway.url)
            await expect(tile(page, "Waiting")).to_have_text("0")
            server.stop()
            await expect(page.get_by_text("cannot be reached at the moment")).to_be_visible()
            await expect(page.locator(".title .badge")).to_be_hidden()
            await page.get_by_role("link", name="Playground").click()
            await expect(page.get_by_text("Trying again.")).to_be_visible()
            assert await page.locator("main > *").count() == 0, "the page before is not true"
            await page.get_by_role("link", name="Overview").click()
            with EmbeddedServer(server.port, password=server.password):
                async with AsyncClient(url) as client:
                    await client.enqueue("Once")
                await expect(tile(page, "Waiting")).to_have_text("1")
                await expect(page.locator("#banner")).to_be_hidden()

"""API keys as accounts: tenants of their own, charged what they cause, kept to their calls."""

from __future__ import annotations

import asyncio
import io
import json
import os
import re
import select
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx2
import openai
import pytest
import redis
import redis.asyncio

from promptq import Client
from promptq.producer.admin.api_keys import SCOPES, ApiKey, hash_of
from promptq.producer.batch_store.batch_records import Batches, TooManyBatchesError, new_batch
from promptq.producer.batch_store.file_quotas import FileQuotas
from promptq.producer.batch_store.files import FileStore
from promptq.producer.gateway.context import key_uses, refusals
from promptq.shared.errors import ConfigurationError
from promptq.shared.protocol.keys import Keys
from promptq.shared.protocol.request import FinishReason, NewRequest, Request, TokenAccount
from promptq.shared.protocol.rows import RowStatus
from promptq.shared.queue.rate_limits import Rate, take_of_rates
from promptq.shared.queue.request_queue import AsyncRequestQueue, RequestQueue
from tests.producer.gateway.living import LiveGateway, live_gateway
from tests.producer.playing import PROMPTQ, HandWorker
from tests.requests import ROOM, held, row
from tests.roles import QueueClient, as_role

IN_DEBT = r"has used more than its 200 tokens a minute; try again in [345] min"
KEYS = Keys()
RATE = f"{KEYS.prefix}rate:web"
MINUTE_MS = 60_000


@pytest.fixture
def start(redis_url: str, tmp_path: Path) -> Iterator[Callable[..., LiveGateway]]:
    """Starts gateways that share a folder for files."""
    with ExitStack() as stack:
        yield lambda **settings: stack.enter_context(
            live_gateway(redis_url, files_dir=tmp_path / "files", **settings)
        )


@pytest.fixture
def make_key(redis_url: str) -> Iterator[Callable[..., str]]:
    """Makes keys, and gives their secrets."""
    with Client(redis_url) as client:
        yield lambda name, **fields: client.create_api_key(ApiKey.build(name=name, **fields))[0]


@pytest.fixture
def everything(redis_url: str) -> Iterator[redis.Redis]:
    """The server's default user, who may do anything."""
    with redis.Redis.from_url(as_role("", redis_url)) as client:
        yield client


def bearer(secret: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {secret}"}


def upload(
    gateway: LiveGateway, secret: str, content: bytes = b"{}\n", purpose: str = "batch"
) -> httpx2.Response:
    files = {"file": ("in.jsonl", content)}
    return httpx2.post(
        f"{gateway.base_url}/files", files=files, data={"purpose": purpose}, headers=bearer(secret)
    )


def error_of(answer: httpx2.Response) -> tuple[int, str]:
    return answer.status_code, answer.json()["error"]["code"]


# Output is charged as it comes.


def put(queue: RequestQueue, request_id: str, account: TokenAccount | None) -> None:
    request = Request.build({"prompt": "hello"})
    queue.enqueue([NewRequest(request_id, request, account=account)])


def charged(client: Any, began_ms: int, key: str = RATE) -> float:
    """Tokens that an account of one token a minute was charged since."""
    return int((float(client.hget(key, "tokens") or began_ms) - began_ms) / MINUTE_MS)


def server_ms(client: Any) -> int:
    seconds, microseconds = client.time()
    return int(seconds) * 1000 + int(microseconds) // 1000


@pytest.fixture
def connection(server: Any) -> Iterator[Any]:
    with closing(server.connect()) as connection:
        yield connection


def test_only_what_the_log_takes_is_charged_and_once(connection: Any) -> None:
    """Not what is repeated, comes too early or from an attempt that lost the request."""
    queue, began = RequestQueue(connection, lease_ms=1), server_ms(connection)
    put(queue, "a", TokenAccount("web", 1))
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
    put(queue, "a", TokenAccount("web", 1))
    (claim,) = queue.take_batch(ROOM)
    queue.publish([row(claim, n) for n in range(5)])
    assert queue.run(take_of_rates("web", [Rate("requests", 1, 60)])).wait_ms == 0
    assert connection.pttl(RATE) > 4 * MINUTE_MS
    answer = queue.run(take_of_rates("web", [Rate("tokens", 1, 1), Rate("requests", 1, 60)]))
    assert answer.wait_ms is not None
    assert 4 * MINUTE_MS < answer.wait_ms <= 5 * MINUTE_MS
    assert answer.remaining["tokens"] == 0


def test_each_pays_for_its_own_in_one_step(connection: Any) -> None:
    """What is cancelled is not charged, what has no account costs nobody."""
    queue, began = RequestQueue(connection), server_ms(connection)
    for name, holder in (("a", "web"), ("b", "web"), ("c", "web:batches"), ("d", None), ("e", "e")):
        put(queue, name, TokenAccount(holder, 1) if holder else None)
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
    put(queue, "a", None)
    put(queue, "b", TokenAccount("web", 1))
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
    put(queue, "a", TokenAccount("web", 1))
    (claim,) = queue.take_batch(ROOM)
    assert queue.publish([row(claim, 0)], [held(claim)]).rows == [RowStatus.OK]
    last = row(claim, 1, reason=FinishReason.STOP)
    assert queue.publish([last]).rows == [RowStatus.OK]
    if spoilt != "another type":
        connection.hset(RATE, "tokens", spoilt)
        queue.run(take_of_rates("web", [Rate("tokens", 1, 1)]))


def test_a_dead_letter_that_runs_again_is_charged_again(connection: Any) -> None:
    queue = RequestQueue(connection, lease_ms=1, max_crashes=1)
    put(queue, "a", TokenAccount("web", 1))
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
        while not worker.queue.count():
            time.sleep(0.002)
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


# Keys without a tenant are each their own.


def test_keys_without_a_tenant_do_not_see_each_other(
    start: Callable[..., LiveGateway], make_key: Callable[..., str], redis_url: str
) -> None:
    """Neither files, batches nor streams."""
    gateway = start(http_header_seconds=0)
    secrets = [make_key("one"), make_key("two"), old_key(redis_url, "old")]
    options: dict[str, Any] = {"base_url": gateway.base_url, "max_retries": 0}
    with ExitStack() as stack:
        clients = [
            stack.enter_context(openai.OpenAI(api_key=secret, **options)) for secret in secrets
        ]
        for mine, (client, secret) in enumerate(zip(clients, secrets, strict=True)):
            file = client.files.create(file=("in.jsonl", b"{}\n"), purpose="batch")
            batch = client.batches.create(
                input_file_id=file.id, endpoint="/v1/completions", completion_window="24h"
            )
            stream = detached_stream(gateway, secret)
            for other in clients[:mine] + clients[mine + 1 :]:
                assert file.id not in [it.id for it in other.files.list()]
                assert batch.id not in [it.id for it in other.batches.list()]
                for call in (other.files.retrieve, other.files.content, other.files.delete):
                    with pytest.raises(openai.NotFoundError):
                        call(file.id)
                for call in (other.batches.retrieve, other.batches.cancel):
                    with pytest.raises(openai.NotFoundError):
                        call(batch.id)
                with pytest.raises(openai.BadRequestError, match="no file"):
                    other.batches.create(
                        input_file_id=file.id, endpoint="/v1/completions", completion_window="24h"
                    )
                gone = httpx2.delete(stream, headers=bearer(other.api_key))
                assert gone.status_code == 404
            assert [it.id for it in client.files.list()] == [file.id]
            assert [it.id for it in client.batches.list()] == [batch.id]
            assert httpx2.delete(stream, headers=bearer(secret)).status_code == 200


def old_key(redis_url: str, name: str, **fields: Any) -> str:
    """As release 0.2 made them."""
    secret = f"pq-{name}"
    with redis.Redis.from_url(redis_url) as connection:
        value = {"name": name, "tenant": None, "created_at": 1, "hint": "x", **fields}
        connection.hset(KEYS.api_keys, hash_of(secret), json.dumps(value))
    return secret


def detached_stream(gateway: LiveGateway, secret: str) -> str:
    """The address of the stream of a completion that nobody reads."""
    body = {"prompt": "Once", "stream": True, "detach": True}
    with (
        httpx2.Client(base_url=gateway.url, headers=bearer(secret), timeout=30) as http,
        http.stream("POST", "/v1/completions", json=body) as answer,
    ):
        return gateway.url + answer.headers["x-stream-url"]


def test_requests_of_a_key_without_a_tenant_are_its_own_tenants(
    start: Callable[..., LiveGateway], make_key: Callable[..., str], everything: redis.Redis
) -> None:
    gateway = start(http_header_seconds=0)
    detached_stream(gateway, make_key("web"))
    assert everything.zcard(KEYS.pending_of("web")) == 1
    assert everything.zcard(KEYS.pending) == 0
    refused = httpx2.post(
        f"{gateway.base_url}/completions",
        json={"prompt": "Once", "tenant": "else"},
        headers=bearer(make_key("two")),
    )
    assert error_of(refused) == (403, "tenant")


def test_an_administrator_of_no_tenant_reaches_what_is_nobodys(
    start: Callable[..., LiveGateway], make_key: Callable[..., str], tmp_path: Path
) -> None:
    """What was made before there were keys is not lost; and nobody else reaches it."""
    gateway = start()
    options: dict[str, Any] = {"base_url": gateway.base_url, "max_retries": 0}
    whole: dict[str, Any] = {"endpoint": "/v1/completions", "completion_window": "24h"}
    with openai.OpenAI(api_key="none", **options) as local:
        file = local.files.create(file=("in.jsonl", b"{}\n"), purpose="batch")
        batch = local.batches.create(input_file_id=file.id, **whole)
    for name, fields in (
        ("plain", {}), ("shop-admin", {"is_admin": True, "tenant": "shop"}),
    ):  # fmt: skip
        with openai.OpenAI(api_key=make_key(name, **fields), **options) as other:
            assert [*other.files.list(), *other.batches.list()] == []
            with pytest.raises(openai.NotFoundError):
                other.files.content(file.id)
            with pytest.raises(openai.NotFoundError):
                other.batches.cancel(batch.id)
    with openai.OpenAI(api_key=make_key("operator", is_admin=True), **options) as operator:
        own = operator.files.create(file=("own.jsonl", b"[]\n"), purpose="batch")
        again = operator.batches.create(input_file_id=file.id, **whole)
        assert [it.id for it in operator.files.list()] == [own.id, file.id]
        assert [it.id for it in operator.batches.list()] == [again.id, batch.id]
        assert operator.files.content(file.id).content == b"{}\n"
        assert operator.batches.cancel(batch.id).status == "cancelling"
        operator.files.delete(file.id)
    assert [it.tenant for it in FileStore(tmp_path / "files").page("operator")[0]] == ["operator"]


def test_a_name_that_would_let_keys_see_each_other_is_refused(
    make_key: Callable[..., str], redis_url: str
) -> None:
    make_key("web")
    old_key(redis_url, "old")
    make_key("shop-1", tenant="shop")
    make_key("shop-2", tenant="shop")  # keys of one tenant share on purpose
    for name in ("web", "old"):
        with pytest.raises(
            ConfigurationError, match=rf"tenant: '{name}' is the key '{name}' alone"
        ):
            make_key("late", tenant=name)
    with pytest.raises(ConfigurationError, match="name: 'shop' is the tenant of the key 'shop-1'"):
        make_key("shop")
    make_key("shop", tenant="shop")


# Uploads.


@contextmanager
def begun_upload(
    gateway: LiveGateway, secret: str, size: int | None, *, is_let_in: bool = True
) -> Iterator[socket.socket]:
    """An upload whose body is about to be read; without a size it comes in chunks."""
    parts = urlsplit(gateway.url)
    with socket.create_connection((parts.hostname, parts.port or 0)) as connection:
        length = "Transfer-Encoding: chunked" if size is None else f"Content-Length: {size}"
        connection.sendall(
            f"POST /v1/files HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {secret}\r\n"
            "Content-Type: multipart/form-data; boundary=B\r\nExpect: 100-continue\r\n"
            f"{length}\r\n\r\n".encode()
        )
        if is_let_in:
            assert connection.recv(1 << 16).startswith(b"HTTP/1.1 100")
        yield connection


def form_of(content: bytes) -> bytes:
    return (
        b'--B\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--B\r\n'
        b'Content-Disposition: form-data; name="file"; filename="f"\r\n\r\n'
        + content
        + b"\r\n--B--\r\n"
    )


def answer_on(connection: socket.socket) -> str:
    """Up to the end of the answer's JSON."""
    text = ""
    while not text.rstrip().endswith("}"):
        piece = connection.recv(1 << 16).decode()
        assert piece, f"closed after {text!r}"
        text += piece
    return text


def test_an_upload_takes_of_the_rate_before_its_body_is_read(
    start: Callable[..., LiveGateway], make_key: Callable[..., str]
) -> None:
    gateway = start()
    secret = make_key("web", requests_per_minute=2)
    first = upload(gateway, secret)
    assert (first.status_code, first.headers["x-ratelimit-remaining-requests"]) == (200, "1")
    assert upload(gateway, secret).status_code == 200
    with begun_upload(gateway, secret, 100_000_000, is_let_in=False) as connection:
        answer = answer_on(connection)
    assert answer.startswith("HTTP/1.1 429")
    assert "rate_limit_exceeded" in answer
    assert "retry-after: " in answer


def test_who_asks_again_before_it_may_is_refused_late(
    start: Callable[..., LiveGateway],
    make_key: Callable[..., str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(refusals, "_MOST_SECONDS", 3.0)
    gateway = start()
    secret, other = make_key("web", requests_per_minute=1), make_key("other", requests_per_minute=9)
    parts = urlsplit(gateway.url)
    with (
        httpx2.Client(base_url=gateway.url, headers=bearer(secret), timeout=60) as http,
        socket.create_connection((parts.hostname, parts.port)) as again,
    ):
        assert http.post("/v1/completions", json={}).status_code == 400
        refused = http.post("/v1/completions", json={})
        assert refused.status_code == 429
        again.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\n"
            b"Authorization: Bearer %b\r\n\r\n{}" % secret.encode()
        )
        assert http.post("/v1/completions", json={}, headers=bearer(other)).status_code == 400
        assert not select.select([again], [], [], 0)[0], "it was refused at once"
        answer = answer_on(again)
    assert answer.startswith("HTTP/1.1 429")
    told = re.search(r"retry-after-ms: (\d+)", answer)
    assert told
    assert 0 < int(told[1]) <= int(refused.headers["retry-after-ms"]) - 3000


def test_a_tenant_has_so_many_files(
    start: Callable[..., LiveGateway], make_key: Callable[..., str]
) -> None:
    """Whichever of its keys brings them, at whichever gateway; others are not concerned."""
    gateways = [start(files_per_tenant=3) for _ in range(2)]
    shop = [make_key(f"shop-{n}", tenant="shop") for n in range(2)]
    kept = [upload(gateways[n % 2], shop[n % 2]) for n in range(3)]
    assert {it.status_code for it in kept} == {200}
    for gateway in gateways:
        refused = upload(gateway, shop[0])
        assert error_of(refused) == (413, "file_quota_exceeded")
        message = refused.json()["error"]["message"]
        assert "'shop' has 3 files" in message
        assert "may have 3" in message
    assert upload(gateways[0], make_key("other")).status_code == 200
    address = f"{gateways[0].base_url}/files/{kept[0].json()['id']}"
    assert httpx2.delete(address, headers=bearer(shop[1])).status_code == 200
    assert upload(gateways[1], shop[0]).status_code == 200


def test_a_tenants_files_have_so_many_bytes(
    start: Callable[..., LiveGateway], make_key: Callable[..., str], tmp_path: Path
) -> None:
    """Answers of batches count too, so a batch needs room for some."""
    gateway = start(files_bytes_per_tenant=300_000)
    secret = make_key("web")
    first = upload(gateway, secret, b"x" * 200_000)
    assert first.status_code == 200
    refused = upload(gateway, secret, b"x" * 100_001)
    assert error_of(refused) == (413, "file_quota_exceeded")
    assert "200000 bytes" in refused.json()["error"]["message"]
    assert upload(gateway, secret, b"x" * 50_000).status_code == 200
    body = {"input_file_id": first.json()["id"], "endpoint": "/v1/completions"}
    body["completion_window"] = "24h"

    def ask() -> httpx2.Response:
        return httpx2.post(f"{gateway.base_url}/batches", json=body, headers=bearer(secret))

    assert ask().status_code == 200
    answers = tmp_path / "answers"
    answers.write_bytes(b"x" * 50_000)
    output = FileStore(tmp_path / "files").add(
        answers, filename="out", purpose="batch_output", tenant="web"
    )
    assert error_of(upload(gateway, secret, b"x")) == (413, "file_quota_exceeded")
    assert error_of(ask()) == (413, "file_quota_exceeded")
    FileStore(tmp_path / "files").delete(output.id, "web")
    assert ask().status_code == 200
    left = {it.suffix for it in (tmp_path / "files").iterdir()}
    assert left == {".data", ".json", ".lock"}
    assert len(list((tmp_path / "files").glob("*.data"))) == 2, "nothing of what was refused"


def test_an_expired_file_counts_until_it_is_deleted(
    start: Callable[..., LiveGateway], make_key: Callable[..., str], tmp_path: Path
) -> None:
    gateway, store, secret = start(files_per_tenant=1), FileStore(tmp_path / "files"), make_key("a")
    store.add(io.BytesIO(b"x"), filename="x", purpose="batch", tenant="a", ttl_seconds=-10)
    listed = httpx2.get(f"{gateway.base_url}/files", headers=bearer(secret))
    assert listed.json()["data"] == []
    assert error_of(upload(gateway, secret)) == (413, "file_quota_exceeded")
    assert store.sweep() == 1
    assert upload(gateway, secret).status_code == 200


def test_what_is_known_of_a_file_is_read_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By whoever lists or counts, so that nobody pays for the files of others at each call."""
    quotas = FileQuotas(FileStore(tmp_path), 0, 0)
    for tenant in "aab":
        quotas.store.add(io.BytesIO(b"x"), filename="x", purpose="batch", tenant=tenant)
    assert quotas.kept("a") == (2, 2)
    first, second = quotas.store.page("a", order="asc")[0]

    def no_reading(path: Path) -> bytes:
        raise AssertionError(f"{path} is read again")

    monkeypatch.setattr(Path, "read_bytes", no_reading)
    assert quotas.kept("b") == (1, 1)
    assert quotas.store.page("a", limit=1) == ([second], True)
    assert quotas.store.page("a", limit=1, after=second.id) == ([first], False)
    assert quotas.store.page("a", purpose="other") == ([], False)


def test_a_new_batch_takes_of_the_rate(
    start: Callable[..., LiveGateway], make_key: Callable[..., str]
) -> None:
    gateway, secret = start(), make_key("web", requests_per_minute=2)
    file_id = upload(gateway, secret).json()["id"]
    assert new_batch_of(gateway, secret, file_id).headers["x-ratelimit-remaining-requests"] == "0"
    refused = new_batch_of(gateway, secret, file_id)
    assert error_of(refused) == (429, "rate_limit_exceeded")


def test_a_tenant_has_so_many_unfinished_batches(
    start: Callable[..., LiveGateway], make_key: Callable[..., str], everything: redis.Redis
) -> None:
    """Also where all come at once, at two gateways; others are not concerned."""
    gateways, secret = [start(batches_per_tenant=3) for _ in range(2)], make_key("web")
    file_id = upload(gateways[0], secret).json()["id"]

    def ask(number: int) -> httpx2.Response:
        return new_batch_of(gateways[number % 2], secret, file_id)

    with ThreadPoolExecutor(12) as threads:
        answers = list(threads.map(ask, range(12)))
    made = [it.json()["id"] for it in answers if it.status_code == 200]
    refused = [it for it in answers if it.status_code != 200]
    assert len(made) == 3
    assert {error_of(it) for it in refused} == {(429, "too_many_batches")}
    listed = httpx2.get(f"{gateways[0].base_url}/batches", headers=bearer(secret)).json()["data"]
    assert {it["id"] for it in listed} == set(made), "nothing is left of those refused"
    assert everything.scard(KEYS.unfinished_batches) == len(made)
    assert error_of(ask(0)) == (429, "too_many_batches")
    other = make_key("other")
    file_of_other = upload(gateways[0], other).json()["id"]
    assert new_batch_of(gateways[0], other, file_of_other).status_code == 200
    everything.srem(KEYS.unfinished_batches, made[0])  # as at its end
    assert ask(0).status_code == 200


async def test_batches_that_all_looked_before_any_was_added(redis_url: str) -> None:
    """What each gateway saw does not count, but how many there are then."""
    looked = asyncio.Barrier(12)

    class Together(redis.asyncio.Redis):
        async def execute_command(self, *args: Any, **options: Any) -> Any:
            answer = await super().execute_command(*args, **options)
            if args[0] == "ZINTERCARD":
                await looked.wait()
            return answer

    async with Together.from_url(as_role("gateway", redis_url)) as connection:
        batches = Batches(AsyncRequestQueue(connection))
        asked = [new_batch("/v1/completions", "file-1", ApiKey(name="web")) for _ in range(12)]
        answers = await asyncio.gather(
            *(batches.add(it, 3) for it in asked), return_exceptions=True
        )
        left, _ = await batches.page(("",), 100, None)
    assert sum(isinstance(it, TooManyBatchesError) for it in answers) == 9
    assert len(left) == 3


def new_batch_of(gateway: LiveGateway, secret: str, file_id: str) -> httpx2.Response:
    body = {"input_file_id": file_id, "endpoint": "/v1/completions", "completion_window": "24h"}
    return httpx2.post(f"{gateway.base_url}/batches", json=body, headers=bearer(secret))


def test_what_is_being_uploaded_counts(
    start: Callable[..., LiveGateway], make_key: Callable[..., str]
) -> None:
    """Two that are too much together: the second is refused while the first is on its way."""
    gateway = start(files_bytes_per_tenant=1_000_000)
    secret, form = make_key("web"), form_of(b"x" * 900_000)
    with begun_upload(gateway, secret, len(form)) as connection:
        assert error_of(upload(gateway, secret, b"x" * 700_000)) == (413, "file_quota_exceeded")
        assert upload(gateway, make_key("other"), b"x" * 700_000).status_code == 200
        connection.sendall(form)
        assert answer_on(connection).startswith("HTTP/1.1 200")
    assert error_of(upload(gateway, secret, b"x" * 700_000)) == (413, "file_quota_exceeded")


def test_an_upload_that_does_not_say_its_size_ends_at_the_quota(
    start: Callable[..., LiveGateway], make_key: Callable[..., str]
) -> None:
    """Before it ends by itself; and what was counted for it is free again."""
    gateway = start(files_bytes_per_tenant=1_000_000)
    secret, form = make_key("web"), form_of(b"x" * 2_000_000)
    with begun_upload(gateway, secret, None) as connection:
        connection.sendall(b"%x\r\n%b\r\n" % (1_200_000, form[:1_200_000]))
        answer = answer_on(connection)
    assert answer.startswith("HTTP/1.1 413")
    assert "file_quota_exceeded" in answer
    assert upload(gateway, secret, b"x" * 1_000_000).status_code == 200


def test_uploads_at_two_gateways_at_once_keep_to_the_quota(
    start: Callable[..., LiveGateway], make_key: Callable[..., str]
) -> None:
    """Neither knows of the other's before it is there; then one of them is refused."""
    gateways = [start(files_bytes_per_tenant=1_000_000) for _ in range(2)]
    secret, form = make_key("web"), form_of(b"x" * 900_000)
    with ExitStack() as stack:
        connections = [stack.enter_context(begun_upload(it, secret, len(form))) for it in gateways]
        for connection in connections:
            connection.sendall(form[:-1])
        for connection in connections:
            connection.sendall(form[-1:])
        answers = sorted(answer_on(it) for it in connections)
    assert [it[:12] for it in answers] == ["HTTP/1.1 200", "HTTP/1.1 413"]
    assert "file_quota_exceeded" in answers[1]


# Scopes, expiry, last use.

CALLS = {
    "completions": [
        ("POST", "/v1/completions"), ("POST", "/v1/chat/completions"),
        ("GET", "/v1/streams/x"), ("DELETE", "/v1/streams/x"),
    ],
    "files": [
        ("POST", "/v1/files"), ("GET", "/v1/files"), ("GET", "/v1/files/x"),
        ("GET", "/v1/files/x/content"), ("DELETE", "/v1/files/x"),
    ],
    "batches": [
        ("POST", "/v1/batches"), ("GET", "/v1/batches"), ("GET", "/v1/batches/x"),
        ("POST", "/v1/batches/x/cancel"),
    ],
    "models": [("GET", "/v1/models"), ("GET", "/v1/models/x")],
}  # fmt: skip


def test_a_key_calls_what_its_scopes_say(
    start: Callable[..., LiveGateway], make_key: Callable[..., str]
) -> None:
    gateway = start()
    assert set(CALLS) == set(SCOPES)
    with httpx2.Client(base_url=gateway.url, timeout=30) as http:
        routes = http.get("/openapi.json").json()["paths"]
        listed = {(method.upper(), path) for path in routes for method in routes[path]}
        tried = {(way, re.sub("/x", "/{", path)) for calls in CALLS.values() for way, path in calls}
        api = {(way, re.sub(r"\{\w+\}", "{", it)) for way, it in listed if it.startswith("/v1/")}
        assert api == tried, "each call of the API needs a scope"
        keys = {scope: make_key(f"only-{scope}", scopes=[scope]) for scope in SCOPES}
        admin = make_key("admin", scopes=["models"], is_admin=True)
        for scope, other in zip(SCOPES, (*SCOPES[1:], SCOPES[0]), strict=True):
            for way, path in CALLS[scope]:
                body = {} if way == "POST" else None
                answer = http.request(way, path, json=body, headers=bearer(keys[scope]))
                assert answer.status_code not in (401, 403), (way, path)
                answer = http.request(way, path, json=body, headers=bearer(keys[other]))
                assert error_of(answer) == (403, "scope"), (way, path)
                assert f"needs the scope {scope!r}" in answer.json()["error"]["message"]
        assert http.get("/dashboard/api/caller", headers=bearer(keys["models"])).status_code == 403
        assert http.get("/dashboard/api/caller", headers=bearer(admin)).status_code == 200
        played = http.post("/dashboard/api/play", json={"prompt": "x"}, headers=bearer(admin))
        assert error_of(played) == (403, "scope")


def test_nobody_gets_in_with_a_key_that_has_expired(
    start: Callable[..., LiveGateway], make_key: Callable[..., str]
) -> None:
    """Nor without one, where it was the only key."""
    gateway = start()
    late = make_key("late", expires_at=int(time.time() * 1000) - 1)
    answer = httpx2.get(f"{gateway.base_url}/models", headers=bearer(late))
    assert error_of(answer) == (401, "invalid_api_key")
    assert "'late' has expired" in answer.json()["error"]["message"]
    assert httpx2.get(f"{gateway.base_url}/models").status_code == 401
    valid = make_key("valid", expires_at=int(time.time() * 1000) + 3_600_000)
    answer = httpx2.get(f"{gateway.base_url}/models", headers=bearer(valid))
    assert answer.status_code == 200


def test_when_a_key_was_last_used(
    start: Callable[..., LiveGateway],
    make_key: Callable[..., str],
    redis_url: str,
    everything: redis.Redis,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Written apart from the key, by each gateway once a minute; gone with the key."""
    gateway = start()
    secret = make_key("web")
    make_key("idle")

    def use() -> int:
        assert httpx2.get(f"{gateway.base_url}/models", headers=bearer(secret)).status_code == 200
        with Client(redis_url) as client:
            used = {key.name: key.last_used_at for key in client.api_keys()}
        assert used["idle"] == 0
        return used["web"]

    began = int(time.time() * 1000)
    assert httpx2.get(f"{gateway.base_url}/models", headers=bearer("pq-x")).status_code == 401
    first = use()
    assert began <= first <= time.time() * 1000
    assert use() == first, "not again within the minute"
    monkeypatch.setattr(key_uses, "_EVERY_SECONDS", 0.0)
    assert use() > first
    assert set(everything.hkeys(KEYS.api_keys_used)) == {hash_of(secret).encode()}
    with Client(redis_url) as client:
        client.revoke_api_key("web")
    assert not everything.exists(KEYS.api_keys_used)


def test_the_commands(redis_url: str) -> None:
    def run(*args: str) -> subprocess.CompletedProcess[str]:
        env = {**os.environ, "PROMPTQ_REDIS_URL": redis_url, "COLUMNS": "80"}
        return subprocess.run([*PROMPTQ, "keys", *args], capture_output=True, text=True, env=env)

    made = run("create", "nightly", "--scope", "files", "--scope", "batches", "--expires-in", "30d")
    assert made.returncode == 0, made.stderr
    shown = run("list").stdout
    assert re.search("tenant .*may call .*expires .*last used", shown)
    assert re.search(r"nightly .*nightly \(its own\) .*files batches .*never", shown)
    with Client(redis_url) as client:
        (key,) = client.api_keys()
    assert key.scopes == ("files", "batches")
    month_ms = 30 * 86_400_000
    assert abs(key.expires_at - key.created_at - month_ms) < 3_600_000
    for args, error in (
        (
            ["x", "--scope", "admin"],
            "scope: 'admin' is none of completions, files, batches, models",
        ),
        (["x", "--expires-in", "0d"], "expires-in: '0d' is not more than 0"),
        (["x", "--expires-in", "soon"], "expires-in: 'soon' is not a number of"),
        (["x", "--expires-at", "2001-02-03"], "expires-at: '2001-02-03' is over already"),
        (["x", "--tenant", "nightly"], "tenant: 'nightly' is the key 'nightly' alone"),
    ):
        refused = run("create", *args)
        assert refused.returncode == 1
        assert refused.stderr.startswith(f"promptq: {error}"), refused.stderr

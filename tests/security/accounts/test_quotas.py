"""Uploads and batches take of the rate; a tenant has so many files, bytes and batches."""

from __future__ import annotations

import asyncio
import io
import re
import select
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import httpx2
import pytest
import redis
import redis.asyncio

from promptq.producer.admin.api_keys import ApiKey
from promptq.producer.batch_store.batch_records import Batches, TooManyBatchesError, new_batch
from promptq.producer.batch_store.file_quotas import FileQuotas
from promptq.producer.batch_store.files import FileStore
from promptq.producer.http import state
from promptq.shared.queue.request_queue import AsyncRequestQueue
from tests.producer.gateway.living import LiveGateway, bearer, error_of
from tests.producer.playing import KEYS
from tests.support.roles import as_role
from tests.support.waiting import until


def upload(
    gateway: LiveGateway, secret: str, content: bytes = b"{}\n", purpose: str = "batch"
) -> httpx2.Response:
    files = {"file": ("in.jsonl", content)}
    return httpx2.post(
        f"{gateway.base_url}/files",
        files=files,
        data={"purpose": purpose},
        headers=bearer(secret),
        timeout=None,
    )


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
    delays: list[float] = []
    may_answer = threading.Event()

    async def delay(seconds: float) -> None:
        delays.append(seconds)
        while not may_answer.is_set():
            await asyncio.sleep(0.01)

    monkeypatch.setattr(state, "_MOST_SECONDS", 3.0)
    monkeypatch.setattr(state, "asyncio", SimpleNamespace(**{**vars(asyncio), "sleep": delay}))
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
        until(lambda: delays or select.select([again], [], [], 0)[0])
        assert http.post("/v1/completions", json={}, headers=bearer(other)).status_code == 400
        assert not select.select([again], [], [], 0)[0], "it was refused at once"
        may_answer.set()
        answer = answer_on(again)
    assert delays == [3.0]
    assert answer.startswith("HTTP/1.1 429")
    told = re.search(r"retry-after-ms: (\d+)", answer)
    assert told
    assert 0 < int(told[1]) <= int(refused.headers["retry-after-ms"]) - 3000


def test_the_number_of_a_tenants_files_is_limited(
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
    assert httpx2.delete(address, headers=bearer(shop[1]), timeout=None).status_code == 200
    assert upload(gateways[1], shop[0]).status_code == 200


def test_the_bytes_of_a_tenants_files_are_limited(
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
        return httpx2.post(
            f"{gateway.base_url}/batches", json=body, headers=bearer(secret), timeout=None
        )

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
    listed = httpx2.get(f"{gateway.base_url}/files", headers=bearer(secret), timeout=None)
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


def test_the_number_of_a_tenants_unfinished_batches_is_limited(
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
    listed = httpx2.get(
        f"{gateways[0].base_url}/batches", headers=bearer(secret), timeout=None
    ).json()["data"]
    assert {it["id"] for it in listed} == set(made), "nothing is left of those refused"
    assert everything.scard(KEYS.unfinished_batches) == len(made)
    assert error_of(ask(0)) == (429, "too_many_batches")
    other = make_key("other")
    file_of_other = upload(gateways[0], other).json()["id"]
    assert new_batch_of(gateways[0], other, file_of_other).status_code == 200
    everything.srem(KEYS.unfinished_batches, made[0])  # as at its end
    assert ask(0).status_code == 200


async def test_batches_that_all_looked_before_any_was_added(redis_url: str) -> None:
    """The limit applies to the number when a batch is added, not to the number that its gateway saw
    before.
    """
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
    return httpx2.post(
        f"{gateway.base_url}/batches", json=body, headers=bearer(secret), timeout=None
    )


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

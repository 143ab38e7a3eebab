"""Odd input of each kind gets an error that says what is wrong, never 500, and leaves nothing."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import httpx2
import pytest

from promptq.shared.errors import InvalidRequestError
from promptq.shared.protocol.request import Request
from tests.producer.gateway.living import live_http

MANY = 300_000


@pytest.fixture
def files(tmp_path: Path) -> Path:
    return tmp_path / "files"


@pytest.fixture
def http(redis_url: str, files: Path) -> Iterator[httpx2.Client]:
    with live_http(redis_url, files_dir=files) as client:
        yield client


def form(name: str, fields: dict[str, str], boundary: str = "b") -> bytes:
    parts = [
        f'--{boundary}\r\nContent-Disposition: form-data; name="{key}"\r\n\r\n{value}\r\n'
        for key, value in fields.items()
    ]
    parts.append(
        f'--{boundary}\r\nContent-Disposition: form-data; name="file"; filename="{name}"\r\n\r\n'
        f"{{}}\r\n--{boundary}--\r\n"
    )
    return "".join(parts).encode()


EXPIRY = {"purpose": "batch", "expires_after[anchor]": "created_at"}


@pytest.mark.parametrize(
    ("charset", "fields", "told"),
    [
        ("undefined", {"purpose": "batch"}, "charset 'undefined'"),
        ("punycode", {"purpose": "batch"}, "charset 'punycode'"),
        ("utf-7", {"purpose": "batch"}, "charset 'utf-7'"),
        ("utf-8", {**EXPIRY, "expires_after[seconds]": "9" * 1000}, "expires_after"),
        ("utf-8", {**EXPIRY, "expires_after[seconds]": "9" * 5000}, "multipart form"),
        ("utf-8", {"purpose": "x" * 1000}, "purpose"),
        ("utf-8", {"purpose": "batch", **{str(n): "" for n in range(50)}}, "Too many fields"),
    ],
)
def test_an_upload_that_is_wrong_is_refused_and_leaves_nothing(
    http: httpx2.Client, files: Path, charset: str, fields: dict[str, str], told: str
) -> None:
    kind = {"Content-Type": f"multipart/form-data; boundary=b; charset={charset}"}
    refused = http.post("/v1/files", content=form("+2AA-", fields), headers=kind)
    assert refused.status_code == 400
    assert told in refused.json()["error"]["message"]
    assert not files.exists() or not list(files.iterdir())


@pytest.mark.parametrize("kind", [None, "application/json", "multipart"])
def test_a_form_of_another_type_is_refused_by_name(http: httpx2.Client, kind: str | None) -> None:
    headers = {} if kind is None else {"Content-Type": kind}
    refused = http.post("/v1/files", content=form("a", {"purpose": "batch"}), headers=headers)
    assert refused.status_code == 400
    told = f"Content-Type: {kind or ''!r} is not multipart/form-data"
    assert refused.json()["error"]["message"] == told


def test_a_file_that_cannot_be_written_down_leaves_nothing(
    http: httpx2.Client, files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr("promptq.producer.batch_store.files._write_whole", full)
    kind = {"Content-Type": "multipart/form-data; boundary=b"}
    assert http.post("/v1/files", content=form("a", EXPIRY), headers=kind).status_code == 400
    body = form("a", {"purpose": "batch"})
    assert http.post("/v1/files", content=body, headers=kind).status_code >= 500
    assert not [it for it in files.iterdir() if it.name != "quotas.lock"]


def test_many_large_form_fields_end_at_the_first(http: httpx2.Client) -> None:
    def pieces() -> Iterator[bytes]:
        for number in range(24):
            name = f'name="{number}"'.encode()
            yield b"--b\r\nContent-Disposition: form-data; " + name + b"\r\n\r\n"
            yield b"x" * 1_000_000
            yield b"\r\n"

    kind = {"Content-Type": "multipart/form-data; boundary=b"}
    tracemalloc.start()
    try:
        refused = http.post("/v1/files", content=pieces(), headers=kind)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert refused.status_code == 400
    assert "exceeded" in refused.json()["error"]["message"]
    assert peak < 8_000_000, "of 24 MB"


ELSEWHERE = [
    {"Origin": "http://["},
    {"Origin": "http://localhost:1"},
    {"Origin": "http://127.0.0.1"},
    {"Sec-Fetch-Site": "same-site"},
    {"Host": "a b"},
    {"Host": "local host"},
    {"Host": "["},
    {"Host": "localhost:x"},
    {"Host": "localhost@elsewhere.example"},
    {"Host": "elsewhere.example"},
    {"Host": "127.0.0.1.elsewhere.example"},
    {"Host": ""},
]


def test_without_a_key_only_this_machine_and_its_own_page_are_answered(http: httpx2.Client) -> None:
    """A page on another port of this machine is another origin."""
    for headers in ELSEWHERE:
        for method, path in (("GET", "/v1/models"), ("POST", "/v1/completions")):
            assert http.request(method, path, headers=headers).status_code == 401, headers


def test_what_is_wrong_has_a_code(http: httpx2.Client) -> None:
    batch = {
        "input_file_id": "file-x",
        "endpoint": "/v1/completions",
        "completion_window": "24h",
    }
    answers = [
        http.post("/v1/files", content=b"x"),
        http.post("/v1/batches", content=b"{}"),
        http.post("/v1/batches", json=batch),
        http.post("/v1/batches", json={**batch, "endpoint": "/v1/x"}),
    ]
    for answer in answers:
        assert answer.status_code == 400
        assert answer.json()["error"]["code"] == "invalid_request", answer.text


def test_without_a_key_the_gateways_own_page_may_act(http: httpx2.Client) -> None:
    headers = {"Origin": str(http.base_url).rstrip("/"), "Sec-Fetch-Site": "same-origin"}
    assert http.get("/v1/models", headers=headers).status_code == 200
    assert http.post("/dashboard/api/resume", headers=headers).status_code == 200
    other = http.post("/dashboard/api/resume", headers={"Origin": "http://localhost:1"})
    assert (other.status_code, other.json()["error"]["code"]) == (403, "cross_site")


def repeated(what: str) -> str:
    return ",".join([what] * MANY)


@cache  # three cases have it
def named(what: str) -> str:
    return ",".join(f'"a{number}":{what}' for number in range(MANY))


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ('{"prompt": [0,' + repeated("-1") + "]}", "prompt"),
        ('{"messages": [1,' + repeated("1") + "]}", "messages"),
        ('{"messages": [{}], "tools": [1,' + repeated("1") + "]}", "tools"),
        ('{"prompt": "x", "stop": [1,' + repeated("1") + "]}", "stop"),
        ('{"prompt": "x", "bad_words": [1,' + repeated("1") + "]}", "bad_words"),
        ('{"prompt": "x", "logit_bias": {' + named("1") + "}}", "logit_bias"),
        ("{" + named("1") + "}", "a0"),
        (
            '{"messages": [{"role": "user"}], "tools": [{}], "tool_choice": {' + named("1") + "}}",
            "tool_choice",
        ),
    ],
    ids=["prompt", "messages", "tools", "stop", "bad_words", "logit_bias", "names", "tool_choice"],
)
def test_of_a_payload_with_many_errors_the_first_is_reported(body: str, field: str) -> None:
    """And no more are looked for: each would take time, and hundreds of bytes."""
    tracemalloc.start()
    try:
        with pytest.raises(InvalidRequestError) as refused:
            Request.parse(body)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert refused.value.field == field
    assert len(str(refused.value)) < 1000
    assert peak < 25 * len(body), "what reading it as JSON takes"


def test_a_format_of_metrics_that_is_none_is_the_usual_one(http: httpx2.Client) -> None:
    for version in ("x", "1.x", "", "9" * 5000):
        accept = f"application/openmetrics-text;version={version}"
        assert http.get("/metrics", headers={"Accept": accept}).status_code == 200

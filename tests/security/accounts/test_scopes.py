"""A key has scopes, an end, and a time of its last use."""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Callable

import httpx2
import pytest
import redis
import redis.asyncio

from promptq import Client
from promptq.producer.admin.api_keys import SCOPES, ApiKey, hash_of
from promptq.producer.http import state
from tests.producer.gateway.living import LiveGateway, bearer, error_of
from tests.producer.playing import KEYS, PROMPTQ
from tests.support import processes
from tests.support.roles import as_role

CALLS = {
    "completions": [
        ("POST", "/v1/completions"), ("POST", "/v1/chat/completions"),
        ("GET", "/v1/streams/x"), ("GET", "/v1/streams/x/place"), ("POST", "/v1/quote"),
        ("POST", "/v1/streams/x/fork"), ("DELETE", "/v1/streams/x"),
        ("POST", "/v1/messages"), ("POST", "/v1/messages/count_tokens"),
        ("POST", "/v1/responses"), ("GET", "/v1/responses/x"), ("DELETE", "/v1/responses/x"),
        ("POST", "/v1/responses/input_tokens"),
        ("POST", "/v1/responses/x/cancel"), ("GET", "/v1/responses/x/input_items"),
        ("POST", "/v1/embeddings"), ("POST", "/v1/rerank"), ("POST", "/v1/score"),
        ("POST", "/tokenize"), ("POST", "/detokenize"),
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
        of_api = ("/v1/", "/tokenize", "/detokenize")
        api = {(way, re.sub(r"\{\w+\}", "{", it)) for way, it in listed if it.startswith(of_api)}
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
    answer = httpx2.get(f"{gateway.base_url}/models", headers=bearer(late), timeout=None)
    assert error_of(answer) == (401, "invalid_api_key")
    assert "'late' has expired" in answer.json()["error"]["message"]
    assert httpx2.get(f"{gateway.base_url}/models", timeout=None).status_code == 401
    valid = make_key("valid", expires_at=int(time.time() * 1000) + 3_600_000)
    answer = httpx2.get(f"{gateway.base_url}/models", headers=bearer(valid), timeout=None)
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
        assert (
            httpx2.get(
                f"{gateway.base_url}/models", headers=bearer(secret), timeout=None
            ).status_code
            == 200
        )
        with Client(as_role("operator", redis_url)) as client:
            used = {key.name: key.last_used_at for key in client.api_keys()}
        assert used["idle"] == 0
        return used["web"]

    began = int(time.time() * 1000)
    assert (
        httpx2.get(f"{gateway.base_url}/models", headers=bearer("pq-x"), timeout=None).status_code
        == 401
    )
    first = use()
    assert began <= first <= time.time() * 1000
    assert use() == first, "not again within the minute"
    monkeypatch.setattr(state, "_EVERY_SECONDS", 0.0)
    assert use() > first
    assert set(everything.hkeys(KEYS.api_keys_used)) == {hash_of(secret).encode()}
    with Client(as_role("operator", redis_url)) as client:
        client.revoke_api_key("web")
    assert not everything.exists(KEYS.api_keys_used)


def test_the_commands(redis_url: str) -> None:
    def run(*args: str) -> subprocess.CompletedProcess[str]:
        env = {**os.environ, "PROMPTQ_REDIS_URL": as_role("operator", redis_url), "COLUMNS": "80"}
        return processes.run(*PROMPTQ, "keys", *args, env=env)

    made = run("create", "nightly", "--scope", "files", "--scope", "batches", "--expires-in", "30d")
    assert made.returncode == 0, made.stderr
    shown = run("list").stdout
    assert re.search("tenant .*may call .*expires .*last used", shown)
    assert re.search(r"nightly .*nightly \(its own\) .*files batches .*never", shown)
    with Client(as_role("operator", redis_url)) as client:
        (key,) = client.api_keys()
    assert key.scopes == ("files", "batches")
    month_ms = 30 * 86_400_000
    assert abs(key.expires_at - key.created_at - month_ms) < 3_600_000
    for args, error in (
        (
            ["x", "--scope", "admin"],
            "scope: 'admin' is not one of completions, files, batches, models",
        ),
        (["x", "--expires-in", "0d"], "expires-in: '0d' is not more than 0"),
        (
            ["x", "--expires-in", "999999w"],
            "expires-in: '999999w' is not more than 0, or is more",
        ),
        (["x", "--expires-in", "soon"], "expires-in: 'soon' is not a number of"),
        (["x", "--expires-at", "2001-02-03"], "expires-at: '2001-02-03' is in the past"),
        (["x", "--tenant", "nightly"], "tenant: 'nightly' belongs to the key 'nightly' alone"),
    ):
        refused = run("create", *args)
        assert refused.returncode == 1
        assert refused.stderr.startswith(f"promptq: {error}"), refused.stderr
    with Client(as_role("operator", redis_url)) as client:
        client.create_api_key(ApiKey(name="far", expires_at=10**18))  # no year that dates know
    assert re.search("far .* – +never", run("list").stdout)

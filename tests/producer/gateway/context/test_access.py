"""API keys: who gets in, as which tenant, and how much each may ask for."""

from __future__ import annotations

import asyncio
import io
import re
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import httpx2
import openai
import pytest
import redis
import redis.asyncio
from fastapi import FastAPI

from promptq import AsyncClient, Client
from promptq.producer.admin.api_keys import ApiKey
from promptq.producer.calls.rate_costs import rates_of
from promptq.producer.commands.screens.render import api_keys_list
from promptq.producer.commands.screens.terminal import SafeConsole
from promptq.producer.gateway.app import create_app
from promptq.producer.http.auth import ThisAdmin, ThisCaller
from promptq.producer.http.rate_limits import take
from promptq.producer.http.state import ThisGateway
from promptq.producer.settings.gateway import GatewaySettings
from promptq.shared.errors import ConfigurationError, RequestNotFoundError
from promptq.shared.protocol.keys import Keys
from tests.producer.gateway.living import LiveGateway, bearer, make_key
from tests.producer.playing import Run
from tests.support.roles import as_role

_LITTLE_LEFT = (
    r"has \d+ left of its 100 tokens a minute, and the call needs \d\d; try again in \d+ s"
)
HERE = ("127.0.0.1", 5000)


def app_with_routes(url: str) -> FastAPI:
    """A gateway with routes that do nothing but ask who calls."""
    app = create_app(GatewaySettings(redis_url=url))

    @app.get("/who")
    async def who(caller: ThisCaller) -> dict[str, Any]:
        return {"name": caller.name, "tenant": caller.tenant}

    @app.get("/admin")
    async def admin(caller: ThisAdmin) -> str:
        return caller.name

    @app.post("/take")
    async def take_some(
        gateway: ThisGateway, caller: ThisCaller, requests: int, prompt_tokens: int = 1
    ) -> dict[str, str]:
        wanted = [{"prompt": "x" * 4 * prompt_tokens, "max_tokens": 10**9}] * requests
        return await take(gateway, gateway.queues.own, caller, rates_of(caller, wanted))

    return app


@asynccontextmanager
async def calling(
    url: str, client: tuple[str, int] = HERE, base: str = "http://localhost"
) -> AsyncIterator[httpx2.AsyncClient]:
    app = app_with_routes(url)
    async with app.router.lifespan_context(app):
        transport = httpx2.ASGITransport(app=app, client=client)
        async with httpx2.AsyncClient(transport=transport, base_url=base, timeout=None) as http:
            yield http


async def test_without_any_key_this_machine_may_do_everything(redis_url: str) -> None:
    async with calling(redis_url) as http:
        assert (await http.get("/who")).json() == {"name": "local", "tenant": None}
        assert (await http.get("/admin")).status_code == 200
    async with calling(redis_url, client=("::1", 5000), base="http://[::1]:8000") as http:
        assert (await http.get("/who")).status_code == 200


@pytest.mark.parametrize(
    ("client", "base", "headers"),
    [
        (("10.0.0.7", 5000), "http://localhost", {}),
        (HERE, "http://localhost", {"X-Forwarded-For": "10.0.0.7"}),
        (HERE, "http://localhost", {"Forwarded": "for=10.0.0.7"}),
        (HERE, "http://localhost", {"X-Forwarded-Host": "localhost"}),
        (HERE, "http://localhost", {"X-Forwarded-Proto": "https"}),
        (HERE, "http://localhost", {"Via": "1.1 proxy"}),
        (HERE, "http://localhost", {"CF-Connecting-IP": "10.0.0.7"}),
        (HERE, "http://rebound.example", {}),
        (HERE, "http://localhost", {"Origin": "https://elsewhere.example"}),
        (HERE, "http://localhost", {"Origin": "null"}),
    ],
    ids=[
        "another machine",
        "a proxy",
        "a proxy by RFC 7239",
        "a proxy that tells the host",
        "a proxy that tells the scheme",
        "a proxy by RFC 9110",
        "a tunnel",
        "rebound name",
        "page",
        "sandbox",
    ],
)
async def test_without_any_key_nobody_else_is_answered(
    redis_url: str, client: tuple[str, int], base: str, headers: dict[str, str]
) -> None:
    async with calling(redis_url, client, base) as http:
        answer = await http.get("/who", headers=headers)
    assert answer.status_code == 401
    assert "promptq keys create" in answer.json()["error"]["message"]


async def test_from_the_first_key_on_nobody_gets_in_without_one(redis_url: str) -> None:
    secret = make_key(redis_url, "web", tenant="shop")
    async with calling(redis_url) as http:
        without = await http.get("/who")
        wrong = await http.get("/who", headers=bearer(secret[:-1] + "!"))
        right = await http.get("/who", headers=bearer(secret))
        with Client(redis_url) as client:
            client.revoke_api_key("web")
            client.create_api_key(ApiKey(name="other"))
        revoked = await http.get("/who", headers=bearer(secret))
    assert right.json() == {"name": "web", "tenant": "shop"}
    for answer in (without, wrong, revoked):
        assert answer.status_code == 401
        assert answer.headers["www-authenticate"] == "Bearer"
        error = answer.json()["error"]
        assert (error["type"], error["code"]) == ("authentication_error", "invalid_api_key")
        assert secret not in answer.text


async def test_what_answers_without_a_key(redis_url: str) -> None:
    """Nothing of the API; what probes, Prometheus and browsers ask before they have a key."""
    make_key(redis_url, "web")
    async with calling(redis_url) as http:
        paths = (await http.get("/openapi.json")).json()["paths"]
        api = [(way, it) for it in paths if it.startswith("/v1/") for way in paths[it]]
        assert len(api) > 12
        for method, path in api:
            answer = await http.request(method, re.sub(r"{\w+}", "x", path))
            assert answer.status_code == 401, (method, path)
        for path in ("/healthz", "/metrics", "/docs", "/openapi.json", "/"):
            assert (await http.get(path)).status_code == 200, path
        assert (await http.get("/readyz")).json()["error"]["code"] == "no_worker"


async def test_only_an_admin_may_steer(redis_url: str) -> None:
    plain = make_key(redis_url, "web")
    admin = make_key(redis_url, "operator", is_admin=True)
    async with calling(redis_url) as http:
        assert (await http.get("/admin", headers=bearer(plain))).status_code == 403
        assert (await http.get("/admin", headers=bearer(admin))).json() == "operator"


async def test_rates_are_taken_whole_or_not_at_all(redis_url: str) -> None:
    secret = make_key(redis_url, "web", requests_per_minute=4, tokens_per_minute=1000)
    async with calling(redis_url) as http:

        async def take(requests: int, prompt_tokens: int) -> httpx2.Response:
            query = {"requests": requests, "prompt_tokens": prompt_tokens}
            return await http.post("/take", params=query, headers=bearer(secret))

        first = (await take(1, 700)).json()
        assert first["x-ratelimit-limit-tokens"] == "1000"
        assert first["x-ratelimit-remaining-requests"] == "3"
        left = int(first["x-ratelimit-remaining-tokens"])
        assert 250 <= left < 300, "a quarter of the payload's bytes, whatever its `max_tokens`"
        refused = await take(1, 700)
        assert refused.status_code == 429
        assert refused.json()["error"]["code"] == "rate_limit_exceeded"
        assert 0 < int(refused.headers["retry-after"]) <= 30, "700 tokens less 280: 25 seconds"
        assert refused.headers["x-ratelimit-remaining-requests"] == "3", "nothing was taken"
        assert (await take(3, 10)).status_code == 200
        none_left = await take(1, 1)
        assert (none_left.status_code, none_left.headers["x-ratelimit-remaining-requests"]) == (
            429,
            "0",
        )
        assert "x-should-retry" not in none_left.headers
        never = await take(1, 2000)
        assert never.status_code == 429
        assert never.headers["x-should-retry"] == "false"
        assert "never has more" in never.json()["error"]["message"]
        assert "retry-after" not in never.headers


async def test_what_was_taken_comes_back_evenly(redis_url: str) -> None:
    secret = make_key(redis_url, "web", requests_per_minute=2)
    async with calling(redis_url) as http, redis.asyncio.Redis.from_url(redis_url) as connection:

        async def take(requests: int) -> httpx2.Response:
            query = {"requests": requests}
            return await http.post("/take", params=query, headers=bearer(secret))

        assert (await take(2)).status_code == 200
        refused = await take(1)
        assert 0 < int(refused.headers["retry-after-ms"]) <= 30_000, "2 a minute: one each 30 s"
        assert int(refused.headers["x-ratelimit-reset-requests"].removesuffix("ms")) > 30_000
        # As if half a minute had passed.
        await connection.hincrby(f"{Keys().prefix}rate:web", "requests", -30_000)
        assert (await take(1)).status_code == 200
        assert (await take(1)).status_code == 429


async def test_two_gateways_share_the_rates(redis_url: str) -> None:
    secret = make_key(redis_url, "web", requests_per_minute=5)
    async with calling(redis_url) as one, calling(redis_url) as two:
        answers = await asyncio.gather(
            *(
                http.post("/take", params={"requests": 1}, headers=bearer(secret))
                for http in [one, two] * 5
            )
        )
    assert sorted(answer.status_code for answer in answers) == [200] * 5 + [429] * 5


async def test_many_callers_at_once_are_all_answered(redis_url: str) -> None:
    """More than there are connections to the server, as when all of another gateway's come over."""
    secret = make_key(redis_url, "web", requests_per_minute=1000)
    options: dict[str, Any] = {
        "params": {"requests": 1}, "headers": bearer(secret),
    }  # fmt: skip
    async with calling(redis_url) as http:
        answers = await asyncio.gather(*(http.post("/take", **options) for _ in range(300)))
    assert {answer.status_code for answer in answers} == {200}


async def test_a_gateway_gets_on_with_the_connections_that_its_url_allows(
    redis_url: str, start_gateway: Callable[..., LiveGateway]
) -> None:
    """All its calls take their turn at one queue, which leaves some for subscriptions."""
    async with AsyncClient(redis_url) as client:
        followed = {"id": await client.enqueue("x")}
    gateway = start_gateway(redis_url=f"{redis_url}?max_connections=4")
    secret = make_key(redis_url, "web", is_admin=True)
    paths = ["/metrics", "/v1/batches", "/dashboard/api/requests", "/dashboard/api/dead"]
    options: Any = {"headers": bearer(secret), "timeout": 60, "limits": httpx2.Limits()}
    async with (
        redis.asyncio.Redis.from_url(as_role("", redis_url)) as connection,
        httpx2.AsyncClient(base_url=gateway.url, **options) as http,
        http.stream("GET", "/dashboard/api/live/request", params=followed) as live,
    ):
        assert live.status_code == 200
        while not await connection.pubsub_channels():
            await asyncio.sleep(0.01)
        answers = await asyncio.gather(*(http.get(path) for path in paths * 25))
    assert [answer.text for answer in answers if answer.status_code != 200] == []
    metrics = "".join(answer.text for answer in answers[:: len(paths)])
    assert metrics.count('queue_up{queue="default"} 1.0') == 25


async def test_keys_are_kept_hashed(redis_url: str) -> None:
    async with AsyncClient(redis_url) as client:
        secret, made = await client.create_api_key(ApiKey(name="web"))
        assert secret.endswith(made.hint)
        queue = client.queue
        assert queue is not None
        kept = await queue.redis.hgetall(Keys().api_keys)
        assert len(kept) == 1
        assert secret.encode() not in b"".join([*kept.keys(), *kept.values()])
        with pytest.raises(ConfigurationError, match="there is a key 'web' already"):
            await client.create_api_key(ApiKey(name="web"))
        with pytest.raises(RequestNotFoundError, match="no key 'other'"):
            await client.revoke_api_key("other")


def run_all(run: Run, commands: Sequence[Sequence[str]]) -> list[str]:
    outputs = []
    for command in commands:
        done = run("keys", *command)
        assert done.returncode == 0, done.stderr
        outputs.append(done.stdout)
    return outputs


def test_the_commands(run: Run, redis_url: str) -> None:
    empty, secret, listed, as_json, revoked, nothing = run_all(
        run,
        [
            ["list"],
            [
                "create",
                "web",
                "--tenant",
                "shop",
                "--weight",
                "2.5",
                "--requests-per-minute",
                "1200",
            ],
            ["list"],
            ["list", "--json"],
            ["revoke", "web"],
            ["list"],
        ],
    )
    assert empty == nothing == "no keys: the gateway answers only on this machine\n"
    assert secret.startswith("pq-")
    assert len(secret.strip()) == 46
    assert "1,200" in listed
    assert secret.strip() not in listed
    assert '"tenant": "shop"' in as_json
    assert revoked.startswith(f"revoked web (…{secret.strip()[-4:]})\n")
    with Client(redis_url) as client:
        weight = client.queue.redis.hget(Keys().config, "weight:shop")
    assert float(weight) == 2.5
    wrong = run("keys", "create", "no spaces")
    assert (wrong.returncode, wrong.stdout) == (1, "")
    assert wrong.stderr.startswith("promptq: name: ")


def test_a_list_of_keys_is_whole_however_narrow_the_terminal() -> None:
    """An expired key must not look like any other, nor an administrator's."""
    expired = ApiKey(name="old", tenant="operations", is_admin=True, expires_at=1)
    console = SafeConsole(file=io.StringIO(), width=80)
    with console.capture() as capture:
        console.print(api_keys_list([expired, ApiKey(name="n" * 64, tenant="web")], 80))
    shown = capture.get()
    assert max(map(len, shown.splitlines())) <= 80
    assert shown.startswith("old")
    facts = ("tenant +operations", "may call +all, admin", "expires +expired", "last used +never")
    for fact in facts:
        assert re.search(fact, shown)
    assert "n" * 64 in shown


def test_a_program_gets_a_key_a_line(run: Run) -> None:
    limits = ["--tenant", "operations", "--requests-per-minute", "1200"]
    assert run("keys", "create", "operator", "--admin", *limits).returncode == 0
    shown = run("keys", "list", COLUMNS="80").stdout
    assert re.search(
        "requests/min +tokens/min +most urgent priority +may call +models +expires", shown
    )
    row = "operator .*operations +1,200 +– +0 +all, admin +all +never +never +20"
    assert re.search(row, shown)


def test_openai_client_with_a_key(
    start_gateway: Callable[..., LiveGateway], redis_url: str
) -> None:
    gateway = start_gateway(http_header_seconds=0)
    secret = make_key(
        redis_url, name="web", tenant="shop", highest_priority=-1, requests_per_minute=4
    )
    options = {"base_url": gateway.base_url, "max_retries": 0}
    with (
        openai.OpenAI(api_key="pq-wrong", **options) as stranger,
        pytest.raises(openai.AuthenticationError, match="unknown or was revoked"),
    ):
        stranger.completions.create(model="", prompt="Once")
    with openai.OpenAI(api_key=secret, **options) as client:
        with pytest.raises(openai.PermissionDeniedError, match="priority"):
            client.completions.create(model="", prompt="Once", extra_body={"priority": -2})
        with pytest.raises(openai.PermissionDeniedError, match="tenant"):
            client.completions.create(model="", prompt="Once", extra_body={"tenant": "other"})
        for left in ("1", "0"):
            answer = client.completions.with_raw_response.create(
                model="", prompt="Once", stream=True, extra_body={"detach": True, "priority": -1}
            )
            assert answer.headers["x-ratelimit-remaining-requests"] == left
            with redis.Redis.from_url(redis_url) as connection:
                record = Keys().request(answer.headers["x-request-id"])
                assert connection.hget(record, "tenant") == b"shop"
            answer.http_response.close()
        with pytest.raises(openai.RateLimitError) as refused:
            client.completions.create(model="", prompt="Once")
    assert refused.value.code == "rate_limit_exceeded"
    assert int(refused.value.response.headers["retry-after"]) > 0


def test_openai_client_beyond_its_tokens(
    start_gateway: Callable[..., LiveGateway], redis_url: str
) -> None:
    """Now, and for good: what a key never has is not asked for again."""
    gateway = start_gateway(http_header_seconds=0)
    secret = make_key(redis_url, "web", tokens_per_minute=100)
    asked: dict[str, Any] = {"model": "", "prompt": "Once " * 30, "max_tokens": 60}
    with openai.OpenAI(base_url=gateway.base_url, api_key=secret, max_retries=0) as client:
        first = client.completions.with_raw_response.create(**asked, stream=True)
        assert first.headers["x-ratelimit-limit-tokens"] == "100"
        first.http_response.close()
        with pytest.raises(openai.RateLimitError, match=_LITTLE_LEFT) as refused:
            client.chat.completions.create(
                model="", messages=[{"role": "user", "content": "Once " * 50}], max_tokens=60
            )
        assert refused.value.code == "rate_limit_exceeded"
        assert 0 < int(refused.value.response.headers["retry-after"]) <= 60
        asked["prompt"] = "Once" * 101
        with pytest.raises(openai.RateLimitError, match="never has more than 100 tokens") as never:
            client.completions.create(**asked)
        assert "retry-after" not in never.value.response.headers


def test_a_tenant_over_its_limit_of_the_queue(
    start_gateway: Callable[..., LiveGateway], redis_url: str
) -> None:
    """One of its requests waits, and more are not to; other tenants come in."""
    gateway = start_gateway(http_header_seconds=0)
    with redis.Redis.from_url(redis_url) as connection:
        connection.hset(Keys().config, "max_pending:shop", 1)
    asked: dict[str, Any] = {"model": "", "prompt": "Once", "stream": True}

    def ask(client: openai.OpenAI) -> None:
        answer = client.completions.with_raw_response.create(**asked, extra_body={"detach": True})
        answer.http_response.close()

    options = {"base_url": gateway.base_url, "max_retries": 0}
    shop, other = (make_key(redis_url, it, tenant=it) for it in ("shop", "other"))
    with (
        openai.OpenAI(api_key=shop, **options) as ours,
        openai.OpenAI(api_key=other, **options) as theirs,
    ):
        ask(ours)
        with pytest.raises(openai.RateLimitError, match="max_pending") as refused:
            ask(ours)
        ask(theirs)
    assert refused.value.code == "queue_full"
    assert int(refused.value.response.headers["retry-after"]) >= 1

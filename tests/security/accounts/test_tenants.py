"""A key without a tenant is a tenant of its own."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
import redis
import redis.asyncio

from promptq.producer.admin.api_keys import hash_of
from promptq.producer.batch_store.files import FileStore
from promptq.shared.errors import ConfigurationError
from tests.producer.gateway.living import LiveGateway, bearer, error_of
from tests.producer.playing import KEYS
from tests.support.roles import as_role


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
                gone = httpx2.delete(stream, headers=bearer(other.api_key), timeout=None)
                assert gone.status_code == 404
            assert [it.id for it in client.files.list()] == [file.id]
            assert [it.id for it in client.batches.list()] == [batch.id]
            assert httpx2.delete(stream, headers=bearer(secret), timeout=None).status_code == 200


def old_key(redis_url: str, name: str, **fields: Any) -> str:
    """Makes a key like release 0.2."""
    secret = f"pq-{name}"
    with redis.Redis.from_url(as_role("operator", redis_url)) as connection:
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
        timeout=None,
    )
    assert error_of(refused) == (403, "tenant")


def test_an_administrator_of_no_tenant_reaches_what_is_nobodys(
    start: Callable[..., LiveGateway], make_key: Callable[..., str], tmp_path: Path
) -> None:
    """Files from before there were keys are not lost, and nobody else reaches them."""
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
            ConfigurationError, match=rf"tenant: '{name}' belongs to the key '{name}' alone"
        ):
            make_key("late", tenant=name)
    with pytest.raises(ConfigurationError, match="name: 'shop' is the tenant of the key 'shop-1'"):
        make_key("shop")
    make_key("shop", tenant="shop")

"""Responses that are stored: read again, continued, listed, deleted, and counted."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import openai
import pytest
from openai import OpenAI

from promptq.producer.apis.responses.response_records import MOST_LINKS
from tests.producer.gateway.living import LiveGateway, live_gateway, make_key
from tests.producer.gateway.played import in_background, openai_of, response_of
from tests.producer.playing import KEYS, HandWorker
from tests.support.roles import as_role
from tests.support.waiting import until


def test_a_conversation_of_three(gateway: LiveGateway, own_worker: HandWorker) -> None:
    """Rebuilt from what is stored. Instructions count for one response alone."""
    with openai_of(gateway) as client:
        first, _ = response_of(client, own_worker, "One.", input="1?", instructions="Be brief.")
        second, _ = response_of(
            client, own_worker, "Two.", input="2?", previous_response_id=first.id
        )
        third, payload = response_of(
            client, own_worker, "Three.", input="3?", previous_response_id=second.id,
            instructions="Be long.",
        )  # fmt: skip
        assert [(it["role"], it["content"]) for it in payload["messages"]] == [
            ("system", "Be long."), ("user", "1?"), ("assistant", "One."), ("user", "2?"),
            ("assistant", "Two."), ("user", "3?"),
        ]  # fmt: skip
        assert third.previous_response_id == second.id
        client.responses.delete(first.id)
        with pytest.raises(openai.BadRequestError) as raised:
            client.responses.create(model="", input="4?", previous_response_id=third.id)
        assert raised.value.code == "previous_response_not_found"
        assert first.id in str(raised.value)


def test_a_response_that_is_not_over_cannot_be_continued(
    gateway: LiveGateway, own_worker: HandWorker
) -> None:
    with openai_of(gateway) as client, in_background(client, own_worker) as (response_id, _):
        with pytest.raises(openai.BadRequestError) as raised:
            client.responses.create(model="", input="?", previous_response_id=response_id)
        assert raised.value.code == "previous_response_not_over"


def test_what_is_not_stored_is_not_there(gateway: LiveGateway, own_worker: HandWorker) -> None:
    with openai_of(gateway) as client:
        got, _ = response_of(client, own_worker, input="Go", store=False)
        assert got.store is False
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(got.id)
    assert not [*own_worker.redis.scan_iter(KEYS.response("*"))]


def test_input_items_come_in_pages(gateway: LiveGateway, own_worker: HandWorker) -> None:
    items: Any = [{"role": "user", "content": f"{at}"} for at in range(5)]
    with openai_of(gateway) as client:
        got, _ = response_of(client, own_worker, input=items)
        listed = client.responses.input_items
        newest = [it.model_dump()["content"][0]["text"] for it in listed.list(got.id, limit=2)]
        assert newest == ["4", "3", "2", "1", "0"]
        page = listed.list(got.id, limit=2, order="asc")
        assert [it.model_dump()["content"][0]["text"] for it in page.data] == ["0", "1"]
        assert page.has_more
        rest = listed.list(got.id, order="asc", after=page.data[-1].id or "")
        assert len(rest.data) == 3
        assert not rest.has_more
        with pytest.raises(openai.BadRequestError, match="no item"):
            listed.list(got.id, after="msg_x")


def test_another_gateway_has_it_after_the_queue_forgot_it(
    redis_url: str, own_worker: HandWorker
) -> None:
    """With the same events, since what was written is kept with its pieces."""
    url = as_role("gateway", redis_url)
    with live_gateway(url) as first, openai_of(first) as client:
        with in_background(client, own_worker, stream=False) as (response_id, claim):
            for piece in ("Once", " upon", " a time"):
                own_worker.send(claim, piece)
            own_worker.finish(claim, ".")
        events = list(client.responses.retrieve(response_id, stream=True))
        whole = client.responses.retrieve(response_id)
    own_worker.redis.delete(KEYS.request(response_id), KEYS.tokens(response_id))
    with live_gateway(url) as second, openai_of(second) as client:
        assert client.responses.retrieve(response_id) == whole
        assert list(client.responses.retrieve(response_id, stream=True)) == events
        got, payload = response_of(client, own_worker, input="?", previous_response_id=response_id)
        assert [it["content"] for it in payload["messages"]] == ["Go", "Once upon a time.", "?"]
        assert got.output_text == "Hi"


def test_what_nobody_reads_is_kept_too(
    redis_url: str, own_worker: HandWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By any gateway, also if the one that took the call is gone."""
    records = "promptq.producer.apis.responses.response_records"
    monkeypatch.setattr(f"{records}._LOOK_SECONDS", 0.05)
    monkeypatch.setattr(f"{records}._NOT_SINCE_MS", 0)
    url = as_role("gateway", redis_url)
    with (
        live_gateway(url) as first,
        openai_of(first) as client,
        in_background(client, own_worker) as (response_id, claim),
    ):
        own_worker.send(claim, "Half")
    own_worker.finish(claim, " and half")
    key = KEYS.response(response_id)
    assert not own_worker.redis.hexists(key, "result")
    with live_gateway(url) as second, openai_of(second) as client:
        until(lambda: own_worker.redis.hexists(key, "result"))
        own_worker.redis.delete(KEYS.request(response_id), KEYS.tokens(response_id))
        assert client.responses.retrieve(response_id).output_text == "Half and half"
        assert not own_worker.redis.zcard(KEYS.unfinished_responses)


def test_a_conversation_has_an_end(gateway: LiveGateway, own_worker: HandWorker) -> None:
    """Its last response can be continued, and no more than these are read for a call."""
    with openai_of(gateway) as client:
        first, _ = response_of(client, own_worker, input="Go")
        record = own_worker.redis.hgetall(KEYS.response(first.id))
        ids = [first.id] + [f"resp_{number:032x}" for number in range(MOST_LINKS)]
        for before, own in pairwise(ids):
            call = {**json.loads(record[b"call"]), "previous_response_id": before}
            own_worker.redis.hset(KEYS.response(own), mapping={**record, b"call": json.dumps(call)})
        got, payload = response_of(client, own_worker, input="?", previous_response_id=ids[-2])
        assert len(payload["messages"]) == 2 * MOST_LINKS + 1
        assert got.previous_response_id == ids[-2]
        with pytest.raises(openai.BadRequestError, match=f"more than the {MOST_LINKS}") as refused:
            client.responses.create(model="", input="?", previous_response_id=ids[-1])
        assert refused.value.code == "conversation_too_long"


def test_tenants_do_not_see_each_other(
    start_gateway: Callable[..., LiveGateway], redis_url: str, own_worker: HandWorker
) -> None:
    """Each call about another tenant's response is answered as if there were none."""
    gateway = start_gateway()
    mine, theirs = (make_key(redis_url, name, tenant=name) for name in ("me", "them"))
    with openai_of(gateway, mine) as me, openai_of(gateway, theirs) as them:
        got = me.responses.create(model="", input="Go", background=True)
        calls: list[Callable[[], object]] = [
            lambda: them.responses.retrieve(got.id),
            lambda: list(them.responses.retrieve(got.id, stream=True)),
            lambda: them.responses.delete(got.id),
            lambda: them.responses.cancel(got.id),
            lambda: them.responses.input_items.list(got.id),
        ]
        for call in calls:
            with pytest.raises(openai.NotFoundError):
                call()
        with pytest.raises(openai.BadRequestError) as raised:
            them.responses.create(model="", input="?", previous_response_id=got.id)
        assert raised.value.code == "previous_response_not_found"
        assert me.responses.retrieve(got.id).status == "queued"
        own_worker.finish(own_worker.take(), "Mine")
        assert me.responses.retrieve(got.id).output_text == "Mine"


def test_a_tenant_has_a_quota(
    start_gateway: Callable[..., LiveGateway], redis_url: str, own_worker: HandWorker
) -> None:
    """Of number and of bytes. What is deleted or expires makes room again."""
    few = start_gateway(responses_per_tenant=2)
    small = start_gateway(responses_bytes_per_tenant=20_000)
    mine, theirs = (make_key(redis_url, name, tenant=name) for name in ("me", "them"))
    fields: Any = {"model": "", "input": "Go", "background": True}
    with openai_of(few, mine) as me, openai_of(few, theirs) as them:
        ids = [me.responses.create(**fields).id for _ in range(2)]
        with pytest.raises(openai.APIStatusError, match="has 2 stored responses, and may have 2"):
            me.responses.create(**fields)
        them.responses.create(**fields)
        me.responses.delete(ids[0])
        ids[0] = me.responses.create(**fields).id
        own = f"{KEYS.prefix}responses:of:me"
        own_worker.redis.zadd(own, dict.fromkeys(ids, 1))
        me.responses.create(**fields)
        assert own_worker.redis.zcard(own) == 1
    with openai_of(small, theirs) as them:
        with pytest.raises(openai.APIStatusError) as raised:
            them.responses.create(**{**fields, "input": "x" * 20_000})
        assert raised.value.status_code == 413
        assert "bytes of stored responses, and may have 20000" in str(raised.value)
        them.responses.create(**fields)
    sizes = own_worker.redis.hgetall(f"{KEYS.prefix}responses:sizes:them")
    assert int(sizes.pop(b"total")) == sum(map(int, sizes.values()))
    assert len(sizes) == 2


def test_records_expire(start_gateway: Callable[..., LiveGateway], own_worker: HandWorker) -> None:
    """All that is kept goes by itself."""
    with openai_of(start_gateway(responses_seconds=90)) as client:
        client.responses.create(model="", input="Go", background=True)
    found = [*own_worker.redis.scan_iter(f"{KEYS.prefix}response*")]
    assert len(found) == 4
    assert all(0 < own_worker.redis.pttl(key) <= 90_000 for key in found)


@pytest.mark.parametrize("wrong", ["resp_", "resp_x", "resp_é" + "0" * 31, "resp_" + "0" * 32, "x"])
def test_there_is_no_such_response(letters: OpenAI, wrong: str) -> None:
    with pytest.raises(openai.NotFoundError):
        letters.responses.retrieve(wrong)


def test_a_record_that_a_stranger_broke(gateway: LiveGateway, own_worker: HandWorker) -> None:
    """A broken record counts as no record."""
    everything = own_worker.redis
    response_id = "resp_" + "0" * 32
    key = KEYS.response(response_id)
    fields = {"tenant": "", "queue": "default", "call": '{"model": ""}', "echo": '"a":1'}
    with openai_of(gateway) as client:
        for broken in (
            {**fields, "call": "[1]"}, {**fields, "call": '{"x": 1}'}, {**fields, "result": "{"},
            {"tenant": ""},
        ):  # fmt: skip
            everything.delete(key)
            everything.hset(key, mapping=broken)
            with pytest.raises(openai.NotFoundError):
                client.responses.retrieve(response_id)
        everything.delete(key)
        everything.set(key, "x")
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(response_id)

"""Records that strangers wrote give an error with a sentence over HTTP, never a 500."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest

from promptq import Client
from promptq.producer.admin import api_keys
from promptq.producer.admin.api_keys import ApiKey
from promptq.producer.apis.responses import response_records
from promptq.producer.apis.responses.response_call import new_response_id
from promptq.producer.calls.completion import new_completion_id, new_message_id, request_ids
from tests.producer.gateway.living import LiveGateway, bearer, error_of, live_http, sent
from tests.producer.playing import KEYS, HandWorker
from tests.support.requests import put
from tests.support.roles import as_role
from tests.support.spoilt import SPOILT, TYPES, make_of_type
from tests.support.waiting import until

PATHS = (
    *("/readyz", "/metrics", "/scaling", "/v1/models", "/v1/batches", "/v1/files"),
    *("/dashboard/api/caller", "/dashboard/api/requests", "/dashboard/api/dead"),
    *(f"/dashboard/api/requests?state={it}" for it in ("waiting", "active", "delayed", "dead")),
)


@pytest.fixture
def quick(redis_url: str) -> Iterator[httpx2.Client]:
    """A client of a gateway that looks at responses that nobody reads all the time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(response_records, "_LOOK_SECONDS", 0.02)
        patch.setattr(response_records, "_NOT_SINCE_MS", 0)
        with live_http(as_role("gateway", redis_url)) as http:
            yield http


def stored_response(worker: HandWorker, request: dict[str, Any] | None = None, **own: Any) -> str:
    """A stored response that nobody read, and the record of its request, as given."""
    response_id = new_response_id()
    call = json.dumps({"model": "m", "background": True})
    record = {"tenant": "", "queue": "default", "call": call, "echo": '"a":1', "input": "{}"}
    worker.redis.hset(KEYS.response(response_id), mapping=record | own)
    if request:
        worker.redis.hset(KEYS.request(response_id), mapping={"payload": "{}", **request})
    return response_id


def keep(worker: HandWorker, response_ids: list[str]) -> None:
    """Have the gateway look at them, in this order."""
    for number, response_id in enumerate(response_ids, 1):
        worker.redis.zadd(KEYS.unfinished_responses, {response_id: number})


def test_a_spoilt_response_keeps_no_other_from_being_kept(
    quick: httpx2.Client, own_worker: HandWorker
) -> None:
    """However its request or the record itself is spoilt. It ends, too, and says why."""
    ended = {"state": "completed"}
    requests = [
        stored_response(own_worker, {**ended, field: value})
        for value in SPOILT.values()
        for field in ("last_event", "result")
    ]
    requests += [stored_response(own_worker, ended)]
    records = [
        stored_response(own_worker, ended, **{field: value})
        for value in SPOILT.values()
        for field in ("call", "queue", "result", "input")
    ]
    for kind in TYPES:
        requests.append(stored_response(own_worker, ended))
        make_of_type(own_worker.redis, KEYS.request(requests[-1]), kind)
    well = stored_response(own_worker)
    put(own_worker.queue, well)
    own_worker.finish(own_worker.take(), "Well")
    keep(own_worker, [*requests, *records, well])
    until(lambda: own_worker.redis.hexists(KEYS.response(well), "result"))
    assert quick.get(f"/v1/responses/{well}").json()["status"] == "completed"
    for response_id in random.sample([*requests, *records], 40):  # a run's time is short
        answer = quick.get(f"/v1/responses/{response_id}")
        assert answer.status_code in (200, 404, 503), answer.text
        if answer.status_code == 200:
            assert answer.json()["status"] in ("failed", "queued", "completed")
        whole = quick.get(f"/v1/responses/{response_id}/input_items")
        assert whole.status_code != 500
    spoilt = quick.get(f"/v1/responses/{requests[0]}").json()
    assert (spoilt["status"], spoilt["error"]["type"]) == ("failed", "spoilt_record")
    assert "its fields last_event and result do not say how" in spoilt["error"]["message"]


def test_the_log_of_a_response_that_is_not_finite_is_not_kept_as_it_is(
    quick: httpx2.Client, own_worker: HandWorker
) -> None:
    """The stored record would have null, which nobody could read again."""
    response_id = stored_response(own_worker, {"state": "completed"})
    for at, kind in (("1-1", "a NaN inside"), ("2-1", "an infinity as null")):
        own_worker.redis.xadd(KEYS.tokens(response_id), {"event": SPOILT[kind]}, id=at)
    keep(own_worker, [response_id])
    key = KEYS.response(response_id)
    until(lambda: own_worker.redis.hexists(key, "result"))
    assert quick.get(f"/v1/responses/{response_id}").json()["error"]["type"] == "spoilt_record"


@pytest.mark.matrix(5)
@pytest.mark.parametrize("kind", SPOILT)
def test_no_path_answers_500_for_a_spoilt_record(
    http: httpx2.Client, own_worker: HandWorker, kind: str
) -> None:
    """Of a stream, a message, a response or anything that lists records."""
    value, client = SPOILT[kind], own_worker.redis
    completion, message = new_completion_id(True), new_message_id()
    paths = [*PATHS]
    fields = ("last_event", "result", "tenant", "history", "priority", "payload")
    for field in fields:
        for made in (new_completion_id(True), new_message_id()):
            record = {"payload": '{"prompt":"a","max_tokens":1}', "state": "completed"}
            [request_id] = request_ids(made, 1)
            client.hset(KEYS.request(request_id), mapping={**record, field: value})
            paths.append(f"/v1/streams/{made}")
        paths.append(f"/v1/responses/{stored_response(own_worker, {field: value})}?stream=true")
        if field not in ("tenant", "payload"):
            client.hset(KEYS.request(f"dead-{field}"), mapping={"state": "dead", field: value})
            client.zadd(KEYS.dead, {f"dead-{field}": 1})
    for made in (completion, message):
        [request_id] = request_ids(made, 1)
        client.hset(KEYS.request(request_id), mapping={**record, "state": "failed"})
        client.xadd(KEYS.tokens(request_id), {"event": value}, id="1-0")
        paths.append(f"/v1/streams/{made}")
    client.zadd(KEYS.pending, {value[:200]: 1})
    client.sadd(KEYS.tenants_waiting, value[:200])
    client.sadd(KEYS.unfinished_batches, value[:200])
    client.zadd(KEYS.batches_of(""), {value[:200]: 1, "batch_" + "0" * 32: 2})
    client.hset(KEYS.batch("batch_" + "0" * 32), mapping={"id": value, "endpoint": value})
    for number, field in enumerate(("endpoint", "input_file_id", "metadata", "errors", "usage"), 1):
        batch = {"id": f"batch_{number:032x}", "endpoint": "/v1/completions"}
        batch |= {"input_file_id": "file-x", "created_at": 1, "expires_at": 2**40}
        whole = {name: json.dumps(member) for name, member in batch.items()}
        client.hset(KEYS.batch(batch["id"]), mapping={**whole, field: value})
        client.zadd(KEYS.batches_of(""), {batch["id"]: 2 + number})
        paths.append(f"/v1/batches/{batch['id']}")
    for path in paths:
        with http.stream("GET", path) as answer:
            # A stream that waits for its end says so from time to time.
            text = "" if "queued" in path else _beginning(answer)
        assert answer.status_code != 500, (path, text)
        assert "the gateway failed" not in text, (path, text)


def _beginning(answer: httpx2.Response) -> str:
    """The body, or that of a stream up to its first silence."""
    text = ""
    for piece in answer.iter_text():
        text += piece
        if ": waiting" in text or "response.queued" in text:
            break
    return text


STREAMS = {
    "chat": ('data: {"error"', '"code": "spoilt_record"'),
    "message": ("event: error", '"error_code": "spoilt_record"'),
    "response": ("event: error", "spoilt_record"),
}


@pytest.mark.parametrize("api", STREAMS)
def test_a_stream_whose_record_is_spoilt_meanwhile_ends_with_an_error(
    http: httpx2.Client, own_worker: HandWorker, api: str
) -> None:
    """In the form of its API, after what it had brought."""
    if api == "response":
        request_id = made = stored_response(own_worker)
        path = f"/v1/responses/{made}?stream=true"
    else:
        made = new_completion_id(True) if api == "chat" else new_message_id()
        [request_id] = request_ids(made, 1)
        path = f"/v1/streams/{made}"
    put(own_worker.queue, request_id, messages=[{"role": "user", "content": "Go"}])
    claim = own_worker.take()
    own_worker.send(claim, "Hi")
    text = ""
    with http.stream("GET", path) as answer:
        assert answer.status_code == 200
        for piece in answer.iter_text():
            if "Hi" in piece:
                spoilt = {"state": "completed", "last_event": "x", "result": "NaN"}
                own_worker.redis.hset(KEYS.request(request_id), mapping=spoilt)
                own_worker.channel_only(request_id, "look")
            text += piece
    first, code = STREAMS[api]
    assert "Hi" in text
    assert first in text
    assert code in text


def test_a_spoilt_key_lets_nobody_in_and_keeps_nobody_out(
    redis_url: str, gateway: LiveGateway, own_worker: HandWorker
) -> None:
    with Client(redis_url) as client:
        secret, _ = client.create_api_key(ApiKey(name="well"))
    with httpx2.Client(base_url=gateway.url, timeout=30) as http:
        for value in SPOILT.values():
            own_worker.redis.hset(KEYS.api_keys, api_keys.hash_of("spoilt"), value)
            refused = http.get("/v1/models", headers=bearer("spoilt"))
            assert refused.status_code == 401
            assert http.get("/v1/models", headers=bearer(secret)).status_code == 200


@pytest.mark.parametrize("kind", TYPES)
def test_lists_of_another_type_begin_anew(
    http: httpx2.Client, own_worker: HandWorker, kind: str
) -> None:
    """Else no tenant could ever add a batch or keep a response again."""
    lists = (KEYS.unfinished_batches, KEYS.batches_of(""), KEYS.unfinished_responses)
    counts = [f"{KEYS.prefix}responses:{name}:" for name in ("of", "sizes")]
    for key in (*lists, *counts):
        make_of_type(own_worker.redis, key, kind)
    assert http.get("/v1/batches").json()["data"] == []
    form = {"purpose": "batch"}
    file = http.post("/v1/files", data=form, files={"file": b"{}"}).json()["id"]
    batch = {"input_file_id": file, "endpoint": "/v1/completions", "completion_window": "24h"}
    made = http.post("/v1/batches", json=batch)
    assert made.status_code == 200, made.text
    [listed] = http.get("/v1/batches").json()["data"]
    assert listed["id"] == made.json()["id"]
    assert own_worker.redis.sismember(KEYS.unfinished_batches, listed["id"])
    response = http.post("/v1/responses", json={"input": "Hi", "background": True})
    assert response.status_code == 200, response.text
    response_id = response.json()["id"]
    assert own_worker.redis.zscore(KEYS.unfinished_responses, response_id) is not None
    assert http.delete(f"/v1/responses/{response_id}").status_code == 200


CALLS: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "a"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}]},
    "/v1/messages": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 9},
    "/v1/responses": {"input": "a"},
    "/v1/embeddings": {"input": "a"},
    "/v1/rerank": {"query": "a", "documents": ["b"]},
    "/v1/score": {"text_1": "a", "text_2": "b"},
}


@pytest.mark.parametrize("path", CALLS)
def test_an_idempotency_key_that_names_another_clients_request(
    gateway: LiveGateway, http: httpx2.Client, own_worker: HandWorker, path: str
) -> None:
    body = {**CALLS[path], "idempotency_key": "k"}
    with sent(gateway, path, json.dumps(body).encode(), {}):
        until(own_worker.queue.count)
    until(own_worker.queue.is_empty)
    [key] = own_worker.redis.keys(KEYS.prefix + "idempotency:*")
    for known in ("story-1", "x" * 200, "msg_" + "0" * 31):
        put(own_worker.queue, known)
        own_worker.redis.set(key, known)
        answer = http.post(path, json=body)
        assert error_of(answer) == (409, "spoilt_record"), answer.text


def test_a_conversation_on_a_spoilt_input_is_refused(
    http: httpx2.Client, own_worker: HandWorker
) -> None:
    for value in SPOILT.values():
        previous = stored_response(own_worker, input=value)
        put(own_worker.queue, previous)
        own_worker.finish(own_worker.take(), "Hi")
        call = {"model": "", "input": "?", "previous_response_id": previous, "background": True}
        answer = http.post("/v1/responses", json=call, timeout=None)
        assert answer.status_code in (200, 400, 409), (value[:50], answer.text)

"""Bad input and bad times get OpenAI's error objects, and its client raises its classes."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from typing import Any
from urllib.parse import urlsplit

import httpx2
import openai
import pytest
import redis.asyncio
from openai import OpenAI

from promptq.producer.admin.api_keys import ApiKey
from promptq.producer.apis.messages import read as messages
from promptq.producer.apis.responses import read as responses
from promptq.producer.batch_store.batch_records import Batches, new_batch
from promptq.producer.calls.errors import in_api_names
from promptq.shared.protocol.events import ErrorInfo
from promptq.shared.protocol.request import FinishReason
from promptq.shared.queue import lookups
from promptq.shared.queue.request_queue import AsyncRequestQueue
from promptq.shared.server.embedded import EmbeddedServer
from tests.producer.gateway.living import LiveGateway, live_gateway, live_worker
from tests.producer.playing import KEYS, HandWorker
from tests.support.network import Network
from tests.support.roles import as_role, bring_in_roles
from tests.support.servers import free_port
from tests.support.waiting import until


def complete(client: OpenAI, **fields: Any) -> Any:
    """A completion with these fields beside or instead of a prompt."""
    return client.completions.create(model="", prompt="Hi", extra_body=fields)


@contextmanager
def beside(action: Callable[[], Any]) -> Iterator[None]:
    """Does something in a thread, while the client waits for its answer."""
    with ThreadPoolExecutor() as pool:
        done = pool.submit(action)
        yield
    done.result()


def failing(worker: HandWorker, error: ErrorInfo) -> Any:
    """The next request ends with this error."""
    return beside(lambda: worker.send(worker.take_next(), "", FinishReason.ERROR, error=error))


def reap_one(worker: HandWorker) -> None:
    """Tidy up, as any worker does, until something was ended."""
    until(lambda: worker.queue.reap().ended)


def waiting_id(worker: HandWorker) -> str:
    while not (ids := worker.queue.run(lookups.waiting_ids(KEYS, 1))):
        time.sleep(0.005)
    return ids[0]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("completions", {"prompt": "Hi", "temperature": 9}, "temperature"),
        ("completions", {"prompt": "Hi", "temprature": 1}, "temprature"),
        ("completions", {"prompt": "Hi", "n": 0}, "n"),
        ("completions", {"prompt": ["Hi"] * 200, "n": 2}, "n"),
        ("completions", {"prompt": "x" * 4_000_000, "n": 9}, "n"),
        ("completions", {"prompt": ["x"] * 200, "metadata": {"a": "x" * 200_000}}, "n"),
        (
            "chat/completions",
            {"messages": [{"role": "user", "content": "x" * 200_000}], "n": 200},
            "n",
        ),
        ("completions", {"prompt": []}, "prompt"),
        ("completions", {"prompt": [1, "a"]}, "prompt"),
        ("completions", {}, "prompt"),
        ("completions", {"prompt": "Hi", "messages": []}, "messages"),
        ("completions", {"prompt": "Hi", "request_id": "mine"}, "request_id"),
        ("completions", {"prompt": "Hi", "model": 3}, "model"),
        ("completions", {"prompt": "Hi", "version": 2}, "version"),
        ("completions", {"prompt": "Hi", "idempotency_key": ""}, "idempotency_key"),
        ("completions", {"prompt": "Hi", "logit_bias": {"9" * 5000: 1}}, "logit_bias"),
        ("completions", {"prompt": "Hi", "max_tokens": 0}, "max_tokens"),
        ("completions", {"prompt": "Hi", "logprobs": 99}, "logprobs"),
        ("completions", {"prompt": "Hi", "prompt_logprobs": 21}, "prompt_logprobs"),
        ("completions", {"prompt": "Hi", "prompt_logprobs": -1}, "prompt_logprobs"),
        ("completions", {"prompt": "Hi", "prompt_logprobs": True}, "prompt_logprobs"),
        ("completions", {"prompt": "Hi", "prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ("completions", {"prompt": "Hi", "logprobs": 99, "echo": True}, "logprobs"),
        ("completions", {"prompt": "Hi", "max_tokens": False, "echo": True}, "max_tokens"),
        ("completions", {"prompt": "Hi", "stream_options": {}}, None),
        ("completions", {"prompt": "Hi", "stream_options": {"x": True}}, "stream_options"),
        ("chat/completions", {"messages": []}, "messages"),
        ("chat/completions", {}, "messages"),
        ("chat/completions", {"messages": [{"content": "Hi"}]}, "messages"),
        (
            "chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages",
        ),
        (
            "chat/completions",
            {"messages": [{"role": "user", "content": "Hi"}], "top_logprobs": 2},
            "top_logprobs",
        ),
        (
            "chat/completions",
            {"messages": [{"role": "user", "content": "Hi"}], "reasoning_effort": 3},
            "reasoning_effort",
        ),
        (
            "chat/completions",
            {
                "messages": [{"role": "user", "content": "Hi"}],
                "reasoning_effort": "low",
                "chat_template_kwargs": "x",
            },
            "chat_template_kwargs",
        ),
        ("completions", {"prompt": "Hi", "reasoning_effort": "low"}, "reasoning_effort"),
        (
            "chat/completions",
            {"messages": [{"role": "user", "content": "Hi"}], "tool_choice": "required"},
            "tool_choice",
        ),
    ],
)
def test_a_wrong_field_is_named(
    http: httpx2.Client, path: str, body: dict[str, Any], param: str | None
) -> None:
    """Before anything is enqueued."""
    if param is None:
        body = {**body, "stream_options": {"include_usage": True}}
        param = "stream_options"
    answer = http.post(f"/v1/{path}", json=body)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert (error["type"], error["param"]) == ("invalid_request_error", param)
    assert param in error["message"]


@pytest.mark.parametrize(
    ("value", "param"),
    [
        ('{"prompt": "\\ud800"}', "prompt"),
        ('{"messages": [{"role": "user", "content": "\\ud800"}]}', "messages"),
        ('{"prompt": "Hi", "stop": ["a", "\\ud800"]}', "stop"),
        ('{"prompt": "Hi", "metadata": {"a": "\\udfff"}}', "metadata"),
        ('{"prompt": "Hi", "metadata": {"\\udfff": 1}}', "metadata"),
        ('{"prompt": "Hi", "metadata": ' + '{"a":' * 300 + "1" + "}" * 301, "metadata"),
        ('{"prompt": "Hi", "metadata": ' + '{"a":' * 250 + "1" + "}" * 251, "metadata"),
    ],
    ids=["prompt", "message", "stop", "value", "key", "too deep to write", "too deep to read"],
)
def test_what_workers_could_not_read(http: httpx2.Client, value: str, param: str) -> None:
    """Half of a character, or JSON nested too deeply."""
    path = "/v1/chat/completions" if param == "messages" else "/v1/completions"
    as_json = {"Content-Type": "application/json"}
    answer = http.post(path, content=value, headers=as_json)
    assert answer.status_code == 400, answer.text
    assert "JSON" in answer.json()["error"]["message"]
    answer = http.post("/dashboard/api/play", content=value, headers=as_json)
    assert answer.status_code == 400, answer.text
    assert "JSON" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("path", "given", "meant"),
    [("completions", "promp", "prompt"), ("chat/completions", "message", "messages")],
)
def test_a_needed_field_that_is_misspelt(
    http: httpx2.Client, path: str, given: str, meant: str
) -> None:
    """The error names the wrong value, and a likely right one."""
    error = http.post(f"/v1/{path}", json={given: "Hi"}).json()["error"]
    assert error["param"] == given
    assert error["message"] == f"{given}: is not a field of a request; do you mean {meant}?"
    error = http.post(f"/v1/{path}", json={}).json()["error"]
    assert error["message"] == f"{meant}: is missing"


@pytest.mark.parametrize(
    ("header", "value"),
    [
        ("X-Priority", "soon"),
        ("X-Priority", "--5"),
        ("X-Priority", "9" * 5000),
        ("X-Deadline-Ms", "1.5"),
        ("X-Detach", "maybe"),
    ],
    ids=["a word", "two signs", "a long number", "a fraction", "no switch"],
)
def test_a_wrong_header_is_named(http: httpx2.Client, header: str, value: str) -> None:
    answer = http.post("/v1/completions", json={"prompt": "Hi"}, headers={header: value})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == header


@pytest.mark.parametrize("body", [b"{", b"", b"[1]", b'"text"', b"\xff", b'{"prompt": NaN}'])
def test_bad_json(http: httpx2.Client, body: bytes) -> None:
    answer = http.post("/v1/completions", content=body)
    assert answer.status_code == 400
    assert "JSON" in answer.json()["error"]["message"]


def test_json_that_does_not_say_so(http: httpx2.Client) -> None:
    """curl sends no JSON content type; the gateway reads the body anyway."""
    form = {"Content-Type": "application/x-www-form-urlencoded"}
    answer = http.post("/v1/batches", content=b'{"input_file_id": "file-1"}', headers=form)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "endpoint"


@pytest.mark.parametrize(
    ("path", "meant"),
    [
        ("/v1/chat/completion", "/v1/chat/completions"),
        ("/chat/completions", "/v1/chat/completions"),
        ("/v1/v1/models", "/v1/models"),
        ("/nothing/alike", None),
    ],
)
def test_a_path_that_is_not_there(http: httpx2.Client, path: str, meant: str | None) -> None:
    """The answer names the path that was probably meant, and what there is."""
    answer = http.post(path)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (404, "path_not_found")
    assert error["message"].startswith(f"POST {path} is not served")
    assert re.findall("do you mean ([^?]*)[?]", error["message"]) == ([meant] if meant else [])
    assert "/v1/completions" in error["message"]


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("/v1/completions", "", "the body is empty; send a JSON object"),
        ("/v1/batches", "", "the body is empty; send a JSON object"),
        ("/v1/batches", "{}", "input_file_id: is missing"),
        ("/v1/completions", "{}", "prompt: is missing"),
    ],
)
def test_a_body_that_lacks_all(http: httpx2.Client, path: str, body: str, message: str) -> None:
    answer = http.post(path, content=body)
    assert (answer.status_code, answer.json()["error"]["message"]) == (400, message)


def test_a_method_that_is_not_there(http: httpx2.Client) -> None:
    answer = http.get("/v1/completions")
    assert answer.status_code == 405
    told = "GET /v1/completions is not served; this path takes POST"
    error = answer.json()["error"]
    assert (error["message"], error["code"]) == (told, "method_not_allowed")
    answer = http.put("/v1/files")
    assert answer.json()["error"]["message"].endswith("this path takes GET, POST")
    answer = http.head("/v1/files")
    assert answer.headers["Allow"] == "GET, POST"


@pytest.mark.parametrize("declared", [True, False])
def test_a_body_that_is_too_large(
    start_gateway: Callable[..., LiveGateway], declared: bool
) -> None:
    """Whether its length was declared or not."""
    gateway = start_gateway(http_max_body_bytes=1000)
    with httpx2.Client(base_url=gateway.url, timeout=30) as http:

        def pieces() -> Iterator[bytes]:
            for _ in range(10):
                yield b"x" * 200

        content = b"".join(pieces()) if declared else pieces()
        answer = http.post("/v1/completions", content=content)
        assert answer.status_code == 413
        assert answer.json()["error"]["code"] == "body_too_large"


def test_an_unknown_model(letters: OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as raised:
        letters.completions.create(model="gpt-9", prompt="Hi")
    assert (raised.value.code, raised.value.param) == ("model_not_found", "model")


def test_an_unknown_model_that_only_a_worker_may_know(
    openai_client: OpenAI, own_worker: HandWorker
) -> None:
    """Until a worker comes to a queue, nobody knows which model it serves."""
    error = ErrorInfo(type="invalid_request", message="model: this queue serves 'a', not 'b'")
    with failing(own_worker, error), pytest.raises(openai.NotFoundError):
        openai_client.completions.create(model="b", prompt="Hi")


@pytest.mark.parametrize("stream", [False, True])
def test_an_error_of_a_worker(openai_client: OpenAI, own_worker: HandWorker, stream: bool) -> None:
    error = ErrorInfo(type="internal_error", message="it failed")
    with failing(own_worker, error), pytest.raises(openai.InternalServerError) as raised:
        openai_client.completions.create(model="", prompt="Hi", stream=stream)
    assert raised.value.code == "internal_error"
    assert "x-should-retry" not in raised.value.response.headers


TURNS = [{"role": "user", "content": "Go"}]


@pytest.mark.parametrize(
    ("path", "fields", "sent", "named"),
    [
        ("/v1/chat/completions", {"messages": TURNS}, "messages", "messages"),
        ("/v1/embeddings", {"input": "Go"}, "prompt", "input"),
        ("/v1/embeddings", {"input": "Go"}, "embed: dimensions", "dimensions"),
        ("/v1/rerank", {"query": "Where", "documents": ["Go"]}, "prompt", "documents"),
        ("/v1/rerank", {"query": "Where", "documents": ["Go"]}, "embed", "query"),
        ("/v1/score", {"text_1": "Where", "text_2": "Go"}, "prompt", "text_2"),
        ("/v1/responses", {"input": "Go"}, "messages", "input"),
        ("/v1/responses/input_tokens", {"input": "Go"}, "messages", "input"),
        ("/v1/messages", {"messages": TURNS, "max_tokens": 9}, "stop", "stop_sequences"),
        (
            "/v1/messages/count_tokens",
            {"messages": TURNS},
            "tools[0].function.parameters",
            "tools[0].input_schema",
        ),
        ("/detokenize", {"tokens": [1]}, "prompt", "tokens"),
    ],
)
def test_a_worker_that_refuses_a_field_names_it_as_the_endpoint_does(
    http: httpx2.Client,
    own_worker: HandWorker,
    path: str,
    fields: dict[str, Any],
    sent: str,
    named: str,
) -> None:
    with failing(own_worker, ErrorInfo(type="invalid_request", message=f"{sent}: no")):
        answer = http.post(path, json=fields)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["message"] == f"{named}: no"
    assert "param" not in error or error["param"] == named


PLACE = ".properties.x.not"
FORMAT: dict[str, Any] = {"type": "json_schema", "schema": {}}
CALLS_WITH_SCHEMAS: list[tuple[str, dict[str, Any], str, str]] = [
    ("completions", {"prompt": "Go"}, "response_format", ".json_schema.schema"),
    ("chat/completions", {"messages": TURNS}, "response_format", ".json_schema.schema"),
    ("responses", {"input": "Go"}, "text.format", ".schema"),
    (
        "messages",
        {"messages": TURNS, "max_tokens": 9, "output_config": {"format": FORMAT}},
        *("output_config.format", ".schema"),
    ),
    ("completions", {"prompt": "Go", "guided_json": {}}, "guided_json", ""),
    (
        "chat/completions",
        {"messages": TURNS, "structured_outputs": {"json": {}}},
        *("structured_outputs", ".json"),
    ),
]


NO_STRICT_BESIDE = {
    "output_config.format": "",
    **dict.fromkeys(
        ("guided_json", "structured_outputs"),
        ', or send response_format with "strict": false, which ignores it',
    ),
}
"""Fields beside whose schema no `strict` may be, and the advice to their callers instead."""


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("endpoint", "fields", "field", "schema"), CALLS_WITH_SCHEMAS)
def test_a_worker_that_refuses_a_schema_names_the_place_as_the_endpoint_does(
    http: httpx2.Client,
    own_worker: HandWorker,
    endpoint: str,
    fields: dict[str, Any],
    field: str,
    schema: str,
    stream: bool,
) -> None:
    reason = "not cannot be enforced; leave it out"
    advice = ', or send "strict": false, which ignores it'
    message = f"response_format.json_schema.schema{PLACE}: {reason}{advice}"
    with failing(own_worker, ErrorInfo(type="unsupported", message=message)):
        answer = http.post(f"/v1/{endpoint}", json={**fields, "stream": stream})
    error = answer.json()["error"]
    assert answer.status_code == 400
    advice = NO_STRICT_BESIDE.get(field, advice)
    assert error["message"] == f"{field}{schema}{PLACE}: {reason}{advice}"
    place = f"{field}{schema}{PLACE}"
    assert error.get("param", place) == place


def test_an_error_in_a_stream_that_has_begun(openai_client: OpenAI, own_worker: HandWorker) -> None:
    """The client raises it where the tokens end."""
    with ThreadPoolExecutor() as pool:
        asking = pool.submit(
            lambda: openai_client.completions.create(model="", prompt="Hi", stream=True)
        )
        claim = own_worker.take_next()
        own_worker.send(claim, "a")
        stream = asking.result()
    error = ErrorInfo(type="internal_error", message="it failed")
    own_worker.send(claim, "", FinishReason.ERROR, error=error)
    assert next(stream).choices[0].text == "a"
    with pytest.raises(openai.APIError, match="it failed") as raised:
        next(stream)
    assert raised.value.code == "internal_error"


def test_a_deadline_that_passes_before_the_answer_begins(
    openai_client: OpenAI, own_worker: HandWorker
) -> None:
    """408, and the client is told not to ask again by itself."""
    for stream in (False, True):
        with beside(lambda: reap_one(own_worker)), pytest.raises(openai.APIStatusError) as raised:
            openai_client.completions.create(
                model="", prompt="Hi", stream=stream, extra_body={"deadline_ms": 1}
            )
        assert raised.value.status_code == 408
        assert raised.value.code == "deadline_exceeded"
        assert raised.value.response.headers["x-should-retry"] == "false"


def test_a_cancelled_request(openai_client: OpenAI, own_worker: HandWorker) -> None:
    """Somebody else's doing; asking again is not what the client should do by itself."""
    removing = beside(lambda: own_worker.queue.remove(waiting_id(own_worker)))
    with removing, pytest.raises(openai.ConflictError) as raised:
        complete(openai_client)
    assert raised.value.code == "cancelled"
    assert raised.value.response.headers["x-should-retry"] == "false"


def test_a_request_that_was_given_up(openai_client: OpenAI, own_worker: HandWorker) -> None:
    """Another run of it would crash further workers, so no client is to try it by itself."""
    error = ErrorInfo(type="dead_letter", message="it crashed 3 workers")
    with failing(own_worker, error), pytest.raises(openai.InternalServerError) as raised:
        complete(openai_client)
    assert raised.value.code == "dead_letter"
    assert raised.value.response.headers["x-should-retry"] == "false"


def test_a_batch_that_is_over(openai_client: OpenAI, redis_url: str) -> None:
    """The batch cannot be cancelled, however often the client tries."""
    record = new_batch("/v1/completions", "file-1", ApiKey(name="web"))

    async def put_in() -> None:
        async with redis.asyncio.Redis.from_url(as_role("jobs", redis_url)) as connection:
            await Batches(AsyncRequestQueue(connection)).add(record)
            await Batches(AsyncRequestQueue(connection)).end(record.id, "completed")

    asyncio.run(put_in())
    with pytest.raises(openai.ConflictError) as raised:
        openai_client.batches.cancel(record.id)
    assert raised.value.code == "batch_over"
    assert raised.value.response.headers["x-should-retry"] == "false"


def test_a_full_queue(openai_client: OpenAI, own_worker: HandWorker) -> None:
    """With the time after which to ask again, in whole seconds."""
    own_worker.redis.hset(KEYS.config, "max_pending", 1)
    own_worker.redis.zadd(KEYS.pending, {"somebody": 1})
    with pytest.raises(openai.RateLimitError) as raised:
        complete(openai_client)
    assert raised.value.code == "queue_full"
    assert int(raised.value.response.headers["Retry-After"]) >= 1


def test_no_worker_and_no_wish_to_wait(openai_client: OpenAI, own_worker: HandWorker) -> None:
    """By a field or a header; then nothing is enqueued."""
    with pytest.raises(openai.InternalServerError) as raised:
        complete(openai_client, wait_for_worker=False)
    assert raised.value.status_code == 503
    assert raised.value.code == "no_worker"
    assert raised.value.response.headers["Retry-After"]
    with pytest.raises(openai.InternalServerError):
        openai_client.completions.create(
            model="", prompt="Hi", extra_headers={"X-Wait-For-Worker": "false"}
        )
    assert own_worker.queue.is_empty()


def test_a_worker_and_no_wish_to_wait(letters: OpenAI) -> None:
    assert complete(letters, wait_for_worker=False).choices


def test_redis_away() -> None:
    """503 at once, for every endpoint, and all of it works again when the server is back."""
    port = free_port()
    url = f"redis://default:secret@127.0.0.1:{port}/0"
    asked = {"prompt": "Hi"}
    with live_gateway(url) as gateway, httpx2.Client(base_url=gateway.url, timeout=30) as http:

        def check_away() -> None:
            for answer in (
                http.post("/v1/completions", json=asked),
                http.get("/v1/streams/cmpl-0197d3c2-7e6b-7f7c-9d2a-8f1e5b7c4a10"),
            ):
                assert answer.status_code == 503
                assert answer.json()["error"]["code"] == "queue_unavailable"
                assert answer.headers["Retry-After"]
            while http.get("/v1/models").status_code != 503:
                pass  # what was seen a second ago still counts
            assert http.get("/healthz").status_code == 200

        check_away()
        with EmbeddedServer(port, password="secret") as server:
            bring_in_roles(server.url)
            with live_worker(server.url):
                answer = http.post("/v1/completions", json=asked)
            assert answer.status_code == 200
            assert len(answer.json()["choices"][0]["text"]) == 16
        check_away()


def test_redis_that_takes_connections_and_says_nothing(redis_url: str) -> None:
    """503 when the time is over that the URL gives it, and all works again when it speaks."""
    port = urlsplit(redis_url).port
    assert port is not None
    with (
        closing(Network(port)) as network,
        live_gateway(f"{network.url}?socket_timeout=0.2") as gateway,
        httpx2.Client(base_url=gateway.url, timeout=None) as http,
    ):
        assert http.get("/v1/models").status_code == 200
        network.hold()
        for _ in range(2):
            for answer in (
                http.post("/v1/completions", json={"prompt": "Hi"}),
                http.get("/v1/streams/cmpl-0197d3c2-7e6b-7f7c-9d2a-8f1e5b7c4a10"),
                http.get("/v1/models"),
            ):
                assert answer.status_code == 503
                assert answer.json()["error"]["code"] == "queue_unavailable"
        assert http.get("/readyz").status_code == 503
        assert http.get("/healthz").status_code == 200
        assert 'promptq_queue_up{queue="default"} 0.0' in http.get("/metrics").text
        network.mend()
        with live_worker(redis_url):
            answer = http.post("/v1/completions", json={"prompt": "Hi"})
        assert answer.status_code == 200
        assert len(answer.json()["choices"][0]["text"]) == 16


@pytest.mark.parametrize(
    ("names", "schema", "parameters"),
    [
        ({}, "response_format.json_schema.schema", "tools[1].function.parameters"),
        (responses.NAMES, "text.format.schema", "tools[1].parameters"),
        (messages.NAMES, "output_config.format.schema", "tools[1].input_schema"),
    ],
)
def test_a_place_in_a_schema_has_the_names_of_the_endpoint(
    names: dict[str, str], schema: str, parameters: str
) -> None:
    for field, sent, named in (
        ("response_format", "response_format.json_schema.schema", schema),
        ("tools", "tools[1].function.parameters", parameters),
    ):
        message, param = in_api_names(names, f"{sent}.properties.x.not: no", field)
        assert message == f"{named}.properties.x.not: no"
        assert message.startswith(param or "-")

"""One trace from whoever asks, across the queue, to the worker: sent to a real collector's port."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx2
import pytest
import redis
from openai import OpenAI
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Status

from promptq import AsyncClient, Client
from promptq.producer.admin.timeline import Happened
from promptq.producer.http.meter import Traced
from promptq.shared.errors import RequestExistsError
from promptq.shared.protocol.keys import Keys
from promptq.shared.runtime import tracing as tracing_module
from promptq.shared.runtime.tracing import Tracing, start_tracing
from promptq.shared.settings.worker import WorkerSettings
from promptq.worker.serve.worker import Worker
from tests.producer.gateway.living import live_gateway, live_worker
from tests.support.model_free import served_model_free
from tests.support.processes import read_line, running, started
from tests.support.roles import as_role

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


class Collector:
    """Takes spans over HTTP, as an OpenTelemetry collector does."""

    def __init__(self) -> None:
        self.spans: list[Any] = []
        self.services: set[str] = set()
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                assert self.path == "/v1/traces"
                body = self.rfile.read(int(self.headers["content-length"]))
                collector.take(ExportTraceServiceRequest.FromString(body))
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self._thread.start()

    def take(self, request: ExportTraceServiceRequest) -> None:
        for resource in request.resource_spans:
            self.services |= {
                it.value.string_value
                for it in resource.resource.attributes
                if it.key == "service.name"
            }
            for scope in resource.scope_spans:
                self.spans += scope.spans

    def named(self, name: str) -> Any:
        found = [span for span in self.spans if span.name == name]
        assert len(found) == 1, [span.name for span in self.spans]
        return found[0]

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def attributes(span: Any) -> dict[str, Any]:
    found = {}
    for item in span.attributes:
        kind = item.value.WhichOneof("value")
        value = getattr(item.value, kind)
        found[item.key] = (
            [it.string_value for it in value.values] if kind == "array_value" else value
        )
    return found


@pytest.fixture
def collector() -> Iterator[Collector]:
    collector = Collector()
    yield collector
    collector.close()


def tracing_to(collector: Collector, service: str) -> Tracing:
    tracing = start_tracing(service, collector.url)
    assert tracing is not None
    return tracing


async def test_one_trace_leads_from_an_http_request_to_the_tokens(
    redis_url: str, collector: Collector
) -> None:
    import redis.asyncio
    from fastapi import FastAPI

    of_gateway, of_worker = tracing_to(collector, "gateway"), tracing_to(collector, "worker")
    app = FastAPI()
    app.add_middleware(Traced, tracing=of_gateway)
    async with (
        AsyncClient(redis_url, tracing=of_gateway) as client,
        redis.asyncio.Redis.from_url(as_role("worker", redis_url)) as connection,
    ):

        @app.post("/ask/{question}")
        async def ask(question: str) -> str:
            request_id = await client.enqueue(question, max_tokens=6, seed=3, request_id="traced")
            await client.result(request_id)
            return request_id

        served = served_model_free(step_seconds=0.01)
        worker = Worker(WorkerSettings(), served, connection, tracing=of_worker)
        await worker.start()
        try:
            transport = httpx2.ASGITransport(app=app)
            async with httpx2.AsyncClient(
                transport=transport, base_url="http://x", timeout=None
            ) as http:
                await http.post("/ask/why", headers={"traceparent": PARENT})
        finally:
            await worker.stop()
    for tracing in (of_gateway, of_worker):
        await asyncio.to_thread(tracing.close)

    assert collector.services == {"gateway", "worker"}
    http_span = collector.named("POST /ask/{question}")
    send = collector.named("send default")
    answer = collector.named("text_completion model-free")
    parts = [collector.named(name) for name in ("queue", "prefill", "decode")]
    spans = [http_span, send, answer, *parts]
    assert {span.trace_id.hex() for span in spans} == {PARENT.split("-")[1]}
    assert http_span.parent_span_id.hex() == PARENT.split("-")[2]
    assert send.parent_span_id == http_span.span_id
    assert answer.parent_span_id == send.span_id
    assert {part.parent_span_id for part in parts} == {answer.span_id}

    bounds = [(part.start_time_unix_nano, part.end_time_unix_nano) for part in parts]
    assert bounds[0][0] == answer.start_time_unix_nano
    assert bounds[2][1] == answer.end_time_unix_nano
    assert [end for _, end in bounds[:2]] == [start for start, _ in bounds[1:]]
    assert bounds[2][1] - bounds[2][0] >= 5 * 10_000_000

    told = attributes(answer)
    assert told["gen_ai.operation.name"] == "text_completion"
    assert told["gen_ai.request.model"] == told["gen_ai.response.model"] == "model-free"
    assert told["gen_ai.response.id"] == told["messaging.message.id"] == "traced"
    assert told["gen_ai.usage.input_tokens"] == 3
    assert told["gen_ai.usage.output_tokens"] == told["gen_ai.request.max_tokens"] == 6
    assert told["gen_ai.request.seed"] == 3
    assert told["gen_ai.response.finish_reasons"] == ["length"]
    assert told["promptq.worker"] == worker.worker_id
    assert attributes(send)["messaging.message.id"] == "traced"
    assert attributes(http_span)["http.response.status_code"] == 200


def test_each_call_of_the_api_is_one_trace(redis_url: str, collector: Collector) -> None:
    """From OpenAI's client on, streamed or not, with spans of their own for several answers."""
    of_worker = tracing_to(collector, "worker")
    parents = [f"00-{number:032x}-b7ad6b7169203331-01" for number in (1, 2)]
    asked: Any = {
        "model": "", "messages": [{"role": "user", "content": "Once"}], "n": 2, "max_tokens": 3,
    }  # fmt: skip
    with (
        live_gateway(redis_url, otlp_endpoint=collector.url) as gateway,
        live_worker(redis_url, tracing=of_worker),
        OpenAI(base_url=gateway.base_url, api_key="none", max_retries=0) as client,
    ):
        create = client.chat.completions.create
        whole = create(**asked, extra_headers={"traceparent": parents[0]})
        headers = {"traceparent": parents[1]}
        chunks: Any = list(create(**asked, stream=True, extra_headers=headers))
    of_worker.close()

    assert collector.services == {"promptq-gateway", "worker"}
    assert {span.trace_id.hex() for span in collector.spans} == {it.split("-")[1] for it in parents}
    for parent, completion_id in zip(parents, (whole.id, chunks[0].id), strict=True):
        _, trace_id, span_id, _ = parent.split("-")
        spans = [span for span in collector.spans if span.trace_id.hex() == trace_id]
        [of_http] = [span for span in spans if span.name == "POST /v1/chat/completions"]
        assert of_http.parent_span_id.hex() == span_id
        assert attributes(of_http)["http.response.status_code"] == 200
        sends = [span for span in spans if span.name == "send default"]
        assert {span.parent_span_id for span in sends} == {of_http.span_id}
        answers = [span for span in spans if span.name == "chat model-free"]
        ids = {f"{completion_id}:{nth}" for nth in range(2)}
        assert {attributes(span)["messaging.message.id"] for span in sends} == ids
        for answer in answers:
            told = attributes(answer)
            [send] = [it for it in sends if it.span_id == answer.parent_span_id]
            assert told["gen_ai.response.id"] == attributes(send)["messaging.message.id"]
            assert told["gen_ai.operation.name"] == "chat"
            assert told["gen_ai.response.model"] == "model-free"
            assert told["gen_ai.usage.input_tokens"] == 4
            assert told["gen_ai.usage.output_tokens"] == told["gen_ai.request.max_tokens"] == 3
            assert told["gen_ai.response.finish_reasons"] == ["length"]
            parts = [span.name for span in spans if span.parent_span_id == answer.span_id]
            assert sorted(parts) == ["decode", "prefill", "queue"]
        assert len(spans) == 1 + 2 + 2 + 2 * 3


def test_a_second_call_on_a_connection_has_a_separate_trace(
    redis_url: str, collector: Collector
) -> None:
    head = "GET /v1/models HTTP/1.1\r\nHost: localhost\r\n"
    calls = f"{head}traceparent: {PARENT}\r\n\r\n{head}Connection: close\r\n\r\n"
    with live_gateway(redis_url, otlp_endpoint=collector.url) as gateway:
        address = urlsplit(gateway.url)
        with socket.create_connection((address.hostname, address.port)) as connection:
            connection.sendall(calls.encode())
            while connection.recv(65536):
                pass
    first, second = sorted(collector.spans, key=lambda span: span.start_time_unix_nano)
    assert first.parent_span_id.hex() == PARENT.split("-")[2]
    assert second.parent_span_id == b""
    assert second.trace_id != first.trace_id


def test_a_second_attempt_and_a_preemption_are_reported(
    redis_url: str, collector: Collector
) -> None:
    """An attempt that is given back has a span, and so has the next, from its claim on."""
    of_worker = tracing_to(collector, "worker")

    def one_slot(**settings: Any) -> Any:
        served = served_model_free(max_num_seqs=1, step_seconds=0.01)
        return live_worker(redis_url, served, tracing=of_worker, **settings)

    with (
        live_gateway(redis_url, otlp_endpoint=collector.url) as gateway,
        OpenAI(base_url=gateway.base_url, api_key="none", max_retries=0) as client,
        Client(redis_url) as queue,
        redis.Redis.from_url(redis_url) as connection,
    ):
        with one_slot(drain_seconds=0):
            stream = client.completions.create(
                model="", prompt="Once", max_tokens=3000, stream=True,
                extra_body={"priority": 5}, extra_headers={"traceparent": PARENT},
            )  # fmt: skip
            slow = next(stream).id
        with one_slot():
            next(event for event in queue.stream(slow) if event.attempt == 2)
            client.completions.create(
                model="", prompt="Now", max_tokens=2, extra_body={"priority": -5}
            )
            [(latest, _)] = connection.xrevrange(Keys().tokens(slow), count=1)
            next(queue.stream(slow, from_index=int(latest.split(b"-")[0])))
            stream.close()
            assert queue.result(slow, check=False).finish_reason == "cancelled"
        moments = {it.what: it.at for it in queue.timeline(slow).moments}
    of_worker.close()

    trace_id = bytes.fromhex(PARENT.split("-")[1])
    spans = [span for span in collector.spans if span.trace_id == trace_id]
    [send] = [span for span in spans if span.name == "send default"]
    first, second = sorted(
        (span for span in spans if span.name == "text_completion model-free"),
        key=lambda span: attributes(span)["promptq.attempt"],
    )
    assert first.parent_span_id == second.parent_span_id == send.span_id
    assert attributes(first)["gen_ai.response.finish_reasons"] == ["given_back"]
    assert attributes(second)["gen_ai.response.finish_reasons"] == ["cancelled"]
    assert [attributes(it)["promptq.attempt"] for it in (first, second)] == [1, 2]
    assert first.start_time_unix_nano == moments[Happened.ENQUEUED] * 1_000_000
    assert second.start_time_unix_nano == moments[Happened.CLAIMED] * 1_000_000
    assert [event.name for event in second.events] == ["preempted", "resumed"]
    assert attributes(second)["promptq.preemptions"] == 1
    assert attributes(first)["promptq.worker"] != attributes(second)["promptq.worker"]


def test_the_command_sends_what_is_left_when_it_ends(redis_url: str, collector: Collector) -> None:
    """A plain client's trace context is enough; what is none is ignored, not refused."""
    url = as_role("worker", redis_url)
    command = [sys.executable, "-m", "promptq.worker", "--model", "model-free", "--redis", url]
    environment = {**os.environ, "OTEL_EXPORTER_OTLP_ENDPOINT": collector.url}
    with (
        running(*command, env=environment, stdout=subprocess.PIPE, text=True) as process,
        Client(redis_url) as client,
    ):
        assert read_line(process).startswith("ready")
        messages = [{"role": "user", "content": "x"}]
        context = {"traceparent": PARENT}
        client.generate(messages=messages, max_tokens=2, trace_context=context)
        client.generate("x", max_tokens=2, trace_context={"traceparent": "nonsense"})
        failed = client.enqueue("x", max_tokens=7000, trace_context=context)
        next(iter(client.stream(failed)))
        client.cancel(failed)
        client.result(failed)
        process.terminate()
        assert process.wait() == 0
    assert collector.services == {"promptq-worker"}
    chat = collector.named("chat model-free")
    assert chat.trace_id.hex() == PARENT.split("-")[1]
    assert chat.parent_span_id.hex() == PARENT.split("-")[2]
    others = [it for it in collector.spans if it.name == "text_completion model-free"]
    reasons = {
        it.trace_id == chat.trace_id: attributes(it)["gen_ai.response.finish_reasons"]
        for it in others
    }
    assert reasons == {True: ["cancelled"], False: ["length"]}


def test_a_collector_that_does_not_answer_keeps_no_process_from_its_end(
    collector: Collector, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Spans that were not sent in time are lost, and the exporter still waits."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_TIMEOUT", "5")
    monkeypatch.setattr(tracing_module, "_CLOSE_SECONDS", 0.05)
    asked, may_answer = threading.Event(), threading.Event()

    def hang(_: object) -> None:
        asked.set()
        may_answer.wait()

    monkeypatch.setattr(collector, "take", hang)
    tracing = tracing_to(collector, "worker")
    tracing.tracer.start_span("a").end()
    tracing.close()
    asked.wait()
    failures = caplog.messages
    may_answer.set()
    assert failures == []


def test_a_context_that_a_request_brings_is_the_parent_of_its_enqueueing(
    redis_url: str, collector: Collector
) -> None:
    tracing = tracing_to(collector, "producer")
    with Client(redis_url, tracing=tracing) as client:
        request_id = client.enqueue("x", trace_context={"traceparent": PARENT})
        payload = json.loads(client.timeline(request_id).payload)
    tracing.close()
    send = collector.named("send default")
    assert send.trace_id.hex() == PARENT.split("-")[1]
    assert send.parent_span_id.hex() == PARENT.split("-")[2]
    carried = f"00-{send.trace_id.hex()}-{send.span_id.hex()}-01"
    assert payload["trace_context"] == {"traceparent": carried}


def test_an_enqueue_that_fails_is_a_span_that_says_so(redis_url: str, collector: Collector) -> None:
    tracing = tracing_to(collector, "producer")
    with Client(redis_url, tracing=tracing) as client:
        client.enqueue("x", request_id="twice")
        with pytest.raises(RequestExistsError):
            client.enqueue("x", request_id="twice")
    tracing.close()
    errors = [attributes(span).get("error.type") for span in collector.spans]
    assert errors == [None, "RequestExistsError"]


@pytest.mark.parametrize("fault", ["fails", "breaks"])
def test_an_attempt_that_fails_is_a_span_that_says_so(
    redis_url: str, collector: Collector, tmp_path: Path, fault: str
) -> None:
    """Be it the request's own failure, or the engine's, after which it goes back."""
    told = {"FAULT": fault, "OTEL_EXPORTER_OTLP_ENDPOINT": collector.url}
    with (
        started(tmp_path, redis_url, module="tests.faults.worker.faulty_worker", **told) as worker,
        Client(redis_url) as client,
    ):
        client.generate("x", max_tokens=2)
        request_id = client.enqueue("!", max_tokens=2)
        if fault == "fails":
            result = client.result(request_id, check=False)
            assert result.error is not None
            assert result.error.type == "internal_error"
            worker.terminate()
        worker.wait()
    answers = [it for it in collector.spans if it.name == "text_completion model-free"]
    spans = {attributes(it)["gen_ai.response.id"] == request_id: it for it in answers}
    assert spans[True].status.code == Status.STATUS_CODE_ERROR
    assert attributes(spans[True])["error.type"] == "internal_error"
    assert spans[False].status.code == Status.STATUS_CODE_UNSET
    assert "error.type" not in attributes(spans[False])


def test_everything_works_without_the_extra_and_a_request_for_traces_gets_an_error() -> None:
    """Off, nothing is looked for, and payloads are what they were."""
    script = """
import sys
for name in ("sdk", "exporter"):  # as if not installed; fastapi brings the rest
    sys.modules[f"opentelemetry.{name}"] = None
import promptq.producer.clients.sync_client, promptq.producer.gateway.app
import promptq.worker.serve.worker, promptq.worker.command
from promptq.shared.errors import ConfigurationError
from promptq.shared.protocol.request import Request
from promptq.shared.runtime.tracing import start_tracing
assert start_tracing("x") is None
assert "trace" not in Request.build({"prompt": "x"}).to_payload()
try:
    start_tracing("x", "http://127.0.0.1:1")
except ConfigurationError as error:
    print(error)
"""
    environment = {name: it for name, it in os.environ.items() if not name.startswith("OTEL_")}
    command = [sys.executable, "-c", script]
    said = subprocess.run(command, check=True, env=environment, capture_output=True, text=True)
    assert said.stdout.count("whl)[tracing]") == 1

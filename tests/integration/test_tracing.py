"""One trace from whoever asks, across the queue, to the worker: sent to a real collector's port."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx2
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from producer import AsyncClient, Client
from producer.gateway.http_tracing import trace_http
from shared.errors import RequestExistsError
from shared.settings import Settings
from shared.tracing import Tracing, start_tracing
from tests.helpers import served_model_free
from tests.roles import as_role
from worker.service import Worker

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
    app = trace_http(FastAPI(), of_gateway)
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
        worker = Worker(Settings(), served, connection, tracing=of_worker)
        await worker.start()
        try:
            transport = httpx2.ASGITransport(app=app)
            async with httpx2.AsyncClient(transport=transport, base_url="http://x") as http:
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


def test_the_command_sends_what_is_left_when_it_ends(redis_url: str, collector: Collector) -> None:
    """A plain client's trace context is enough; what is none is ignored, not refused."""
    url = as_role("worker", redis_url)
    command = [sys.executable, "-m", "worker", "--model", "model-free", "--redis", url]
    environment = {**os.environ, "OTEL_EXPORTER_OTLP_ENDPOINT": collector.url}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    with Client(redis_url) as client:
        messages = [{"role": "user", "content": "x"}]
        context = {"traceparent": PARENT}
        client.generate(messages=messages, max_tokens=2, trace_context=context)
        client.generate("x", max_tokens=2, trace_context={"traceparent": "nonsense"})
        failed = client.enqueue("x", max_tokens=7000, trace_context=context)
        next(iter(client.stream(failed)))
        client.cancel(failed)
        client.result(failed)
    process.send_signal(signal.SIGTERM)
    process.communicate()
    assert process.returncode == 0
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


def test_all_works_without_the_extra_and_who_asks_for_traces_is_told() -> None:
    """Off, nothing is looked for, and payloads are what they were."""
    script = """
import sys
for name in ("sdk", "exporter"):  # as if not installed; fastapi brings the rest
    sys.modules[f"opentelemetry.{name}"] = None
import producer, worker.service, worker.__main__, producer.gateway.app
from shared.errors import ConfigurationError
from shared.schemas import Request
from shared.tracing import start_tracing
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
    assert said.stdout.strip().endswith("pip install 'promptq[tracing]'")

"""Structured output through Redis, by a real worker with the shipped model."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

import jsonschema
import pytest
import redis.asyncio

from promptq.shared.protocol.request import RequestState
from promptq.shared.queue.request_queue import AsyncRequestQueue
from tests.support.model_free import finished, running_worker
from tests.support.requests import async_put
from tests.support.roles import AsyncQueueClient, as_role
from tests.worker.text.grammars.structured import SCHEMAS, TOOLS, compilations, json_schema, served

TEXTS = ["Yes, please.", 'No, "never".']


async def put(queue: AsyncRequestQueue, **fields: Any) -> str:
    return await async_put(queue, **{"temperature": 0.7, "max_tokens": 200, **fields})


async def test_answers_match_and_a_refused_schema_fails_its_request_alone(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, texts = served(), compilations(monkeypatch)
    async with redis.asyncio.Redis.from_url(redis_url) as client:
        queue = AsyncRequestQueue(client)
        async with running_worker(redis_url, model):
            ids = {
                name: await put(queue, seed=n, response_format=json_schema(schema))
                for n, (name, schema) in enumerate(SCHEMAS.items())
            }
            refused = await put(queue, response_format=json_schema({"not": {"type": "string"}}))
            chat = [{"role": "user", "content": "Hello"}]
            call = await put(queue, messages=chat, tools=TOOLS, tool_choice="required")
            told = await put(queue, response_format={"type": "regex", "regex": r"[A-Z]{3}-\d/\d"})
            lark = {"type": "grammar", "grammar": 'start: ("a" | NUMBER)~4\nNUMBER: /[0-9]/'}
            derived = await put(queue, response_format=lark)
            chosen = await put(queue, response_format={"type": "choice", "choice": TEXTS})
            again = await put(queue, seed=50, response_format=json_schema(SCHEMAS["enum"]))
            for name, request_id in ids.items():
                result = await finished(queue, request_id)
                assert result["finish_reason"] == "stop"
                jsonschema.validate(json.loads(result["text"]), SCHEMAS[name])
            error = (await finished(queue, refused))["error"]
            assert error["type"] == "unsupported"
            assert error["message"] == (
                "response_format.json_schema.schema.not: not cannot be enforced; leave it out, or"
                ' send "strict": false, which ignores it'
            )
            called = json.loads((await finished(queue, call))["text"])
            assert called["name"] in ("get_weather", "stop_all")
            jsonschema.validate(json.loads((await finished(queue, again))["text"]), SCHEMAS["enum"])
            assert re.fullmatch(r"[A-Z]{3}-\d/\d", (await finished(queue, told))["text"])
            assert (await finished(queue, chosen))["text"] in TEXTS
            assert re.fullmatch("[a0-9]{4}", (await finished(queue, derived))["text"])
    compiled = [text for text in texts if '"not"' not in text]
    assert len(compiled) == len(SCHEMAS) + 5, "each once, and the refused one without its fault"


async def test_another_worker_goes_on_in_the_middle(redis_url: str) -> None:
    schema = {"type": "array", "items": SCHEMAS["pattern"], "minItems": 8, "maxItems": 8}
    fields: dict[str, Any] = {"seed": 9, "response_format": json_schema(schema), "max_tokens": 400}
    async with AsyncQueueClient.from_url(as_role("", redis_url)) as client:
        queue = AsyncRequestQueue(client)
        async with running_worker(redis_url, served()):
            whole = await finished(queue, await put(queue, **fields))
        interrupted = await put(queue, **fields)
        async with running_worker(redis_url, served(), drain_seconds=0.0):
            while await client.xlen(queue.keys.tokens(interrupted)) < 10:
                await asyncio.sleep(0.001)
        assert await queue.state(interrupted) is RequestState.WAITING
        async with running_worker(redis_url, served()):
            result = await finished(queue, interrupted)
    assert result["stats"]["attempts"] == 2
    assert result["token_ids"] == whole["token_ids"]
    jsonschema.validate(json.loads(result["text"]), schema)

"""Schemas through a real vLLM and a real llama.cpp: the native engine's tokens, whoever dies.

Skipped where the servers are not built.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from promptq import Client
from promptq.worker.shipped import MODEL_DIR
from tests.programs.engines.real_servers import GREEDY, RealServer
from tests.support.processes import started
from tests.support.roles import as_role
from tests.worker.text.grammars.structured import (
    SCHEMAS,
    TOOLS,
    closed,
    json_schema,
    prepare,
    run,
    served,
)

STORY = closed(
    hero={"type": "string", "minLength": 20, "maxLength": 60},
    place={"type": "string", "minLength": 20, "maxLength": 60},
    friends={"type": "array", "items": {"type": "string"}, "minItems": 3, "maxItems": 3},
)
"""The model writes texts, which masks of many tokens bound."""
CHAT = [{"role": "user", "content": "Who is the hero?"}]
REQUESTS: list[dict[str, Any]] = [
    *({"prompt": "Once", "response_format": json_schema(it)} for it in [STORY, *SCHEMAS.values()]),
    {"prompt": "One day", "response_format": json_schema(STORY), "bad_words": ["a", "the"]},
    {"prompt": "One day", "bad_words": ["was", " a", " girl"]},
    {"messages": CHAT, "tools": TOOLS, "tool_choice": "required"},
]


@pytest.fixture(scope="module")
def wanted() -> list[list[int]]:
    """The native engine's tokens of each request."""
    native = served()
    return [
        it.token_ids for it in run(native, *(prepare(native, **it, **GREEDY) for it in REQUESTS))
    ]


def test_greedy_tokens_are_the_native_engines_whichever_worker_dies(
    redis_url: str, tmp_path: Path, server: RealServer, wanted: list[list[int]]
) -> None:
    options = ("--engine", server.name, "--upstream", server.url, "--model", str(MODEL_DIR))
    options += ("--dtype", "float32", "--lease-ms", "2000", "--max-crashes", "50")
    with Client(as_role("operator", redis_url)) as client:
        with started(tmp_path, redis_url, *options) as first:
            ids = [client.enqueue(**fields, **GREEDY) for fields in REQUESTS]
            for event in client.stream(ids[0]):
                if event.index >= 10:
                    break
            first.process.kill()
        with started(tmp_path, redis_url, *options):
            results = [client.result(request_id) for request_id in ids]
    for fields, tokens, result in zip(REQUESTS, wanted, results, strict=True):
        assert result.token_ids == tokens, fields
        if "response_format" in fields and result.finish_reason == "stop":
            schema = fields["response_format"]["json_schema"]["schema"]
            jsonschema.validate(json.loads(result.text), schema)

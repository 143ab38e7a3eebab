"""curl, as people try an API, and what browsers, probes and other servers' clients ask."""

from __future__ import annotations

import json
import subprocess
from typing import Any

import trying
from trying import attempt, is_tale, same

CHAT: Any = {"messages": trying.MESSAGES, "max_tokens": trying.MAX_TOKENS, "temperature": 0}

_CURL = ["curl", "-sS", "-N", "-w", "\n%{http_code}"]


def curl(path: str, *options: str, body: Any = None, key: str = trying.KEY) -> tuple[int, str]:
    """The status and the body of an answer."""
    data = [] if body is None else ["-d", json.dumps(body)]
    authorization = ["-H", f"Authorization: Bearer {key}"] if key else []
    done = subprocess.run(
        [*_CURL, f"{trying.ROOT_URL}{path}", *data, *authorization, *options],
        capture_output=True,
        text=True,
        check=True,
    )
    answer, _, status = done.stdout.rpartition("\n")
    return int(status), answer


def fetch(path: str, *options: str, **fields: Any) -> Any:
    status, answer = curl(path, *options, **fields)
    same("status", (status, "" if status == 200 else answer), (200, ""))
    return json.loads(answer)


@attempt("chat without Content-Type")
def _() -> str:
    got, wanted = fetch("/v1/chat/completions", body=CHAT), trying.chat()
    same("text", got["choices"][0]["message"]["content"], wanted.text)
    return wanted.text


@attempt("streamed chat with usage")
def _() -> str:
    body = {**CHAT, "stream": True, "stream_options": {"include_usage": True}}
    status, answer = curl("/v1/chat/completions", body=body)
    same("status", status, 200)
    data = [line[6:] for line in answer.splitlines() if line.startswith("data: ")]
    same("end", data.pop(), "[DONE]")
    chunks = [json.loads(it) for it in data]
    text = "".join(it["choices"][0]["delta"].get("content") or "" for it in chunks if it["choices"])
    same("text", text, trying.chat().text)
    same("usage", chunks[-1]["usage"]["completion_tokens"], trying.chat().usage[1])
    return f"{len(chunks)} chunks"


@attempt("completion")
def _() -> str:
    body = {"prompt": trying.PROMPT, "max_tokens": trying.MAX_TOKENS, "temperature": 0}
    got, wanted = fetch("/v1/completions", body=body), trying.completion()
    same("text", got["choices"][0]["text"], wanted.text)
    return wanted.text


@attempt("forced tool call")
def _() -> str:
    body = {**CHAT, "max_tokens": 200, "tools": [trying.TOOL], "tool_choice": "required"}
    [call] = fetch("/v1/chat/completions", body=body)["choices"][0]["message"]["tool_calls"]
    is_tale(call["function"]["arguments"])
    return call["function"]["arguments"]


@attempt("embeddings")
def _() -> str:
    got = fetch("/v1/embeddings", body={"model": trying.MODEL, "input": trying.QUESTION})
    assert len(got["data"][0]["embedding"]) > 1
    return f"{len(got['data'][0]['embedding'])} dimensions"


@attempt("error: no such model, in a stream too")
def _() -> str:
    for stream in (False, True):
        body = {**CHAT, "model": trying.UNKNOWN, "stream": stream}
        status, answer = curl("/v1/chat/completions", body=body)
        same("status", status, 404)
        assert trying.MODEL in json.loads(answer)["error"]["message"]
    return answer


@attempt("error: wrong API key")
def _() -> str:
    status, answer = curl("/v1/models", key="wrong")
    same("status", status, 401)
    return json.loads(answer)["error"]["message"]

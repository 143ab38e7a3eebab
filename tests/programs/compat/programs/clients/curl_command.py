"""curl: how people try an API, and the calls of browsers, probes and other servers' clients."""

from __future__ import annotations

import json
import subprocess
from typing import Any

import trying
from trying import attempt, is_tale, same

CHAT: Any = {"messages": trying.MESSAGES, "max_tokens": trying.MAX_TOKENS, "temperature": 0}

_CURL = ["curl", "-sS", "-N", "-w", "\n%{http_code}"]


def curl(path: str, *options: str, body: Any = None, key: str = trying.KEY) -> tuple[int, str]:
    """Returns the status and the body of an answer."""
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


def message_of(wanted: int, path: str, *options: str) -> str:
    """Returns the message of an error with the status `wanted`."""
    status, answer = curl(path, *options)
    same("status", status, wanted)
    return str(json.loads(answer)["error"]["message"])


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


def try_path(what: str, path: str, *options: str, status: int = 200) -> None:
    @attempt(what)
    def _() -> str:
        got, answer = curl(path, *options, key="")
        same("status", (got, "" if got == status else answer[-200:]), (status, ""))
        return answer[:80]


KEY = ("-H", f"Authorization: Bearer {trying.KEY}")
for header in ("x-api-key", "api-key"):
    try_path(f"API key in the header {header}", "/v1/models", "-H", f"{header}: {trying.KEY}")
try_path("/health, as probes for vLLM and llama.cpp ask", "/health")
try_path("/v1/models/ with a slash at the end", "/v1/models/", *KEY)
chat = ("-d", json.dumps({"messages": trying.MESSAGES, "max_tokens": 4}))
try_path("/v1/chat/completions/ with a slash", "/v1/chat/completions/", "-L", *KEY, *chat)
try_path("HEAD /v1/models", "/v1/models", "--head", "-o", "/dev/null", *KEY)
try_path("HEAD /healthz, as monitors ask", "/healthz", "--head", "-o", "/dev/null")
try_path("/favicon.ico, as browsers ask", "/favicon.ico")


@attempt("error: a path that there is not is JSON, and names what there is")
def _() -> str:
    message = message_of(404, "/v1/no-such-path")
    assert "/v1/no-such-path" in message, message
    return message


@attempt("error: a base URL without /v1 is told the right path")
def _() -> str:
    message = message_of(404, "/chat/completions", *chat)
    assert "do you mean /v1/chat/completions?" in message, message
    return message


@attempt("error: GET where POST is right says so")
def _() -> str:
    message = message_of(405, "/v1/chat/completions")
    assert "POST" in message, message
    return message


@attempt("a page of another site may ask, as its browser checks (CORS)")
def _() -> str:
    options = ["-X", "OPTIONS", "-i", "-H", "Origin: https://app.example"]
    options += ["-H", "Access-Control-Request-Method: POST"]
    options += ["-H", "Access-Control-Request-Headers: authorization,content-type"]
    status, answer = curl("/v1/chat/completions", *options, key="")
    assert "access-control-allow-origin" in answer.lower(), f"{status} {answer[-120:]}"
    return str(status)

"""curl, asking what browsers, probes and programs for other servers ask."""

from __future__ import annotations

import json
import subprocess
from typing import Any

import trying
from trying import attempt, same

CHAT: Any = {"messages": trying.MESSAGES, "max_tokens": 4}
KEY = ("-H", f"Authorization: Bearer {trying.KEY}")


def curl(path: str, *options: str) -> tuple[int, str]:
    """The status and the body of an answer."""
    command = ["curl", "-sS", "-w", "\n%{http_code}", f"{trying.ROOT_URL}{path}", *options]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    answer, _, status = done.stdout.rpartition("\n")
    return int(status), answer


def try_path(what: str, path: str, *options: str, status: int = 200) -> None:
    @attempt(what)
    def _() -> str:
        got, answer = curl(path, *options)
        same("status", (got, "" if got == status else answer[-200:]), (status, ""))
        return answer[:80]


for header in ("x-api-key", "api-key"):
    try_path(f"API key in the header {header}", "/v1/models", "-H", f"{header}: {trying.KEY}")
try_path("/health, as probes for vLLM and llama.cpp ask", "/health")
try_path("/v1/models/ with a slash at the end", "/v1/models/", *KEY)
chat = ("-d", json.dumps(CHAT))
try_path("/v1/chat/completions/ with a slash", "/v1/chat/completions/", "-L", *KEY, *chat)
try_path("HEAD /v1/models", "/v1/models", "--head", "-o", "/dev/null", *KEY)
try_path("HEAD /healthz, as monitors ask", "/healthz", "--head", "-o", "/dev/null")
try_path("/favicon.ico, as browsers ask", "/favicon.ico")


@attempt("error: a path that there is not is JSON, and names what there is")
def _() -> str:
    status, answer = curl("/v1/no-such-path", *KEY)
    same("status", status, 404)
    message = json.loads(answer)["error"]["message"]
    assert "/v1/no-such-path" in message, message
    return str(message)


@attempt("error: a base URL without /v1 is told the right path")
def _() -> str:
    status, answer = curl("/chat/completions", *KEY, *chat)
    same("status", status, 404)
    message = json.loads(answer)["error"]["message"]
    assert "do you mean /v1/chat/completions?" in message, message
    return str(message)


@attempt("error: GET where POST is right says so")
def _() -> str:
    status, answer = curl("/v1/chat/completions", *KEY)
    same("status", status, 405)
    message = json.loads(answer)["error"]["message"]
    assert "POST" in message, message
    return str(message)


@attempt("a page of another site may ask, as its browser checks (CORS)")
def _() -> str:
    options = ["-X", "OPTIONS", "-i", "-H", "Origin: https://app.example"]
    options += ["-H", "Access-Control-Request-Method: POST"]
    options += ["-H", "Access-Control-Request-Headers: authorization,content-type"]
    status, answer = curl("/v1/chat/completions", *options)
    assert "access-control-allow-origin" in answer.lower(), f"{status} {answer[-120:]}"
    return str(status)

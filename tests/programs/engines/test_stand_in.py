"""The stand-in (a server without a model) replies like the real servers, in all fields that a
dialect reads."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest
from pydantic_core import from_json

from tests.programs.engines.real_servers import NAMES, RealServer, real_server, why_missing
from tests.programs.stand_in_server.batch import POISON
from tests.programs.stand_in_server.starting import StandIn, stand_in_server

_IDS = [5, 6, 7, 8]
_SAMPLING = {"temperature": 0.0, "max_tokens": 3, "detokenize": False}
_GENERATE = "/inference/v1/generate"
_COMPLETIONS = "/v1/completions"
_TOKENS = {"temperature": 0.0, "max_tokens": 3, "return_token_ids": True}
PROBES: dict[str, list[tuple[str, dict[str, Any] | None]]] = {
    "vllm": [
        ("/version", None),
        ("/v1/models", None),
        ("/tokenize", {"prompt": "Hi", "add_special_tokens": False}),
        (_GENERATE, {"model": "m", "token_ids": _IDS, "sampling_params": _SAMPLING}),
        (
            _GENERATE,
            {
                "model": "m",
                "token_ids": _IDS,
                "sampling_params": {**_SAMPLING, "logprobs": 2},
                "stream": True,
            },
        ),
        (
            _GENERATE,
            {"model": "m", "token_ids": [99999], "sampling_params": _SAMPLING, "stream": True},
        ),
        (_GENERATE, {"model": "other", "token_ids": _IDS, "sampling_params": _SAMPLING}),
    ],
    "llama.cpp": [
        ("/props", None),
        ("/tokenize", {"content": "Hi"}),
        (
            "/completion",
            {"prompt": _IDS, "n_predict": 3, "temperature": 0.0, "return_tokens": True},
        ),
        (
            "/completion",
            {
                "prompt": _IDS,
                "n_predict": 3,
                "temperature": 0.0,
                "return_tokens": True,
                "stream": True,
            },
        ),
        ("/completion", {"prompt": [99999], "n_predict": 3}),
        ("/lora-adapters", None),
        ("/v1/embeddings", {"input": [_IDS]}),
        ("/v1/rerank", {"query": "a", "documents": ["b"]}),
        ("/completion", {"prompt": [5] * 2000, "n_predict": 3}),
    ],
    "sglang": [
        ("/server_info", None),
        ("/tokenize", {"prompt": "Hi", "add_special_tokens": False}),
        (_COMPLETIONS, {"model": "m", "prompt": _IDS, **_TOKENS}),
        (_COMPLETIONS, {"model": "m", "prompt": _IDS, **_TOKENS, "stream": True}),
        (_COMPLETIONS, {"model": "m", "prompt": [[0]], **_TOKENS, "stream": True}),
        (_COMPLETIONS, {"model": "m", "prompt": [0], **_TOKENS}),
        (_COMPLETIONS, {"model": "m", "prompt": _IDS, **_TOKENS, "ebnf": "?", "stream": True}),
        (_COMPLETIONS, {"model": "m", "prompt": [5] * 2000, **_TOKENS}),
    ],
}


@pytest.fixture(scope="module", params=NAMES)
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[RealServer, StandIn]]:
    if why := why_missing(request.param):
        pytest.skip(why)
    folder = tmp_path_factory.mktemp("server")
    with real_server(request.param, folder) as real, stand_in_server(request.param) as stand_in:
        yield real, stand_in


def asked(url: str, path: str, body: dict[str, Any] | None) -> tuple[int, str, list[Any]]:
    """Returns the status, the content type, and the content: one value, or the events of a
    stream."""
    answer = httpx2.get(url + path) if body is None else httpx2.post(url + path, json=body)
    kind = answer.headers["content-type"].split(";")[0]
    if kind != "text/event-stream":
        return answer.status_code, kind, [from_json(answer.content)]
    data = [line[5:].strip() for line in answer.text.splitlines() if line.startswith("data:")]
    return answer.status_code, kind, [it if it == "[DONE]" else from_json(it) for it in data]


def lacks(real: Any, ours: Any, at: str = "") -> list[str]:
    """Returns the paths of members that the stand-in formats differently from the real server, or
    invents."""
    if isinstance(ours, dict) and isinstance(real, dict):
        return [
            said
            for key, value in ours.items()
            for said in (lacks(real[key], value, f"{at}.{key}") if key in real else [f"{at}.{key}"])
        ]
    if isinstance(ours, list) and isinstance(real, list):
        return lacks(real[0], ours[0], f"{at}[0]") if ours and real else []
    numbers = (int, float)
    if isinstance(ours, numbers) and isinstance(real, numbers):
        return [] if isinstance(ours, bool) == isinstance(real, bool) else [at]
    return [] if type(ours) is type(real) else [at]


def test_it_replies_as_the_real_one_does(pair: tuple[RealServer, StandIn]) -> None:
    real, stand_in = pair
    for path, body in PROBES[real.name]:
        status, kind, events = asked(real.url, path, body)
        found = asked(stand_in.url, path, body)
        assert found[:2] == (status, kind), (path, body)
        assert len(found[2]) == len(events), (path, body)
        for one, other in zip(events, found[2], strict=True):
            assert lacks(one, other) == [], (path, body)


def test_a_stream_breaks_as_that_of_a_vllm_whose_engine_dies(
    pair: tuple[RealServer, StandIn],
) -> None:
    """The stream has status 200, and ends with an error object and `[DONE]`."""
    real, stand_in = pair
    if real.name != "vllm":
        pytest.skip("its stream ends, or has another form")
    sampling = {**_SAMPLING, "max_tokens": 900, "ignore_eos": True}
    ids = [*_IDS, POISON]  # which breaks the stand-in's stream after two tokens
    body = {"model": "m", "token_ids": ids, "sampling_params": sampling, "stream": True}
    search = ["pgrep", "-f", "VLLM::EngineCore", "--session", str(real.pid)]
    cores = subprocess.run(search, capture_output=True, text=True, check=True).stdout.split()
    ends = []
    for server in (real, stand_in):
        with httpx2.stream("POST", server.url + _GENERATE, json=body, timeout=120) as answer:
            lines = (line[5:].strip() for line in answer.iter_lines() if line.startswith("data:"))
            next(lines)
            if server is real:
                for pid in cores:
                    os.kill(int(pid), signal.SIGKILL)
            *_, last, done = lines
            ends.append((answer.status_code, sorted(from_json(last)["error"]), done))
    assert ends[0] == ends[1]
    assert ends[0][2] == "[DONE]"

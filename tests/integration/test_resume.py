"""A stream goes on in the middle: whatever becomes of a worker, the text is that of a quiet run.

The shipped model in fp32, worker processes, and a subscriber that listens all the while.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import redis

from promptq import Client
from promptq.shared.protocol.events import TokenEvent
from promptq.shared.protocol.keys import Keys
from tests.support.processes import StartedWorker, started
from tests.support.roles import as_role
from tests.support.servers import embedded_server
from tests.support.waiting import until
from tests.worker.test_refused_starts import one_sentence, run

LEASE_MS = 1500
NUM_TOKENS = 300
STORY = "Once upon a time there was a fox who"
REQUESTS: dict[str, dict[str, Any]] = {
    "greedy, logprobs": {"temperature": 0.0, "logprobs": 3, "prompt_logprobs": 2},
    "seeded": {"temperature": 1.0, "seed": 5},
    "filtered": {"temperature": 0.9, "top_p": 0.9, "top_k": 40, "min_p": 0.02, "seed": 6},
    "penalties": {
        "temperature": 0.8,
        "repetition_penalty": 1.1,
        "frequency_penalty": 0.3,
        "presence_penalty": 0.2,
        "seed": 7,
        "logprobs": 0,
    },
    "stop string late": {"temperature": 1.0, "seed": 8, "stop": ["zebra", " and the and"]},
    "min_tokens": {"temperature": 1.0, "seed": 9, "min_tokens": 250, "ignore_eos": False},
    "bad words": {"temperature": 1.0, "seed": 10, "bad_words": ["the fox", "very"]},
    "biased": {"temperature": 1.0, "seed": 11, "logit_bias": {"40": 2.0}, "logprobs": 1},
    "drafted": {"temperature": 0.0, "prompt": f"{STORY} ran. " * 12, "speculative_tokens": 7},
    "json": {
        "prompt": "List some names.",
        "seed": 12,
        "response_format": {
            "type": "json_schema",
            "json_schema": {
                "name": "names",
                "schema": {
                    "type": "array",
                    "items": {"type": "string", "pattern": "^[a-z]{6,9}$"},
                    "minItems": 30,
                    "maxItems": 30,
                },
            },
        },
    },
}
LONG_STOP = "a stop string that begins before the fault and ends behind it"
BEFORE_STOP = 8
"""Characters of text, of a few tokens; behind the stop string are about as many."""


def enqueue(client: Client, request: dict[str, Any]) -> str:
    fields = {"prompt": STORY, "max_tokens": NUM_TOKENS, "ignore_eos": True} | request
    if "response_format" in fields:
        del fields["ignore_eos"]
    return client.enqueue(fields.pop("prompt"), **fields)


def worker(
    folder: Path, url: str, *options: str, fault: str = ""
) -> AbstractContextManager[StartedWorker]:
    """A worker of the shipped model that has said it is ready."""
    fixed = ("--dtype", "float32", "--lease-ms", str(LEASE_MS))
    module = "tests.faults.worker.faulty_worker" if fault else "promptq.worker"
    return started(folder, url, *fixed, *options, module=module, FAULT=fault)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with embedded_server() as default:
        yield as_role("producer", default)


@dataclass
class Quiet:
    """Returns the output of each request in a quiet run."""

    requests: dict[str, dict[str, Any]]
    expected: dict[str, list[Any]]


@pytest.fixture(scope="module")
def quiet(url: str, tmp_path_factory: pytest.TempPathFactory) -> Quiet:
    with (
        worker(tmp_path_factory.mktemp("quiet"), url),
        Client(url) as client,
        ThreadPoolExecutor(len(REQUESTS)) as threads,
    ):
        ids = {name: enqueue(client, request) for name, request in REQUESTS.items()}
        streams = {name: threads.submit(read, client, it) for name, it in ids.items()}
        expected = {name: told(stream.result()) for name, stream in streams.items()}
        text = expected["seeded"][0]
        with_stop = REQUESTS["seeded"] | {"stop": text[BEFORE_STOP:-BEFORE_STOP], "logprobs": 1}
        expected[LONG_STOP] = told(read(client, enqueue(client, with_stop)))
        assert expected[LONG_STOP][0] == text[:BEFORE_STOP]
        assert expected[LONG_STOP][-1] == "stop"
        return Quiet(REQUESTS | {LONG_STOP: with_stop}, expected)


def read(client: Client, request_id: str) -> list[TokenEvent]:
    return list(client.stream(request_id))


def told(events: list[TokenEvent]) -> list[Any]:
    """Returns what a subscriber sees, however the text was cut into events and attempts."""
    return [
        "".join(event.text for event in events),
        [token_id for event in events for token_id in event.token_ids],
        [item for event in events for item in event.logprobs or ()],
        [(event.index, event.prompt_logprobs) for event in events if event.prompt_logprobs],
        events[-1].finish_reason,
    ]


def wait_for_progress(server: redis.Redis, ids: list[str]) -> None:
    """Until every request has some tokens, and none of them all."""
    keys = Keys("default")
    until(lambda: all(server.xlen(keys.tokens(request_id)) >= 5 for request_id in ids))


@pytest.mark.matrix(2)
@pytest.mark.parametrize("fault", ["killed", "frozen", "redeployed", "short of memory"])
def test_the_whole_text_is_that_of_a_quiet_run(
    fault: str, url: str, quiet: Quiet, tmp_path: Path
) -> None:
    own_fault = "short-of-memory" if fault == "short of memory" else ""
    with (
        redis.Redis.from_url(as_role("", url)) as server,
        Client(url) as client,
        ThreadPoolExecutor(len(quiet.requests)) as threads,
    ):
        server.flushall()
        with worker(tmp_path, url, "--drain-seconds", "0", fault=own_fault) as victim:
            ids = {name: enqueue(client, request) for name, request in quiet.requests.items()}
            streams = {name: threads.submit(read, client, it) for name, it in ids.items()}
            if fault == "short of memory":
                assert victim.wait() == 1
            else:
                wait_for_progress(server, list(ids.values()))
            if fault == "killed":
                victim.process.kill()
            elif fault == "frozen":
                victim.process.send_signal(signal.SIGSTOP)
            elif fault == "redeployed":
                victim.terminate()
                assert victim.wait() == 0
            with worker(tmp_path, url) as other:
                if fault == "frozen":
                    wake = threading.Timer(
                        2 * LEASE_MS / 1000, victim.process.send_signal, [signal.SIGCONT]
                    )
                    wake.start()
                events = {name: stream.result() for name, stream in streams.items()}
                if fault == "frozen":
                    wake.join()
                    victim.terminate()  # once it found that it holds nothing
                    assert victim.wait() == 0
                other.terminate()
                assert other.wait() == 0
        for name, found in events.items():
            assert told(found) == quiet.expected[name], name
            ends = [event.end for event in found]
            assert [event.index for event in found] == [0, *ends[:-1]], name
            attempts = [event.attempt for event in found]
            assert attempts == sorted(attempts), name
        carried_on = [
            name for name, found in events.items() if found[0].attempt < found[-1].attempt
        ]
        assert len(carried_on) > len(ids) // 2, "the fault came too late"
        assert LONG_STOP in carried_on
        for name, request_id in ids.items():
            log = server.xrange(Keys("default").tokens(request_id))
            assert log[-1][0].endswith(b"-1"), "nothing was written behind the last event"
            assert len(log) == len(events[name])


def test_a_stream_of_quantized_weights_goes_on_exactly(url: str, tmp_path: Path) -> None:
    """And a worker with other settings does not serve the queue."""
    quantized = ("--dtype", "bfloat16", "--quantization", "int4", "--kv-cache-dtype", "int8")
    options = ("--lease-ms", str(LEASE_MS), "--drain-seconds", "0")
    asked = REQUESTS["biased"]
    with (
        redis.Redis.from_url(as_role("", url)) as server,
        Client(url) as client,
        ThreadPoolExecutor(1) as threads,
    ):
        server.flushall()
        with started(tmp_path, url, *quantized, *options) as victim:
            expected = told(read(client, enqueue(client, asked)))
            request_id = enqueue(client, asked)
            stream = threads.submit(read, client, request_id)
            wait_for_progress(server, [request_id])
            victim.process.kill()
            with started(tmp_path, url, *quantized, *options):
                events = stream.result()
        refused = one_sentence(run("--redis", as_role("worker", url)))
    assert "-int4-kv-int8), this worker has" in refused
    assert "needs another queue (--queue)" in refused
    assert told(events) == expected
    assert events[0].attempt < events[-1].attempt, "the fault came too late"


def test_a_prompt_is_scored_once_though_its_worker_was_killed(url: str, tmp_path: Path) -> None:
    """In the middle of it, before anything was sent; and the same with a cached prompt."""
    asked: dict[str, Any] = {
        "prompt": f"{STORY} ran. " * 90,
        "max_tokens": 3,
        "prompt_logprobs": 2,
        "temperature": 0.0,
    }
    steps = ("--max-num-batched-tokens", "128")
    with redis.Redis.from_url(as_role("", url)) as server, Client(url) as client:
        server.flushall()
        with worker(tmp_path, url, *steps, fault="killed-in-prefill") as victim:
            request_id = enqueue(client, asked)
            assert victim.wait() == -signal.SIGKILL
        assert server.xlen(Keys("default").tokens(request_id)) == 0
        with worker(tmp_path, url, *steps):
            events = read(client, request_id)
            again = read(client, enqueue(client, asked))
            plain = read(client, enqueue(client, asked | {"prompt_logprobs": None}))
            result = client.result(request_id)
    assert [event.prompt_logprobs is not None for event in events] == [True, False, False]
    told = events[0].prompt_logprobs
    assert told is not None
    assert told[0] is None
    assert result.stats is not None
    assert result.stats.attempts == 2
    assert len(told) == result.usage.prompt_tokens > 500
    assert again[0].prompt_logprobs == result.prompt_logprobs == told
    assert again[0].prompt_texts == result.prompt_texts
    assert "".join(again[0].prompt_texts or ()) == asked["prompt"]
    assert again[-1].usage is not None
    assert again[-1].usage.cached_tokens == 0, "a cache has no logits"
    assert plain[-1].usage is not None
    assert plain[-1].usage.cached_tokens > 500

"""A real vLLM, llama.cpp and SGLang return the tokens of transformers, whichever process dies.

`python -m tests engines` runs these tests, after it has built the servers. Skipped where they are
not built.
"""

from __future__ import annotations

import os
import random
import signal
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from promptq import Client
from promptq.worker.shipped import MODEL_DIR
from tests.programs.chaos.processes.engines import Engines
from tests.programs.chaos.schedule import Fault
from tests.programs.engines.real_servers import (
    GREEDY,
    NUM_TOKENS,
    RealServer,
    logprobs_of,
    undisturbed,
    why_missing,
)
from tests.support.processes import StartedWorker, started
from tests.support.roles import as_role
from tests.support.waiting import until

PROMPTS = [
    f"{beginning} {thing}"
    for beginning in ("Once upon a time", "The old", "One day a")
    for thing in ("king", "fox", "teapot", "girl")
]


def worker(
    server: RealServer, tmp_path: Path, redis_url: str
) -> AbstractContextManager[StartedWorker]:
    return started(
        tmp_path,
        redis_url,
        *("--engine", server.name, "--upstream", server.url, "--dtype", "float32"),
        *("--model", str(MODEL_DIR), "--lease-ms", "2000", "--max-crashes", "50"),
    )


def assert_tokens_of_transformers(client: Client, ids: list[str]) -> None:
    """Checks that each request has the tokens of transformers."""
    for prompt, request_id in zip(PROMPTS, ids, strict=True):
        result = client.result(request_id)
        assert result.token_ids == undisturbed(prompt, NUM_TOKENS), prompt


def test_greedy_tokens_are_those_of_transformers(
    redis_url: str, tmp_path: Path, server: RealServer
) -> None:
    operator = Client(as_role("operator", redis_url))
    with operator as client, worker(server, tmp_path, redis_url) as running:
        assert_tokens_of_transformers(
            client, [client.enqueue(prompt, **GREEDY) for prompt in PROMPTS]
        )
        running.process.terminate()
        assert running.process.wait() == 0
    assert server.num_running() == 0


def test_end_tokens_that_a_request_ignores_are_in_its_output(
    redis_url: str, tmp_path: Path, server: RealServer
) -> None:
    fields = {**GREEDY, "max_tokens": 400, "ignore_eos": True}
    with Client(as_role("operator", redis_url)) as client, worker(server, tmp_path, redis_url):
        request_id = client.enqueue(PROMPTS[0], **fields)
        expected = undisturbed(PROMPTS[0], 400, ignore_eos=True)
        assert len(undisturbed(PROMPTS[0], 400)) < len(expected) == 400
        assert client.result(request_id).token_ids == expected


def test_another_worker_goes_on_when_one_is_killed(
    redis_url: str, tmp_path: Path, server: RealServer
) -> None:
    with Client(as_role("operator", redis_url)) as client:
        with worker(server, tmp_path, redis_url) as first:
            ids = [client.enqueue(prompt, **GREEDY) for prompt in PROMPTS]
            for request_id in ids:
                next(client.stream(request_id))
            first.process.kill()
            until(lambda: server.num_running() == 0)
        with worker(server, tmp_path, redis_url):
            assert_tokens_of_transformers(client, ids)


def test_the_server_may_die_and_come_back(
    redis_url: str, tmp_path: Path, server: RealServer
) -> None:
    with Client(as_role("operator", redis_url)) as client, worker(server, tmp_path, redis_url):
        ids = [client.enqueue(prompt, **GREEDY) for prompt in PROMPTS]
        next(client.stream(ids[0]))
        server.kill(signal.SIGKILL)
        server.start()
        assert_tokens_of_transformers(client, ids)
        assert client.stats().dead == 0
        until(lambda: server.num_running() == 0)


def test_a_cancel_frees_the_server(redis_url: str, tmp_path: Path, server: RealServer) -> None:
    with Client(as_role("operator", redis_url)) as client, worker(server, tmp_path, redis_url):
        request_id = client.enqueue("Once", max_tokens=900, logit_bias={"0": -100, "2": -100})
        events = client.stream(request_id)
        next(events)
        client.cancel(request_id)
        assert [event.finish_reason for event in events][-1] == "cancelled"
        until(lambda: server.num_running() == 0)


def test_log_probabilities_of_a_prompt_are_the_models(
    redis_url: str, tmp_path: Path, server: RealServer
) -> None:
    if server.name != "vllm":
        pytest.skip("only vLLM reports them")
    fields = {"prompt_logprobs": 3, "temperature": 0.0, "max_tokens": 5}
    with Client(as_role("operator", redis_url)) as client, worker(server, tmp_path, redis_url):
        for prompt in PROMPTS[:3]:
            first, *others = client.result(client.enqueue(prompt, **fields)).prompt_logprobs or []
            assert first is None
            for entry, wanted in zip(others, logprobs_of(prompt), strict=True):
                assert entry is not None
                assert entry.top is not None
                assert len(entry.top) == 3
                for it in (entry, *entry.top):
                    assert it.logprob == pytest.approx(wanted[it.token_id], abs=1e-3)
                assert [it.logprob for it in entry.top] == pytest.approx(
                    sorted(wanted, reverse=True)[:3], abs=1e-3
                )


@pytest.mark.parametrize(
    "fields",
    [{"frequency_penalty": 0.6}, {"presence_penalty": 0.9, "frequency_penalty": 0.2}],
    ids=lambda fields: "-".join(fields),
)
def test_penalties_count_the_tokens_of_a_prefix(
    redis_url: str, tmp_path: Path, server: RealServer, fields: dict[str, float]
) -> None:
    if server.name == "llama.cpp":
        pytest.skip("llama.cpp would count the prompt")
    with Client(as_role("operator", redis_url)) as client, worker(server, tmp_path, redis_url):
        for prompt in PROMPTS[:2]:
            request = {"prompt": prompt, **GREEDY, **fields, "max_tokens": 40, "ignore_eos": True}
            whole = client.result(client.enqueue(**request)).token_ids
            assert whole != undisturbed(prompt, 40)
            for length in (1, 15, 35):
                more = {"max_tokens": 40 - length}
                prefix = {"output_prefix": {"token_ids": whole[:length]}}
                result = client.result(client.enqueue(**{**request, **prefix, **more}))
                assert result.token_ids == whole


def test_temperatures_and_stop_tokens_beyond_a_servers_limits_are_served(
    redis_url: str, tmp_path: Path, server: RealServer
) -> None:
    """At this temperature, every draw gives the likeliest token."""
    with Client(as_role("operator", redis_url)) as client, worker(server, tmp_path, redis_url):
        for prompt in PROMPTS[:2]:
            wanted = undisturbed(prompt, 40)
            cold = {"max_tokens": 40, "temperature": 1e-6}
            assert client.result(client.enqueue(prompt, **cold)).token_ids == wanted
            others = [token_id for token_id in range(300) if token_id not in wanted[:20]]
            stops = {"stop_token_ids": [*others[:255], wanted[20]]}
            number = wanted.index(wanted[20])
            result = client.result(client.enqueue(prompt, **GREEDY, **stops, min_tokens=5))
            assert number < 5 or result.token_ids == wanted[: number + 1]


def test_characters_of_several_tokens_arrive_whole(
    redis_url: str, tmp_path: Path, server: RealServer
) -> None:
    """llama.cpp leaves ids inside of a character out of its streams."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(MODEL_DIR)
    wanted = tokenizer.encode("世界 🙂 世界", add_special_tokens=False)
    bias = {str(token_id): 100.0 for token_id in {*wanted}}
    with Client(as_role("operator", redis_url)) as client, worker(server, tmp_path, redis_url):
        options = {"max_tokens": 60, "temperature": 0.0, "logit_bias": bias}
        result = client.result(client.enqueue("Once", **options))
        assert len(result.token_ids) == 60
        assert result.text == tokenizer.decode(result.token_ids, skip_special_tokens=True)


async def test_chaos_starts_a_server_that_has_ended_by_itself(tmp_path: Path) -> None:
    if why := why_missing("llama.cpp"):
        pytest.skip(why)
    engines = Engines("llama.cpp", tmp_path)
    await engines.start()
    try:
        [server] = engines.servers
        os.kill(server.pid, signal.SIGKILL)
        while not await engines.hurt(Fault.ENGINE_KILL, random.Random(1)):
            pass
        assert server.num_running() == 0
    finally:
        engines.kill()

"""Measures Redis's memory for a waiting request, and for a token in log and result.

A waiting request's memory is what many such requests add to the server, divided by their number.
Tokens come from the shipped model. The size of a log is read when its last token has come. Logs are
kept for a minute after the end, results for an hour.
"""

from __future__ import annotations

import argparse
from typing import Any

import redis

from benchmarks.table.rows.whole_path import start_worker
from promptq import Client
from promptq.shared.protocol.keys import Keys
from promptq.shared.server.embedded import EmbeddedServer

_PROMPTS = {"a prompt of 20 characters": 20, "a prompt of 4,000 characters": 4000}
_NUM_STREAMS, _NUM_TOKENS = 8, 400
_KEYS = Keys()


def of_waiting(url: str, length: int, count: int) -> float:
    """Returns the bytes for each of `count` waiting requests."""
    with redis.Redis.from_url(url) as plain, Client(url) as client:
        prompt = ("word " * length)[:length]
        client.enqueue(prompt)
        before = _used(plain)
        for _ in range(count // 1000):
            client.enqueue_many([{"prompt": prompt, "max_tokens": 200}] * 1000)
        found = (_used(plain) - before) / count
        plain.flushall()
    return found


def of_tokens(url: str) -> tuple[float, float]:
    """Returns the bytes for each token in the log of a running request, and in the hash of a
    finished one."""
    worker = start_worker(url)
    fields = {"prompt": "Once upon a time", "ignore_eos": True, "max_tokens": _NUM_TOKENS}
    try:
        with redis.Redis.from_url(url) as plain, Client(url) as client:
            ids = client.enqueue_many([fields] * _NUM_STREAMS)
            for request_id in ids:
                client.result(request_id)
            logs = [_size(plain, _KEYS.tokens(it)) for it in ids]
            hashes = [_size(plain, _KEYS.request(it)) for it in ids]
    finally:
        worker.terminate()
        worker.wait()
    num_tokens = _NUM_STREAMS * _NUM_TOKENS
    return sum(logs) / num_tokens, sum(hashes) / num_tokens


def _used(plain: Any) -> int:
    return int(plain.info("memory")["used_memory"])


def _size(plain: Any, key: str) -> int:
    return int(plain.memory_usage(key, samples=0) or 0)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks memory", description=__doc__)
    parser.add_argument("--requests", type=int, default=50_000, help="number of waiting requests")
    options = parser.parse_args()
    with EmbeddedServer() as server:
        for name, length in _PROMPTS.items():
            print(f"{name}, waiting: {of_waiting(server.url, length, options.requests):,.0f} bytes")
        log, result = of_tokens(server.url)
    print(f"a token in a live log: {log:,.0f} bytes, at one token an event or a few")
    print(f"a token in a finished request: {result:,.0f} bytes")


if __name__ == "__main__":
    main()

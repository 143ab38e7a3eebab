"""Measures the server's CPU time for each script, with up to ten million requests.

One request goes through the real path, and the server copies this request until enough requests
wait. Then a client sends many calls of each script at once, so that the server is busy. A number in
the table is the server's CPU time for one call (µs), from INFO, with reading the call and writing
the reply. The number is the lowest of three rounds. A hash takes 0.7 kB, so only the first million
ids in the queue have one. Of the measured calls, only `priorities` reads the hashes of ids that
wait further back.
"""

from __future__ import annotations

import argparse
import secrets
import sys
from collections.abc import Iterable
from typing import Any

import redis

from benchmarks.queue.idle import server_cpu_seconds
from promptq.shared.protocol.claims import ClaimContext, Claims, ModelIdentity, Room
from promptq.shared.protocol.request import FinishReason, NewRequest, Request
from promptq.shared.protocol.worker_stats import RECORD_MS, WorkerStats
from promptq.shared.queue import places, scripts, statistics
from promptq.shared.queue.call import SCRIPT_NAMES, Call, script_text
from promptq.shared.queue.request_queue import RequestQueue, new_request_id
from promptq.shared.server.embedded import EmbeddedServer
from tests.support.requests import held, row

DEPTHS = (10_000, 100_000, 1_000_000, 10_000_000)
_MOST_HASHES = 1_000_000
_BULK = 10_000
_ROWS = 8
_ROUNDS = 3
_LEASE_MS = 3_600_000
_PROMPT = {"prompt": "Once upon a time", "max_tokens": 200}
_MODEL = ModelIdentity("m", "f")

# KEYS: the sorted set, a request. ARGV: the first number, how many copies, the prefix of their
# keys, and how many copies have a hash. All copies are older than the request.
_COPY = """
local oldest = tonumber(redis.call('HGET', KEYS[2], 'score')) - 1e7
for nth = tonumber(ARGV[1]), ARGV[1] + ARGV[2] - 1 do
  local id = string.format('copy-%031d', nth)
  if nth < tonumber(ARGV[4]) then redis.call('COPY', KEYS[2], ARGV[3] .. id) end
  redis.call('ZADD', KEYS[1], oldest + nth / 1000, id)
end
"""


class Waiting:
    """A queue on the server `plain`. `fill` adds waiting requests."""

    def __init__(self, plain: Any) -> None:
        self._plain = plain
        self._queue = RequestQueue(plain)
        for name in SCRIPT_NAMES:
            plain.script_load(script_text(name))
        (self._template,) = self._queue.enqueue([_new()])
        self._num_copies = 0

    def fill(self, depth: int) -> None:
        keys = self._queue.keys
        while (missing := depth - self._plain.zcard(keys.pending)) > 0:
            count = min(missing, _BULK)
            found = (keys.pending, keys.request(self._template))
            numbers = (self._num_copies, count, keys.request(""), _MOST_HASHES)
            self._plain.eval(_COPY, 2, *found, *numbers)
            self._num_copies += count

    def measure(self, num_calls: int) -> dict[str, float]:
        """Returns the microseconds of CPU time for a call of each script."""
        keys, room = self._queue.keys, Room(max_count=_ROWS, token_budget=10**9)
        found: dict[str, float] = {}

        def run(name: str, calls: list[Call[Any]]) -> list[Any]:
            before = server_cpu_seconds(self._plain)
            values = self._queue.run(calls)
            found[name] = 1e6 * (server_cpu_seconds(self._plain) - before) / num_calls
            return values

        def row_calls(index: int, reason: FinishReason | None = None) -> list[Call[Any]]:
            return [
                scripts.publish(
                    _LEASE_MS,
                    [row(claim, index, reason=reason) for claim in batch],
                    [held(claim) for claim in batch],
                )
                for batch in batches
            ]

        each = range(num_calls)
        run("enqueue", [scripts.enqueue([_new()], 0) for _ in each])
        batches = run(f"claim of {_ROWS}", [_claim(room) for _ in each])
        run(f"publish of {_ROWS} events", row_calls(0))
        run(f"publish of {_ROWS} last events", row_calls(1, FinishReason.LENGTH))
        run("place", [Call("place", [self._template], list) for _ in each])
        run("quote", [places.quote([_new()]) for _ in each])
        run("priorities", [statistics.priorities(keys) for _ in each])
        begin = Call("", ["DEL", keys.statistics_open], int)  # the first call of each 5 s counts
        sample = statistics.sample(statistics.Contribution())
        run("statistics", [begin, sample] * num_calls)
        run("sweep", [scripts.sweep() for _ in each])
        run("reap", [scripts.reap(3) for _ in each])
        beat = WorkerStats(worker_id="w")
        self._queue.run(scripts.heartbeat(beat, RECORD_MS, []))
        run("heartbeat", [scripts.heartbeat(beat, RECORD_MS, [], beat) for _ in each])
        run("has_work", [scripts.has_work(_MODEL.fingerprint) for _ in each])
        return found


def _claim(room: Room) -> Call[Claims]:
    nonce = secrets.token_hex(8)
    return scripts.claim("w", _LEASE_MS, room, nonce, "", _MODEL, ClaimContext())


def _new() -> NewRequest:
    return NewRequest(new_request_id(), Request.build(_PROMPT))


def table(depths: Iterable[int], calls: int) -> list[str]:
    """Returns the lines of the table: a row for each script, a column for each depth."""
    depths = sorted(depths)
    columns = []
    with EmbeddedServer() as server, redis.Redis.from_url(server.url, socket_timeout=None) as plain:
        waiting = Waiting(plain)
        for depth in depths:
            waiting.fill(depth)
            found = [waiting.measure(calls) for _ in range(_ROUNDS)]
            columns.append({name: min(each[name] for each in found) for name in found[0]})
            print(f"{depth:,} waiting: {columns[-1]}", file=sys.stderr)
    head = ["script", *(f"{depth:,} waiting" for depth in depths)]
    rows = [[name, *(f"{found[name]:,.0f}" for found in columns)] for name in columns[0]]
    lines = [head, ["---", *("---:" for _ in depths)], *rows]
    return [f"| {' | '.join(line)} |" for line in lines]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks script-time", description=__doc__)
    parser.add_argument("--waiting", type=int, nargs="+", default=DEPTHS)
    parser.add_argument("--calls", type=int, default=100, help="calls of each script")
    options = parser.parse_args()
    print("\n".join(table(options.waiting, options.calls)))


if __name__ == "__main__":
    main()

"""Measures what idle workers cost their Redis server.

Workers without a model wait for requests that never come. The table has each command or script that
the workers send, how often one worker sends it, and how long the server runs it. The last row has
the server's whole CPU time for one worker, without what the server needs when it has no workers.
Few workers leave the processor's caches cold, so a call of a large fleet takes less time. The last
lines are about a large fleet: this process sends the calls of all its workers. First, no request
wakes the workers. Then requests wake them as often as possible, and other workers claim these
requests.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from contextlib import ExitStack
from hashlib import sha1
from math import ceil
from typing import Any

import redis
from redis import ConnectionPool

from benchmarks.lib.children import child
from promptq.shared.protocol.claims import ModelIdentity, Room
from promptq.shared.protocol.worker_stats import RECORD_MS, WorkerStats
from promptq.shared.queue import lookups, scripts
from promptq.shared.queue.call import SCRIPT_NAMES, Call, script_text
from promptq.shared.queue.request_queue import RequestQueue
from promptq.shared.queue.statistics import open_bucket
from promptq.shared.server.embedded import EmbeddedServer

_SETTLE_SECONDS = 3.0
_MOST_COMMANDS = 100_000
_WAKE_UPS = 8
"""Most messages that wake many workers within a millisecond for each worker (`server.lua`)."""
_MODEL = ModelIdentity("m", "f")
_SHAS = {
    name: sha1(script_text(name).encode(), usedforsecurity=False).hexdigest()
    for name in SCRIPT_NAMES
}
_SCRIPTS = {sha: name for name, sha in _SHAS.items()}


def server_cpu_seconds(plain: Any) -> float:
    found = plain.info("cpu")
    return float(found["used_cpu_user"]) + float(found["used_cpu_sys"])


def count(plain: Any, seconds: float) -> Counter[str]:
    """Returns how often clients sent each command or script, without commands inside scripts."""
    numbers, until = Counter[str](), time.monotonic() + seconds
    with plain.monitor() as monitor:
        for entry in monitor.listen():
            if time.monotonic() > until:
                return numbers
            if entry["client_type"] != "lua":
                numbers[_name(entry["command"])] += 1
    raise RuntimeError("the server stopped")


def watch(plain: Any, seconds: float) -> tuple[float, dict[str, float]]:
    """Returns the server's CPU seconds, and the mean microseconds of each command or script."""
    plain.config_set("slowlog-max-len", _MOST_COMMANDS)
    plain.config_set("slowlog-log-slower-than", 0)
    plain.slowlog_reset()
    before = server_cpu_seconds(plain)
    time.sleep(seconds)
    cpu_seconds = server_cpu_seconds(plain) - before
    plain.config_set("slowlog-log-slower-than", -1)
    durations = defaultdict[str, list[int]](list)
    for entry in plain.slowlog_get(_MOST_COMMANDS):
        durations[_name(entry["command"].decode("utf-8", "replace"))].append(entry["duration"])
    return cpu_seconds, {name: statistics.mean(each) for name, each in durations.items()}


def _name(command: str) -> str:
    name, sha, *_ = (*command.split(maxsplit=2), "")
    return _SCRIPTS.get(sha, name) if name == "EVALSHA" else name


def table(num_workers: int, seconds: float) -> list[str]:
    """Returns the lines of the table for `num_workers` workers. Measures three times for `seconds`:
    once without workers, and twice with them."""
    with ExitStack() as stack:
        url = stack.enter_context(EmbeddedServer()).url
        plain = stack.enter_context(redis.Redis.from_url(url))
        without_workers, _ = watch(plain, seconds)
        for _ in range(num_workers):
            stack.enter_context(child("promptq.worker", "--redis", url, "--model", "model-free"))
        time.sleep(_SETTLE_SECONDS)
        cpu_seconds, durations = watch(plain, seconds)
        numbers = count(plain, seconds)
    each = num_workers * seconds
    lines = ["| command or script | times a second | µs each |", "|---|---:|---:|"]
    for name, number in numbers.most_common():
        lines.append(f"| {name} | {number / each:.2f} | {durations.get(name, 0):.0f} |")
    cpu = 1e6 * (cpu_seconds - without_workers) / each
    return [
        *lines,
        f"| all, in µs of CPU time a second | {numbers.total() / each:.2f} | {cpu:.0f} |",
    ]


def replay(num_workers: int, *, is_woken: bool = False) -> float:
    """Returns the CPU seconds that the server needs for one second of a fleet of idle workers.

    This process sends the commands of all workers for five seconds, as fast as the server answers.
    With `is_woken`, the workers look for work twice within a millisecond for each worker.
    """
    num_looks, num_wake_ups = 1, 0
    if is_woken:
        num_looks, num_wake_ups = ceil(2000 / num_workers), _WAKE_UPS * 1000 // num_workers
    with EmbeddedServer() as server, redis.Redis.from_url(server.url) as plain:
        queue = RequestQueue(plain, worker_id="w", model=_MODEL)
        for name in ("has_work", "hold_lease"):
            plain.script_load(script_text(name))
        queue.take_batch(Room(max_count=0, token_budget=0))  # writes the queue's model
        ids = [f"w{nth}" for nth in range(num_workers)]
        reports = [WorkerStats(worker_id=worker_id) for worker_id in ids]
        queue.run([scripts.heartbeat(report, RECORD_MS, []) for report in reports])
        pool = ConnectionPool.from_url(
            server.url, max_connections=2 * num_workers, socket_timeout=None
        )
        connections = [pool.get_connection() for _ in ids]
        listening = [pool.get_connection() for _ in ids]
        for connection in listening:
            connection.send_command("SUBSCRIBE", queue.keys.control)
            connection.read_response(push_request=True)
        before = server_cpu_seconds(plain)
        for second in range(5):
            for _ in range(num_wake_ups):
                queue.run(scripts.wake_workers(queue.keys))
                for connection in listening:
                    connection.read_response(push_request=True)
            look = [scripts.has_work(_MODEL.fingerprint)] * num_looks
            _send_all(connections, [look] * num_workers, queue)
            beats = [scripts.heartbeat(report, RECORD_MS, [], report) for report in reports]
            _send_all(connections, [[beat] for beat in beats], queue)
            if second == 0:  # workers look at the statistics each 5 s
                looks = [lookups.server_time_ms(), open_bucket(queue.keys)]
                _send_all(connections, [looks] * num_workers, queue)
            if second in (1, 3):  # workers call it each 2.5 s
                key, ttl_ms = queue.keys.reaper, 3750
                holds = [[scripts.hold(queue.keys, key, name, ttl_ms)] for name in ids]
                _send_all(connections, holds, queue)
        cpu_seconds = server_cpu_seconds(plain) - before
        pool.disconnect()
    return cpu_seconds / 5


def _send_all(
    connections: list[Any], calls: Sequence[Sequence[Call[Any]]], queue: RequestQueue
) -> None:
    """Sends a worker's calls over each connection, and then reads all replies."""
    for connection, its_calls in zip(connections, calls, strict=True):
        commands = [
            ("EVALSHA", _SHAS[call.script], 1, queue.keys.pending, *call.args)
            if call.script
            else call.args
            for call in its_calls
        ]
        connection.send_packed_command(connection.pack_commands(commands))
    for connection, its_calls in zip(connections, calls, strict=True):
        for call in its_calls:
            call.read(connection.read_response())


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks idle", description=__doc__)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--seconds", type=float, default=30)
    parser.add_argument("--fleet", type=int, default=1000, help="workers whose calls are replayed")
    options = parser.parse_args()
    for num_workers in options.workers:
        print(f"\n{num_workers} idle workers, for one worker:\n")
        print("\n".join(table(num_workers, options.seconds)))
    for is_woken, state in ((False, "idle"), (True, "idle, and always woken")):
        cores = replay(options.fleet, is_woken=is_woken)
        print(f"\n{options.fleet:,} workers, {state}: {100 * cores:.0f}% of a core of one server")


if __name__ == "__main__":
    main()

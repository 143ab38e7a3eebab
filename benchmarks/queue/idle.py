"""Measures what idle workers cost their Redis server.

Workers without a model wait for requests that never come. The table has each command or script that
they send, how often one worker sends it, and how long it runs. The last row has the server's whole
CPU time for one worker, without what the server needs when it has no workers.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import Counter, defaultdict
from contextlib import ExitStack
from hashlib import sha1
from typing import Any

import redis

from benchmarks.lib.children import child
from promptq.shared.queue.call import SCRIPT_NAMES, script_text
from promptq.shared.server.embedded import EmbeddedServer

_SETTLE_SECONDS = 3.0
_MOST_COMMANDS = 100_000
_SCRIPTS = {
    sha1(script_text(name).encode(), usedforsecurity=False).hexdigest(): name
    for name in SCRIPT_NAMES
}


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
    """Returns the lines of the table for this many workers. Measures twice for `seconds`."""
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


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks idle", description=__doc__)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--seconds", type=float, default=30)
    options = parser.parse_args()
    for num_workers in options.workers:
        print(f"\n{num_workers} idle workers, for one worker:\n")
        print("\n".join(table(num_workers, options.seconds)))


if __name__ == "__main__":
    main()

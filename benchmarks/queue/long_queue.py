"""Measures an urgent request's wait behind 1,000,000 others and behind 2,000.

Each of two servers has a worker without a model. Requests that run for minutes take all of the
worker's slots. 2,000 more requests wait on one server, and 1,000,000 on the other. Urgent requests
of one token go to the two servers in turns. While one server is measured, the other server's worker
is stopped, so that both servers have the same conditions.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import time
from contextlib import ExitStack

from benchmarks.lib.children import child
from promptq import Client
from promptq.shared.server.embedded import EmbeddedServer

_BULK = 1000
_LONG = {"prompt": "Once upon a time", "max_tokens": 8000, "priority": 5}
_URGENT = {"max_tokens": 1, "priority": -5}
_WARM_UP = 10
_OPTIONS = (
    *("--model", "model-free", "--max-num-seqs", "4"),
    *("--lease-ms", "3600000", "--stuck-seconds", "3600"),  # it is stopped for minutes
)


class Side:
    """A server with `num_waiting` waiting requests, and its worker."""

    def __init__(self, num_waiting: int, stack: ExitStack) -> None:
        self.num_waiting = num_waiting
        self.seconds: list[float] = []
        server = stack.enter_context(EmbeddedServer())
        self._client = stack.enter_context(Client(server.url))
        for _ in range(num_waiting // _BULK):
            self._client.enqueue_many([_LONG] * _BULK)
        command = ("promptq.worker", "--redis", server.url, *_OPTIONS)
        self._worker, _ = stack.enter_context(child(*command))
        stack.callback(self.go_on)  # or it could not end
        self._take(_WARM_UP)
        self.stop()

    def stop(self) -> None:
        os.kill(self._worker, signal.SIGSTOP)

    def go_on(self) -> None:
        os.kill(self._worker, signal.SIGCONT)

    def take(self, count: int) -> float:
        """Returns the median seconds of `count` urgent requests, one after the other."""
        taken = self._take(count)
        self.seconds += taken
        return statistics.median(taken)

    def _take(self, count: int) -> list[float]:
        taken = []
        for _ in range(count):
            began = time.perf_counter()
            next(iter(self._client.stream(self._client.enqueue("Now", **_URGENT))))
            taken.append(time.perf_counter() - began)
        return taken


def main() -> None:
    """Measure both servers in turns, and print the results."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks long-queue", description=__doc__)
    parser.add_argument("--waiting", type=int, default=1_000_000, help="length of the long queue")
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument(
        "--requests", type=int, default=20, help="urgent requests to one server in each turn"
    )
    options = parser.parse_args()
    with ExitStack() as stack:
        sides = [Side(num_waiting, stack) for num_waiting in (2000, options.waiting)]
        ratios = []
        for nth in range(options.pairs):
            found = {}
            for side in sides if nth % 2 == 0 else sides[::-1]:
                side.go_on()
                found[side.num_waiting] = side.take(options.requests)
                side.stop()
            ratios.append(found[options.waiting] / found[2000])
        for side in sides:
            p95 = statistics.quantiles(side.seconds, n=20)[-1]
            print(
                f"{side.num_waiting:,} waiting: {1000 * statistics.median(side.seconds):.2f} ms to"
                f" the first event, p95 {1000 * p95:.2f} ms"
            )
        low, _, high = statistics.quantiles(ratios, n=4)
        print(
            f"ratio of medians, {options.pairs} pairs: {statistics.median(ratios):.3f}"
            f" (half of them {low:.3f} to {high:.3f})"
        )


if __name__ == "__main__":
    main()

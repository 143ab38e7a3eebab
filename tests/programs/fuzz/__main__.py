"""Sends malformed requests to a worker and a gateway.

With `--queue` or `--http` only against one of them.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from pathlib import Path

import redis

from promptq.shared.server.embedded import EmbeddedServer
from tests.programs.fuzz.fuzzing import Fuzzing, report
from tests.programs.fuzz.http_fuzzing import HttpFuzzing, report_http
from tests.support.processes import hear_signals
from tests.support.roles import bring_in_roles


def main() -> int:
    """Exit code 1 at any fault."""
    hear_signals()
    parser = argparse.ArgumentParser(prog="python -m tests fuzz", description=__doc__)
    parser.add_argument("--count", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--queue", action="store_true", help="the worker's queue alone")
    parser.add_argument("--http", action="store_true", help="the gateway alone")
    options = parser.parse_args()
    seed = random.randrange(10**6) if options.seed is None else options.seed
    print(f"fuzz: seed {seed}", flush=True)
    started = time.monotonic()
    faults: list[str] = []
    with (
        tempfile.TemporaryDirectory(prefix="promptq-fuzz-") as folder,
        EmbeddedServer() as server,
        redis.Redis.from_url(server.url) as client,
    ):
        bring_in_roles(server.url)
        if options.queue or not options.http:
            log = Path(folder) / "worker.log"
            outcome = Fuzzing(client, server.url, log, seed).run(options.count)
            faults += outcome.faults
            if outcome.faults:
                print(log.read_text(errors="replace")[-4000:])
            print(report(outcome))
            client.flushdb()
        if options.http or not options.queue:
            of_gateway = HttpFuzzing(server.url, Path(folder), seed).run(options.count)
            faults += of_gateway.faults
            print(report_http(of_gateway))
    print(f"in {time.monotonic() - started:.0f} s")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())

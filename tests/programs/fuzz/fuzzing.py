"""Sends malformed requests to a worker and a gateway.

With `--queue`, the program sends requests only to the worker; with `--http`, only to the gateway.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import redis

from promptq.producer.commands.local_fleet.child_process import ChildProcess, worker_command
from promptq.shared.protocol.keys import Keys
from promptq.shared.server.embedded import EmbeddedServer
from tests.programs.fuzz.commands import Thrown, control_message, make_request
from tests.programs.fuzz.http_fuzzing import HttpFuzzing, report_http
from tests.support.model_free import text_of
from tests.support.processes import hear_signals
from tests.support.roles import as_role, bring_in_roles

_ROUND = 5000
_CONTROL_SHARE = 0.1
_PATIENCE_SECONDS = 30.0
"""The longest time without an ended request. After that, the remaining requests count as stuck."""

_LOOK_SECONDS = 0.2
_CANARY_TOKENS = 20
_OPTIONS = ["--model", "model-free", "--max-model-len", "64", "--lease-ms", "1000"]


@dataclass(slots=True)
class Outcome:
    """The malformed input of a run, and its effects."""

    seed: int
    kinds: Counter[str] = field(default_factory=Counter)
    num_messages: int = 0
    num_good: int = 0
    """Number of valid requests in between that got the right answer."""
    faults: list[str] = field(default_factory=list)


class Fuzzing:
    """One worker process in the role `worker`, and malformed requests from a client with more
    permissions."""

    def __init__(self, client: redis.Redis, url: str, log: Path, seed: int) -> None:
        self.outcome = Outcome(seed)
        self._client: Any = client
        self._url = url
        self._log = log
        self._keys = Keys()
        self._rng = random.Random(seed)

    def run(self, count: int) -> Outcome:
        """Send `count` malformed requests, in rounds. Returns the outcome."""
        with self._worker() as worker:
            for start in range(0, count, _ROUND):
                pushed = self._throw(range(start, min(start + _ROUND, count)))
                canary = self._push_good()
                left = self._wait(worker, pushed)
                if worker.exit_code is not None:
                    self._tell(f"the worker ended with exit code {worker.exit_code}")
                    break
                for request_id in left[:5]:
                    self._tell(f"stuck: {pushed.get(request_id, request_id)}")
                self._check_good(canary)
                if left:
                    break
                self._clean()
        for line in self._log.read_text(errors="replace").splitlines():
            if "Traceback" in line:  # the worker continued, but the code does not expect this error
                self._tell(f"an exception that nobody expected: {line[-600:]}")
        return self.outcome

    def _tell(self, fault: str) -> None:
        self.outcome.faults.append(fault)

    @contextmanager
    def _worker(self) -> Iterator[ChildProcess]:
        with self._log.open("w") as log:
            command = worker_command([*_OPTIONS, "--redis", as_role("worker", self._url)])
            worker = ChildProcess(command, {}, lambda line: print(line, file=log, flush=True))
            try:
                while not worker.is_ready and worker.exit_code is None:
                    time.sleep(_LOOK_SECONDS)
                yield worker
                if worker.exit_code is None:
                    worker.drain()
                    worker.wait()
                    if worker.exit_code != 0:
                        self._tell(f"told to end, it did with exit code {worker.exit_code}")
            finally:
                worker.kill()

    def _throw(self, numbers: range) -> dict[bytes, Thrown]:
        """Enqueue malformed requests, with noise on the control channel. Returns them by id."""
        pushed = {}
        with self._client.pipeline(transaction=False) as pipeline:
            for number in numbers:
                thrown = make_request(self._keys, number, self._rng)
                before = pushed.get(thrown.request_id)
                if before is None or not before.may_wait:  # else that request may still wait
                    pushed[thrown.request_id] = thrown
                self.outcome.kinds[thrown.kind] += 1
                for command in thrown.commands:
                    pipeline.execute_command(*command)
                if self._rng.random() < _CONTROL_SHARE:
                    pipeline.publish(self._keys.control, control_message(self._rng))
                    self.outcome.num_messages += 1
            pipeline.publish(self._keys.control, "pending")
            pipeline.execute(raise_on_error=False)  # the server refuses some ids and log entries
        return pushed

    def _push_good(self) -> tuple[str, int]:
        request_id, seed = f"good-{self._rng.randrange(2**60)}", self._rng.randrange(2**40)
        payload = f'{{"prompt":"a","max_tokens":{_CANARY_TOKENS},"seed":{seed}}}'
        self._client.hset(self._keys.request(request_id), "payload", payload)
        self._client.zadd(self._keys.pending, {request_id: 1})
        self._client.publish(self._keys.control, "pending")
        return request_id, seed

    def _check_good(self, canary: tuple[str, int]) -> None:
        request_id, seed = canary
        result = self._client.hget(self._keys.request(request_id), "result") or b"nothing"
        if f'"text":"{text_of(seed, _CANARY_TOKENS)}"'.encode() in result:
            self.outcome.num_good += 1
        else:
            self._tell(f"a good request came to {result.decode()[:200]}")

    def _wait(self, worker: ChildProcess, pushed: dict[bytes, Thrown]) -> list[bytes]:
        """Wait until only requests for other workers wait or run. Returns the stuck ones."""
        last, changed = -1, time.monotonic()
        while worker.exit_code is None:
            held = self._held()
            if len(held) != last:
                last, changed = len(held), time.monotonic()
            if self._may_wait(held, pushed):
                self._cancel(held)
                return self._held()
            if time.monotonic() - changed > _PATIENCE_SECONDS:
                return held
            time.sleep(_LOOK_SECONDS)
        return []

    def _may_wait(self, request_ids: list[bytes], pushed: dict[bytes, Thrown]) -> bool:
        """Whether each request is for a newer worker, or for one that serves a field that this
        worker does not serve, since a spoilt log shows that there was such a worker."""
        with self._client.pipeline(transaction=False) as pipeline:
            for request_id in request_ids:
                if request_id not in pushed or not pushed[request_id].may_wait:
                    pipeline.hexists(self._keys.request("").encode() + request_id, "needs")
            return all(reply is True for reply in pipeline.execute(raise_on_error=False))

    def _held(self) -> list[bytes]:
        keys = self._keys
        names = (keys.pending, keys.leases, keys.delayed, keys.deadlines)
        with self._client.pipeline() as pipeline:  # at one time, as requests move between them
            for name in names:
                pipeline.zrange(name, 0, -1)
            return [request_id for held in pipeline.execute() for request_id in held]

    def _cancel(self, request_ids: list[bytes]) -> None:
        """Cancels a request by plain commands, as any Redis client may."""
        for request_id in request_ids:
            self._client.hset(self._keys.request(request_id.decode()), "cancelled", 1)
            self._client.publish(self._keys.control, b"cancel:" + request_id)
        changed = time.monotonic()
        while self._held() and time.monotonic() - changed < _PATIENCE_SECONDS:
            time.sleep(_LOOK_SECONDS)

    def _clean(self) -> None:
        """Make room for the next round: a malformed request's record would live for an hour."""
        for pattern in ("request:*", "tokens:*"):
            names = list(self._client.scan_iter(match=self._keys.prefix + pattern, count=1000))
            for start in range(0, len(names), 1000):
                self._client.unlink(*names[start : start + 1000])


def report(outcome: Outcome) -> str:
    """Returns a text with a table of the malformed requests."""
    lines = [f"fuzz: seed {outcome.seed}"]
    lines += [f"  {count:8,}  {kind}" for kind, count in outcome.kinds.most_common()]
    lines.append(f"  {outcome.num_messages:8,}  messages on the control channel")
    lines.append(
        f"{outcome.kinds.total():,} requests, {outcome.num_good:,} good ones between them answered"
        f" rightly, {len(outcome.faults)} faults"
    )
    return "\n".join([*lines, *(f"  {fault}" for fault in outcome.faults[:50])])


def main() -> int:
    """Run the command. Returns the exit code: 1 if there was a fault."""
    hear_signals()
    parser = argparse.ArgumentParser(prog="python -m tests fuzz", description=__doc__)
    parser.add_argument("--count", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--queue", action="store_true", help="only the worker's queue")
    parser.add_argument("--http", action="store_true", help="only the gateway")
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

"""Sends malformed HTTP requests to a running gateway, and checks its answers and its state."""

from __future__ import annotations

import os
import random
import re
import socket
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from ipaddress import ip_address
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx2

from promptq import Client
from promptq.producer.admin.api_keys import ApiKey
from promptq.producer.commands.local_fleet.child_process import ChildProcess, worker_command
from tests.programs.fuzz.http_requests import Thrown, all_routes, make_request, make_upload
from tests.support.processes import read_line, running
from tests.support.roles import as_role

MOST_GROWTH_BYTES = 64 << 20
"""The most growth of the gateway's memory after the first requests."""

_FIRST = 200
_AT_ONCE = 16
_UPLOAD_SHARE = 0.1
_SILENCE_SECONDS = 0.3
"""Seconds of silence of a gateway that waits for more of a request, or has answered."""
_ANSWER_SECONDS = 5.0
_MOST_READ = 1 << 20
_PATIENCE_SECONDS = 30.0
_STATUS = re.compile(rb"HTTP/1\.1 (\d{3}) ")
_CODE = re.compile(rb'"code": ?"(\w+)"')
_HARMLESS = (b"bodies", b"connections", b"no_worker")
"""Codes of a 503 that describes a state and not a failure."""
_LENGTHS = re.compile(rb"(?i)\r\ncontent-length: *([^\r]*)")
_COUNTED = re.compile(r'http_requests_total\{handler="([^"]*)".*status="(5\d\d)"\} ([0-9.e+]+)')
_WORKER = ["--model", "model-free", "--max-model-len", "64"]


@dataclass(slots=True)
class HttpOutcome:
    """The malformed input of a run, and its effects."""

    seed: int
    kinds: Counter[str] = field(default_factory=Counter)
    routes: Counter[str] = field(default_factory=Counter)
    answers: Counter[str] = field(default_factory=Counter)
    num_good: int = 0
    """Number of valid requests of another client that got the right answer meanwhile."""
    growth_bytes: int = 0
    faults: list[str] = field(default_factory=list)


class HttpFuzzing:
    """One gateway and one worker, each a process in its role of the access rules."""

    def __init__(self, redis_url: str, folder: Path, seed: int) -> None:
        self.outcome = HttpOutcome(seed)
        self._redis_url = redis_url
        self._folder = folder
        self._rng = random.Random(seed)
        self._routes = all_routes()

    def run(self, count: int) -> HttpOutcome:
        """Send `count` requests, some of them uploads. Returns the outcome."""
        with Client(as_role("operator", self._redis_url)) as client:
            secret, _ = client.create_api_key(ApiKey(name="plain"))
            admin_secret, _ = client.create_api_key(ApiKey(name="admin", is_admin=True))
            other, _ = client.create_api_key(ApiKey(name="other", tenant="other"))
        with self._worker(), self._gateway() as (url, pid):
            self._throw(url, [self._make(number, secret, admin_secret) for number in range(_FIRST)])
            before = _memory_bytes(pid)
            with self._other_client(url, other):
                for start in range(_FIRST, count, 1000):
                    numbers = range(start, min(start + 1000, count))
                    self._throw(url, [self._make(it, secret, admin_secret) for it in numbers])
            self.outcome.growth_bytes = _memory_bytes(pid) - before
            if self.outcome.growth_bytes > MOST_GROWTH_BYTES:
                self._tell(f"its memory grew by {self.outcome.growth_bytes:,} bytes")
            metrics = httpx2.get(f"{url}/metrics", timeout=_PATIENCE_SECONDS).text
            for handler, status, number in _COUNTED.findall(metrics):
                if status != "503":  # the answers with 503 were checked above
                    self._tell(f"{float(number):.0f} times status {status} of {handler}")
        for line in (self._folder / "gateway.log").read_text(errors="replace").splitlines():
            if "Traceback" in line or "Exception" in line:
                self._tell(f"an exception that nobody expected: {line[-600:]}")
        return self.outcome

    def _tell(self, fault: str) -> None:
        self.outcome.faults.append(fault)

    def _make(self, number: int, secret: str, admin_secret: str) -> Thrown:
        if self._rng.random() < _UPLOAD_SHARE:
            return make_upload(number, self._rng, secret, admin_secret)
        return make_request(self._routes, number, self._rng, secret, admin_secret)

    def _throw(self, url: str, thrown: Sequence[Thrown]) -> None:
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            answers = list(pool.map(lambda it: send(url, it.raw), thrown))
        for item, answer in zip(thrown, answers, strict=True):
            self.outcome.kinds.update(item.kinds)
            self.outcome.routes[" ".join(item.route)] += 1
            found = _STATUS.match(answer)
            status = found[1].decode() if found else "none"
            self.outcome.answers[status] += 1
            if status.startswith("5") and not _is_harmless(answer):
                self._tell(f"{answer[:300]!r} to {item.raw[:500]!r}")

    @contextmanager
    def _other_client(self, url: str, secret: str) -> Iterator[None]:
        """Sends one valid request after another until the context ends."""
        over = threading.Event()

        def ask() -> None:
            headers = {"Authorization": f"Bearer {secret}"}
            options = {"base_url": url, "headers": headers, "timeout": _PATIENCE_SECONDS}
            with httpx2.Client(**options) as http:
                while not over.is_set():
                    try:
                        body = {"prompt": "Hi", "max_tokens": 3, "wait_for_worker": False}
                        answer = http.post("/v1/completions", json=body)
                        if answer.json()["usage"]["completion_tokens"] < 1:
                            raise ValueError(answer.text)
                        self.outcome.num_good += 1
                    except (httpx2.HTTPError, KeyError, ValueError) as error:
                        self._tell(f"another client was not served: {error!r}")
                        return

        thread = threading.Thread(target=ask)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    @contextmanager
    def _gateway(self) -> Iterator[tuple[str, int]]:
        """Runs a gateway. Yields its address and process id."""
        kept = {name: it for name, it in os.environ.items() if not name.startswith("PROMPTQ_")}
        env = {**kept, "PROMPTQ_FILES_DIR": str(self._folder / "files"), "PYTHONUNBUFFERED": "1"}
        url = as_role("gateway", self._redis_url)
        command = [sys.executable, "-m", "promptq.producer.cli", "gateway", "--port", "0"]
        with (self._folder / "gateway.log").open("w") as log:
            options: Any = {"env": env, "stdout": subprocess.PIPE, "stderr": log, "text": True}
            with running(*command, "--redis", url, **options) as process:
                yield read_line(process).split()[2].rstrip(","), process.pid
                if process.poll() is not None:
                    self._tell(f"the gateway ended with exit code {process.returncode}")
                process.terminate()
                process.wait()

    @contextmanager
    def _worker(self) -> Iterator[None]:
        with (self._folder / "worker.log").open("w") as log:
            command = worker_command([*_WORKER, "--redis", as_role("worker", self._redis_url)])
            worker = ChildProcess(command, {}, lambda line: print(line, file=log, flush=True))
            try:
                while not worker.is_ready and worker.exit_code is None:
                    threading.Event().wait(0.02)
                yield
            finally:
                worker.kill()


def send(url: str, raw: bytes) -> bytes:
    """Send a request. Returns the first part of the answer. Raises ValueError for an address of
    another machine."""
    parts = urlsplit(url)
    if not ip_address(parts.hostname or "").is_loopback:
        raise ValueError(f"{url!r} is not on this machine")
    pieces = []
    with suppress(OSError), socket.create_connection((parts.hostname, parts.port)) as connection:
        connection.settimeout(_ANSWER_SECONDS if _seems_whole(raw) else _SILENCE_SECONDS)
        with suppress(ConnectionError):  # it may answer, and close, before all is sent
            connection.sendall(raw)
        while piece := connection.recv(65536):
            connection.settimeout(_SILENCE_SECONDS)
            pieces.append(piece)
            if b"text/event-stream" in pieces[0] or len(pieces) * 65536 > _MOST_READ:
                break
    return b"".join(pieces)


def _is_harmless(answer: bytes) -> bool:
    code = _CODE.search(answer)
    return answer.startswith(b"HTTP/1.1 503 ") and code is not None and code[1] in _HARMLESS


def _seems_whole(raw: bytes) -> bool:
    """Whether a gateway should answer a request, as far as a spoilt request shows that."""
    head, separator, body = raw.partition(b"\r\n\r\n")
    if not separator:
        return False
    lengths = _LENGTHS.findall(head)
    if b"transfer-encoding" in head.lower():
        return body.endswith(b"0\r\n\r\n")
    return not lengths or lengths == [b"%d" % len(body)]


def _memory_bytes(pid: int) -> int:
    found = re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


def report_http(outcome: HttpOutcome) -> str:
    """Returns a text with a table of the malformed requests."""
    lines = [f"HTTP fuzz: seed {outcome.seed}"]
    lines += [f"  {count:8,}  spoilt: {kind}" for kind, count in outcome.kinds.most_common()]
    lines += [
        f"  {count:8,}  answered {status}" for status, count in sorted(outcome.answers.items())
    ]
    lines.append(
        f"{outcome.routes.total():,} requests of {len(outcome.routes)} routes, {outcome.num_good:,}"
        f" good ones of another client between them answered, memory"
        f" {outcome.growth_bytes / 2**20:+.0f} MiB, {len(outcome.faults)} faults"
    )
    return "\n".join([*lines, *(f"  {fault}" for fault in outcome.faults[:50])])

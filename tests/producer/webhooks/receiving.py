"""A receiver of webhooks, on a socket of its own."""

from __future__ import annotations

import base64
import hashlib
import hmac
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from promptq.shared.queue.request_queue import RequestQueue
from tests.producer.playing import HandWorker
from tests.support.requests import put

MASTER = "whsec_" + base64.b64encode(b"a secret of thirty-two bytes ...").decode()


@dataclass
class Receiver:
    """Records calls by path.

    `/status/NNN` answers with that status, `/later` with 503 the first time. `/never` reads the
    call and does not answer. `/huge` answers 200, with more text than anybody wants to read.
    """

    port: int
    scheme: str = "http"
    hung_up: threading.Event = field(default_factory=threading.Event)
    """Whoever called `/huge` did not read all of it."""
    calls: list[tuple[str, dict[str, str], bytes]] = field(default_factory=list)
    over: threading.Event = field(default_factory=threading.Event)

    def url(self, path: str) -> str:
        return f"{self.scheme}://127.0.0.1:{self.port}{path}"

    def headers_at(self, path: str) -> list[dict[str, str]]:
        return [headers for at, headers, _ in list(self.calls) if at == path]


def secret_of(tenant: str) -> str:
    """Derives a tenant's secret from MASTER, by the rule in docs/jobs.md."""
    what = f"promptq webhook 1 default {tenant}".encode()
    key = base64.b64decode(MASTER.removeprefix("whsec_"))
    made = hmac.new(key, what, hashlib.sha256).digest()
    return "whsec_" + base64.b64encode(made).decode()


def is_signed(headers: dict[str, str], body: bytes, secret: str | None = None) -> bool:
    """Verifies a signature as standardwebhooks.com describes, by default with the secret of no
    tenant.
    """
    key = base64.b64decode((secret or secret_of("")).removeprefix("whsec_"))
    signed = f"{headers['webhook-id']}.{headers['webhook-timestamp']}.".encode() + body
    wanted = base64.b64encode(hmac.new(key, signed, hashlib.sha256).digest()).decode()
    return f"v1,{wanted}" in headers["webhook-signature"].split(" ")


@contextmanager
def receiver(tls: ssl.SSLContext | None = None) -> Iterator[Receiver]:
    """With `tls`, over it."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            headers = {name.lower(): value for name, value in self.headers.items()}
            found.calls.append((self.path, headers, body))
            if self.path == "/never":
                found.over.wait()
                return
            _, kind, *rest = self.path.split("/")
            is_too_soon = kind == "later" and len(found.headers_at("/later")) == 1
            status = int(rest[0]) if kind == "status" else 503 if is_too_soon else 200
            self.send_response(status)
            self.send_header("location", found.url("/redirected"))
            self.send_header("content-length", "0" if kind != "huge" else str(2**40))
            self.end_headers()
            try:
                while kind == "huge":
                    self.wfile.write(bytes(2**20))
            except OSError:
                found.hung_up.set()

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    found = Receiver(server.server_address[1], "https" if tls else "http")
    if tls is not None:
        server.socket = tls.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield found
    finally:
        found.over.set()
        server.shutdown()
        server.server_close()
        thread.join()


def ask(queue: RequestQueue, request_id: str, url: str, **fields: Any) -> None:
    """Put in a request whose end is told to that URL."""
    put(queue, request_id, webhook_url=url, **{"max_tokens": 5, **fields})


def ask_and_answer(worker: HandWorker, request_id: str, url: str, **fields: Any) -> None:
    """Puts in such a request, and ends it."""
    ask(worker.queue, request_id, url, **fields)
    worker.finish(worker.take(), "hi")

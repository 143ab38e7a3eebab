"""A server from which gateways and batches fetch pictures."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from tests.programs.engines.pngs import png

PICTURE, LARGE_PICTURE = png(1), png(1, 400, 400)
ANSWERS = {"/page": b"<html>", "/large": LARGE_PICTURE}


@contextmanager
def pictures_server(calls: list[str], gate: threading.Event | None = None) -> Iterator[str]:
    """Yields the URL of a server that answers with pictures, at `/slow` once `gate` is set."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            calls.append(self.path)
            if self.path == "/slow" and gate is not None:
                gate.wait()
            status = 302 if self.path == "/moved" else 404 if self.path == "/none" else 200
            self.send_response(status)
            self.send_header("location", "/picture")
            self.end_headers()
            self.wfile.write(ANSWERS.get(self.path, PICTURE))
            if self.path == "/huge":
                self.wfile.write(bytes(2**23))

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()

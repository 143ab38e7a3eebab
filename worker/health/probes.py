"""Answers the HTTP probes of Kubernetes: whether the worker has started, is alive, and is ready."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

from promptq.shared.errors import ConfigurationError

PATHS = ("/startupz", "/livez", "/readyz")
_MAX_IDLE_SECONDS = 5.0  # a client that sends nothing for this long is disconnected


@dataclass(frozen=True, slots=True)
class Health:
    """A worker's health. `hangs` names the part that makes no progress; empty if none."""

    has_started: bool = False
    is_claiming: bool = False
    hangs: str = ""


class HealthServer:
    """Serves a worker's probes in separate threads, also while the model is being loaded.

    The paths `/startupz`, `/livez` and `/readyz` answer with status 200 or 503, and with the reason
    as `status` in JSON. Port 0 selects a free port. Raises ConfigurationError if the port is in
    use.
    """

    def __init__(self, health: Callable[[], Health], host: str, port: int) -> None:
        """`health` returns the current health. Any thread may call it."""

        class Handler(BaseHTTPRequestHandler):
            timeout = _MAX_IDLE_SECONDS

            def do_GET(self) -> None:
                reply = _replies(health()).get(self.path.partition("?")[0])
                status, text = reply or (404, f"no such path; there are {', '.join(PATHS)}")
                body = json.dumps({"status": text}).encode() + b"\n"
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                if self.command == "GET":
                    self.wfile.write(body)

            do_HEAD = do_GET

            def log_message(self, format: str, *args: object) -> None:  # the base class's name
                pass

        class Server(ThreadingHTTPServer):
            address_family = socket.AF_INET6 if ":" in host else socket.AF_INET

        try:
            self._server = Server((host, port), Handler)
        except OSError as error:
            raise ConfigurationError(
                f"--health-port: cannot listen at {host}:{port} ({error.strerror});"
                " 0 selects a free port"
            ) from error
        self._thread = Thread(target=self._server.serve_forever, name="health", daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        return url_of(self._server.server_address)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def url_of(address: Any) -> str:
    """Returns the URL of a server that listens at a socket's address."""
    host, port = address[:2]
    name = host.decode() if isinstance(host, bytes) else host
    return f"http://{f'[{name}]' if ':' in name else name}:{port}"


def _replies(health: Health) -> dict[str, tuple[int, str]]:
    started = (200, "started") if health.has_started else (503, "loading the model")
    alive = (503, f"{health.hangs} makes no progress") if health.hangs else (200, "alive")
    ready = (200, "ready") if health.is_claiming else (503, "takes no requests")
    if alive[0] != 200 or not health.has_started:
        ready = started if alive[0] == 200 else alive
    return dict(zip(PATHS, (started, alive, ready), strict=True))

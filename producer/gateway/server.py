"""Runs a gateway as a process, until a stop signal."""

from __future__ import annotations

import logging
import resource
import signal
import socket
from typing import TYPE_CHECKING

from promptq.shared.errors import ConfigurationError
from promptq.shared.runtime.extras import require
from promptq.shared.runtime.garbage_collection import collect_rarely
from promptq.shared.runtime.quick_imports import quick_imports

if TYPE_CHECKING:
    from promptq.producer.settings.gateway import GatewaySettings

_BACKLOG = 4096  # connections that the system keeps until the gateway accepts them


def run_gateway(settings: GatewaySettings) -> None:
    """Runs the gateway until SIGTERM or SIGINT. Raises PromptqError if the start fails."""
    require("promptq gateway", "gateway")
    with quick_imports():
        import uvicorn

        from promptq.producer.gateway.app import create_app
        from promptq.producer.http.connection_limits import bounded_protocol
    from promptq.producer.clients.connecting import server_url
    from promptq.shared.runtime.logs import configure_logs
    from promptq.shared.server.connection import without_password

    configure_logs(settings.log_level, settings.log_format)
    # `ready` on the standard output already reports the start.
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
    allow_many_connections()
    app = create_app(settings)
    listener = _listen(settings)
    config = uvicorn.Config(
        app,
        loop="uvloop",
        http=bounded_protocol(settings.http_max_connections),
        lifespan="on",
        ws="none",  # otherwise uvicorn would use any installed WebSocket library
        log_config=None,
        access_log=False,
        server_header=False,
        backlog=_BACKLOG,
        timeout_graceful_shutdown=int(settings.http_drain_seconds),
    )
    redis_url = without_password(server_url(settings.redis_url))

    class _Server(uvicorn.Server):
        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            collect_rarely()
            print(f"ready at {_url(listener)}, {_names(settings)} at {redis_url}", flush=True)

        async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
            # Uvicorn logs an error for each stream that it ends.
            logging.getLogger("uvicorn.error").disabled = True
            app.state.stopping.set()  # ends the streams of dashboard pages
            await super().shutdown(sockets)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)  # uvicorn raises the signal again after its end
    _Server(config).run([listener])


def _listen(settings: GatewaySettings) -> socket.socket:
    host, port = settings.http_host, settings.http_port
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if settings.http_share_port:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.bind(address)
    except OSError as error:
        raise ConfigurationError(
            f"cannot listen on {host}:{port}: {error.strerror}; see --host and --port (0: any)"
        ) from error
    return listener


def _url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _names(settings: GatewaySettings) -> str:
    from promptq.shared.protocol.keys import ALL_QUEUES

    own, *others = settings.served_queues
    if not others:
        return f"queue {own}"
    if ALL_QUEUES in others:
        return f"queue {own} and all others"
    return f"queues {', '.join([own, *others])}"


def allow_many_connections() -> None:
    """Increases this process's limit of open files, usually 1,024: each stream uses one file."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))

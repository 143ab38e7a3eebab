"""The command `promptq gateway`."""

from __future__ import annotations

from typing import Annotated

import typer

from promptq.producer.commands.options import Redis
from promptq.producer.gateway.server import run_gateway


def _port(port: int | None) -> int | None:  # with `min` and `max`, the help would not fit
    if port is not None and not 0 <= port <= 65535:
        raise typer.BadParameter(f"{port} is not a port from 0 to 65535")
    return port


def gateway(
    host: Annotated[
        str | None, typer.Option(metavar="HOST", help="Address; default: 127.0.0.1.")
    ] = None,
    port: Annotated[
        int | None, typer.Option(metavar="PORT", callback=_port, help="Default: 8000; 0: any.")
    ] = None,
    share_port: Annotated[
        bool | None,
        typer.Option("--share-port", help="Share the port with other gateways of this machine."),
    ] = None,
    log_requests: Annotated[
        bool | None,
        typer.Option("--log-requests/--no-log-requests", help="Log each call; default: yes."),
    ] = None,
    redis: Redis = None,
    queue: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="A queue to serve; can be given several times. The first one holds API keys, files"
            " and batches. Default: `default` and all others of the server.",
        ),
    ] = None,
) -> None:
    """Serve queues over HTTP, with the API of OpenAI; docs/gateway.md describes it.

    A call goes to the queue that serves its model. Without a worker, requests
    wait until one comes. While the Redis server does not answer, calls get 503.

    Examples:

    promptq gateway
    promptq gateway --host 0.0.0.0 --port 8000 --redis redis://localhost:6379/0
    promptq gateway --queue chat --queue embed
    """
    from promptq.producer.settings.gateway import GatewaySettings
    from promptq.shared.settings.common import read_settings_of
    from promptq.shared.settings.secrets import forget_secrets

    settings = read_settings_of(
        GatewaySettings,
        http_host=host,
        http_port=port,
        http_share_port=share_port,
        http_log_requests=log_requests,
        redis_url=redis,
        queues=queue,
    )
    forget_secrets()
    run_gateway(settings)

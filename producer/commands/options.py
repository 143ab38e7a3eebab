"""Options and arguments that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Redis = Annotated[
    str | None,
    typer.Option(
        "--redis",
        metavar="URL",
        help="Server to talk to; default: PROMPTQ_REDIS_URL, or the running `promptq up`.",
    ),
]
Queue = Annotated[
    str | None,
    typer.Option("--queue", metavar="NAME", help="Queue; default: PROMPTQ_QUEUE, or `default`."),
]
DataDir = Annotated[
    Path | None,
    typer.Option(
        "--data",
        metavar="DIR",
        help="Keep the embedded server's data here; default: nothing is kept.",
    ),
]
Target = Annotated[
    float,
    typer.Option(
        "--target", min=0.001, max=86_400, help="How many seconds a request should wait at most."
    ),
]
Priority = Annotated[
    int | None, typer.Option(min=-1000, max=1000, help="Lower runs sooner; default 0.")
]
Param = Annotated[
    list[str] | None, typer.Option(metavar="FIELD=JSON", help="Any other field of a request.")
]
Model = Annotated[
    str | None, typer.Option(metavar="NAME", help="Use the queue that serves this model.")
]
Detach = Annotated[
    bool, typer.Option("--detach", "-d", help="Print the id and exit; see `promptq watch`.")
]
EventsAsJson = Annotated[bool, typer.Option("--json", help="Print each event as JSON.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]
RequestId = Annotated[str, typer.Argument(metavar="ID", help="Id of the request.")]

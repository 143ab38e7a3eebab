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
        show_default=False,
    ),
]
Queue = Annotated[
    str | None,
    typer.Option(
        "--queue",
        metavar="NAME",
        help="Queue; default: PROMPTQ_QUEUE, or `default`.",
        show_default=False,
    ),
]
DataDir = Annotated[
    Path | None,
    typer.Option(
        "--data",
        metavar="DIR",
        help="Keep the embedded server's data here; default: nothing is kept.",
        show_default=False,
    ),
]
Target = Annotated[
    float,
    typer.Option("--target", min=0.001, help="How many seconds a request should wait at most."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]
RequestId = Annotated[str, typer.Argument(metavar="ID", help="Id of the request.")]

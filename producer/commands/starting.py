"""Commands that start processes: everything, a worker, a server, or a demonstration."""

from __future__ import annotations

import os
import shutil
from typing import Annotated

import typer

from promptq.producer.admin.autoscaling_defaults import HOLD_SECONDS, TARGET_SECONDS
from promptq.producer.commands.options import DataDir, Queue, Redis, Target
from promptq.shared.errors import ConfigurationError
from promptq.shared.runtime.extras import require, require_one_of
from promptq.shared.runtime.quick_imports import quick_imports

ServerPort = Annotated[
    int | None,
    typer.Option(
        min=1,
        max=65535,
        help="Port of the embedded server; default: 6399, or a free one if that is taken.",
    ),
]


def up(
    context: typer.Context,
    redis: Annotated[
        str | None,
        typer.Option(
            metavar="URL", help="Use this server and start none; default: PROMPTQ_REDIS_URL."
        ),
    ] = None,
    redis_port: ServerPort = None,
    data: DataDir = None,
    workers: Annotated[
        str,
        typer.Option(
            metavar="N or N-M",
            help="Number of worker processes for each model. With a range such as 1-4 there are as"
            " many as the load needs.",
        ),
    ] = "1",
    model: Annotated[
        list[str] | None,
        typer.Option(
            metavar="MODEL",
            help="Model for the workers, as in `promptq worker`. Can be given several times: each"
            " model then has a separate queue.",
        ),
    ] = None,
    queue: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Queue; with several models one for each. Default: PROMPTQ_QUEUE or `default` for"
            " the first model, and names like those of the models for others.",
        ),
    ] = None,
    port: Annotated[
        int | None,
        typer.Option(min=0, max=65535, help="Also serve HTTP on this port, and run jobs."),
    ] = None,
    log_requests: Annotated[
        bool, typer.Option("--log-requests", help="Log each call over HTTP.")
    ] = False,
) -> None:
    """Run a server and workers until Ctrl-C; with --port, also a gateway and jobs.

    Without a Redis URL, this starts an embedded server, which other promptq
    commands of the same user find by themselves. Workers that die are restarted.
    All other options go to the workers; `promptq worker --help` lists them.

    Examples:

    promptq up
    promptq up --port 8000
    promptq up --model Qwen/Qwen3-0.6B --dtype bfloat16 --workers 2
    promptq up --workers 1-4
    promptq up --model Qwen/Qwen3-0.6B --model ./my-model --port 8000
    promptq up --redis redis://localhost:6379/0
    promptq up --data ./promptq-data
    """
    with quick_imports():
        from promptq.producer.commands.local_fleet.autoscaler import WorkerRange
        from promptq.producer.commands.local_fleet.up import UpOptions, run_up
        from promptq.producer.commands.screens.terminal import SafeConsole
        from promptq.shared.settings.common import read_settings
        from promptq.shared.settings.model_queues import queues_of_models
        from promptq.shared.settings.worker import read_worker_settings

    worker_range = WorkerRange.parse(workers)
    settings = read_worker_settings() if worker_range.most else read_settings()
    options = UpOptions(
        redis_url=redis or settings.redis_url,
        redis_port=redis_port,
        data_dir=data,
        models=queues_of_models(model or [], queue or [], settings.queue),
        workers=worker_range,
        http_port=port,
        logs_requests=log_requests,
        worker_args=context.args,
    )
    needed = {
        "server": options.redis_url is None,
        "worker": options.workers.most > 0,
        "gateway": port is not None,
        "jobs": port is not None,
    }
    require("promptq up", *(extra for extra, is_needed in needed.items() if is_needed))
    run_up(options, SafeConsole())


def worker(context: typer.Context) -> None:
    """Run one worker; `promptq worker --help` lists its options.

    Examples:

    promptq worker --model Qwen/Qwen3-0.6B --redis redis://localhost:6379/0
    promptq worker --model ./my-model --queue chat --max-num-seqs 32
    """
    require_one_of("promptq worker", "worker", "upstream")
    from promptq.producer.commands.local_fleet.child_process import worker_command

    command = worker_command(context.args)
    os.execv(command[0], command)  # noqa: S606 # this Python, with options that the user typed


def supervise(
    context: typer.Context,
    workers: Annotated[
        str, typer.Option(metavar="N or N-M", help="The least and the most workers that may run.")
    ] = "0-1",
    target_seconds: Target = TARGET_SECONDS,
    hold_seconds: Annotated[
        float,
        typer.Option(
            "--hold",
            min=0,
            help="A worker ends after fewer workers were enough for this many seconds.",
        ),
    ] = HOLD_SECONDS,
    redis: Redis = None,
    queue: Queue = None,
) -> None:
    """Start and stop workers on this machine according to the load of a queue.

    The command after -- is started for each worker. The command gets the address
    and the queue as PROMPTQ_REDIS_URL and PROMPTQ_QUEUE. It must become the
    worker itself, and not start the worker as a child process. A worker that is
    no longer needed finishes its requests. `promptq scaling` prints how many
    workers are wanted, and why.

    Examples:

    promptq supervise --workers 0-8 -- promptq worker --model ./my-model
    """
    with quick_imports():
        from promptq.producer.clients.connecting import server_url
        from promptq.producer.commands.local_fleet.autoscaler import WorkerRange
        from promptq.producer.commands.local_fleet.up import run_supervised
        from promptq.producer.commands.screens.terminal import SafeConsole
        from promptq.shared.settings.common import read_settings

    _, *command = context.args or [""]
    if not command:
        raise typer.BadParameter("name the command that starts a worker: -- promptq worker ...")
    worker_range = WorkerRange.parse(workers)
    if shutil.which(command[0]) is None:
        raise ConfigurationError(f"-- {command[0]}: there is no such program")
    run_supervised(
        server_url(redis),
        queue or read_settings().queue,
        command,
        worker_range,
        SafeConsole(),
        target_seconds=target_seconds,
        hold_seconds=hold_seconds,
    )


def server(port: ServerPort = None, data: DataDir = None) -> None:
    """Run only the embedded server, until Ctrl-C.

    Examples:

    promptq server
    promptq server --port 6399 --data ./promptq-data
    """
    require("promptq server", "server")
    with quick_imports():
        from promptq.producer.commands.local_fleet.up import run_server
        from promptq.producer.commands.screens.terminal import SafeConsole

    run_server(port, data, SafeConsole())


def demo(context: typer.Context) -> None:
    """Show promptq at work: a server, a worker and a dozen requests, side by side.

    The demo needs nothing else and leaves nothing behind. Options go to the
    worker.

    Examples:

    promptq demo
    promptq demo --model Qwen/Qwen3-0.6B
    """
    require("promptq demo", "server", "worker")
    with quick_imports():
        from promptq.producer.commands.local_fleet.demo import run_demo

    raise typer.Exit(run_demo(context.args))

"""`promptq up`: a server, workers, a gateway and its jobs in one terminal, until Ctrl-C."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Self
from urllib.parse import urlsplit

from rich.console import Console
from rich.markup import escape

from promptq.producer.admin.queue_stats import queue_option
from promptq.producer.clients.sync_client import Client
from promptq.producer.commands.local_fleet.autoscaler import Autoscaler, WorkerRange
from promptq.producer.commands.local_fleet.child_process import promptq_command, worker_command
from promptq.producer.commands.local_fleet.supervisor import Supervisor
from promptq.shared.errors import ConfigurationError
from promptq.shared.protocol.keys import Keys
from promptq.shared.server.advertised import all_advertised, how_to_find, is_free
from promptq.shared.server.connection import open_redis, without_password
from promptq.shared.server.embedded import PREFERRED_PORT, EmbeddedServer
from promptq.shared.settings.common import ENV_PREFIX

_LOOK_SECONDS = 0.1


@dataclass
class UpOptions:
    """Options of `promptq up`. If `redis_url` is None, `promptq up` starts an embedded server."""

    redis_url: str | None = None
    redis_port: int | None = None
    data_dir: Path | None = None
    models: Mapping[str, str | None] = field(default_factory=lambda: {"default": None})
    """Maps a queue's name to the queue's model. None stands for the workers' default model."""
    workers: WorkerRange = field(default_factory=lambda: WorkerRange(1, 1))
    """The smallest and the largest number of workers for each model."""
    http_port: int | None = None
    logs_requests: bool = False
    """Whether the gateway logs each call."""
    worker_args: Sequence[str] = field(default_factory=list)


class StopSignals:
    """Context manager that counts stop signals: the first one drains, the second one kills."""

    def __enter__(self) -> Self:
        self._count = 0
        self._before = {
            number: signal.signal(number, self._on_signal)
            for number in (signal.SIGINT, signal.SIGTERM)
        }
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def drain_requested(self) -> bool:
        return self._count > 0

    def stop_requested(self) -> bool:
        return self._count > 1

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        self._count += 1


def run_up(options: UpOptions, console: Console) -> None:
    """Runs all processes until a stop signal. Raises PromptqError if a process does not start."""
    if options.http_port and not is_free(options.http_port):
        raise ConfigurationError(
            f"--port: {options.http_port} on 127.0.0.1 is taken; name another one, or 0 for any"
        )
    for queue in options.models:
        Keys(queue)  # raises for a wrong name, before any process starts
    with StopSignals() as signals, _server(options) as url:
        _print(_parts(options, url), console)
        show = partial(console.out, highlight=False)
        supervisor = Supervisor(_commands(options), _environment(url), show)
        with ExitStack() as stack:
            stack.callback(supervisor.drain, signals.stop_requested)
            scalers = [
                stack.enter_context(closing(scaler))
                for scaler in _autoscalers(options, supervisor, url, show)
            ]
            welcome = partial(_print, _welcome(options, url), console)
            adjust = [scaler.adjust for scaler in scalers]
            supervisor.run(signals.drain_requested, adjust, welcome)
            console.print("\n[dim]finishing running requests; Ctrl-C again stops at once[/]")


@contextmanager
def _server(options: UpOptions) -> Iterator[str]:
    if options.redis_url is not None:
        open_redis(options.redis_url).close()
        yield options.redis_url
        return
    port = options.redis_port
    if port is None and is_free(PREFERRED_PORT):
        port = PREFERRED_PORT
    with EmbeddedServer(port, options.data_dir, is_advertised=True) as server:
        yield server.url


def run_server(port: int | None, data_dir: Path | None, console: Console) -> None:
    """Runs only the embedded server until a stop signal. Raises ConfigurationError."""
    options = UpOptions(redis_port=port, data_dir=data_dir)
    with StopSignals() as signals, _server(options) as url:
        where = f"{without_password(url)} ({how_to_find(url)})"
        for line in (f"server ready at {where}", *beside(url)):
            console.out(line, highlight=False)
        while not signals.drain_requested():
            time.sleep(_LOOK_SECONDS)


def beside(url: str) -> list[str]:
    """Returns a notice that commands now use the embedded server `url`, and not an earlier one.

    Empty if `url` is the only embedded server, or if commands use another server.
    """
    latest, *others = [urlsplit(url).port for url in all_advertised()] or [None]
    if latest != urlsplit(url).port or not others:
        return []
    ports = " and ".join(f"on port {port}" for port in others)
    return [
        f"Another embedded server runs {ports}. Commands without --redis now use this server,",
        f"on port {latest}, until it ends. For the other one:"
        f' --redis "$(promptq url --port {others[0]})"',
    ]


def run_supervised(
    url: str,
    queue: str,
    command: Sequence[str],
    workers: WorkerRange,
    console: Console,
    *,
    target_seconds: float,
    hold_seconds: float,
) -> None:
    """Runs a worker's command in as many processes as the queue needs, until a stop signal."""
    show = partial(console.out, highlight=False)
    times = {"target_seconds": target_seconds, "hold_seconds": hold_seconds}
    env = {**_environment(url), f"{ENV_PREFIX}QUEUE": queue}
    named = {f"worker {number}": command for number in range(1, workers.least + 1)}
    with StopSignals() as signals, Client(url, queue) as client, ExitStack() as stack:
        client.scaling(target_seconds)  # raises errors before any worker starts
        show(f"queue {queue}: {workers.least} to {workers.most} workers, as its load needs")
        supervisor = Supervisor(named, env, show)
        stack.callback(supervisor.drain, signals.stop_requested)
        scaler = Autoscaler(supervisor, client, "worker", command, workers, show, **times)
        stack.enter_context(closing(scaler))
        supervisor.run(signals.drain_requested, [scaler.adjust])
        show("finishing running requests; Ctrl-C again stops at once")


def _autoscalers(
    options: UpOptions, supervisor: Supervisor, url: str, show: Callable[[str], None]
) -> Iterator[Autoscaler]:
    """Yields an autoscaler for each model, if the number of workers is a range."""
    if not options.workers.is_fixed:
        for queue, (name, command) in _workers(options).items():
            client = Client(url, queue)
            yield Autoscaler(supervisor, client, name, command, options.workers, show)


def _workers(options: UpOptions) -> dict[str, tuple[str, list[str]]]:
    """Returns, for each queue, the name and the command of its workers."""
    workers = {}
    for queue, model in options.models.items():
        of_model = [] if model is None else ["--model", model]
        name = "worker" if len(options.models) == 1 else queue
        workers[queue] = name, worker_command([*of_model, "--queue", queue, *options.worker_args])
    return workers


def _commands(options: UpOptions) -> dict[str, list[str]]:
    commands = {}
    for name, worker in _workers(options).values():
        for number in range(1, options.workers.least + 1):
            commands[f"{name} {number}"] = worker
    if options.http_port is not None:
        served = [word for queue in options.models for word in ("--queue", queue)]
        port = str(options.http_port)
        quiet = [] if options.logs_requests else ["--no-log-requests"]
        commands["gateway"] = promptq_command(["gateway", "--port", port, *quiet, *served])
        for queue in options.models:
            named = "jobs" if len(options.models) == 1 else f"jobs {queue}"
            commands[named] = promptq_command(["jobs", "--queue", queue])
    return commands


def _environment(url: str) -> dict[str, str]:
    # An address may hold a password, and all users of the machine can see command lines.
    env = {f"{ENV_PREFIX}REDIS_URL": url}
    if sys.stderr.isatty():
        env[f"{ENV_PREFIX}LOG_FORMAT"] = os.environ.get(f"{ENV_PREFIX}LOG_FORMAT", "console")
    return env


def _print(lines: Sequence[str], console: Console) -> None:
    for line in lines:
        console.print(line, highlight=False, soft_wrap=True)


def _parts(options: UpOptions, url: str) -> list[str]:
    """Returns lines about the running server and the processes that start."""
    own = options.redis_url is None
    kept = f"kept in {escape(str(options.data_dir))}" if options.data_dir else "nothing is kept"
    if options.redis_port is None and urlsplit(url).port != PREFERRED_PORT:
        kept += f"; port {PREFERRED_PORT} is taken"
    kind = f"embedded, {kept}; {escape(how_to_find(url))}" if own else "yours"
    least, most = options.workers.least, options.workers.most
    count = str(most) if options.workers.is_fixed else f"{least} to {most}"
    workers = "1 worker" if most == 1 else f"{count} workers"
    models = options.models.items()
    queues = [
        f"{queue} ({escape(str(model))})" if len(models) > 1 else queue for queue, model in models
    ]
    lines = [
        "[bold]promptq is starting[/]",
        f"  server   {without_password(url)}  [dim]({kind})[/]",
        *(f"  queue    {queue}, {workers}" for queue in queues),
    ]
    if options.http_port is None:
        lines.append("  HTTP     off  [dim](--port 8000: gateway, dashboard and jobs, too)[/]")
    else:
        where = f"http://127.0.0.1:{options.http_port}/" if options.http_port else "a free port,"
        lines.append(f"  HTTP     {where} is the dashboard; /v1 is the API of OpenAI")
    # Commands use this server from now on, and models may take minutes to load.
    notes = beside(url) if own else []
    return [*lines, *(f"[yellow]{escape(line)}[/]" for line in notes), ""]


def _welcome(options: UpOptions, url: str) -> list[str]:
    """Returns lines about next steps, which are printed when all processes are ready."""
    own, queue = options.redis_url is None, next(iter(options.models))
    where = "" if own else f" --redis {without_password(url)}"
    where += escape(queue_option(queue))
    lines = [
        "",
        "[bold]promptq is up[/]; in another terminal:",
        f'  [bold]promptq submit{where} "Once upon a time"[/]',
        f"  [bold]promptq stats{where}[/]",
    ]
    if own:
        cli = 'redis-cli -u "$(promptq url)"'
        prefix = f"promptq:{{{queue}}}:"
        lines += [
            "or with nothing but redis-cli:",
            "  id=$(date +%s)  [dim]# an id can be used only once[/]",
            f"""  {cli} hset "{prefix}request:$id" payload '{{"prompt":"Hi"}}'""",
            f'  {cli} zadd "{prefix}pending" 0 $id',
            f'  {cli} xread block 5000 streams "{prefix}tokens:$id" 0',
        ]
    return [*lines, "", "[dim]Ctrl-C finishes running requests and stops everything.[/]", ""]

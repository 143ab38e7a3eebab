"""`promptq worker`: serve one queue with one model, until told to stop."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import sys
import time
import traceback
from collections.abc import Awaitable, Callable
from contextlib import suppress
from types import FrameType
from typing import Any, Literal, NoReturn, TypeVar, get_args, get_origin

import click
import redis.asyncio
from redis.exceptions import RedisError

from promptq.shared.errors import PromptqError, RedisUnavailableError
from promptq.shared.protocol.keys import Keys
from promptq.shared.runtime.logs import configure_logs
from promptq.shared.runtime.printable import printable
from promptq.shared.runtime.settings import Settings, flag_of, read_settings
from promptq.shared.runtime.tracing import start_tracing
from promptq.shared.server.advertised import advertised, how_to_find
from promptq.shared.server.connection import explain, open_async_redis, without_password
from promptq.shared.server.embedded import EmbeddedServer
from promptq.worker.liveness.engine_watchdog import EngineStuckError
from promptq.worker.liveness.health_server import Health, HealthServer
from promptq.worker.liveness.interpreter_watchdog import watched
from promptq.worker.liveness.service_manager import notify
from promptq.worker.metrics_server import MetricsServer
from promptq.worker.served_model import Served, build
from promptq.worker.service import Worker
from promptq.worker.telemetry.start_up import StartUp

T = TypeVar("T")

_RETRY_SECONDS = 0.2
_ARGUMENTS = "engine_arguments"
"""The setting that is given behind `--`."""
_OBJECTS_BEFORE_COLLECTION = 50_000
_SWITCH_SECONDS = 0.0005
"""The engine's thread gets the interpreter so soon after a step. The default would be 5 ms."""

HELP = """Serve a queue: claim requests, run them in one continuous batch, stream their tokens.

\b
Examples:
  promptq worker
  promptq worker --model ./my-model --redis redis://localhost:6379/0
  promptq worker --model Qwen/Qwen3-0.6B --dtype bfloat16 --max-num-seqs 32
  promptq worker --model model-free
  promptq worker --engine vllm --upstream http://localhost:8000
  promptq worker --engine vllm --model ./big -- --tensor-parallel-size 2

Without options it serves the shipped model, on the server of the running `promptq up` or on one of
its own. `model-free` is not a model: it makes random letters, for load tests.

SIGTERM or Ctrl-C drains: the worker claims no more and finishes the running requests. Those left
after the grace time go back to the queue with their progress. A second signal gives everything back
at once.
"""


async def serve(settings: Settings, redis_url: str) -> None:
    """Run a worker until SIGTERM or SIGINT."""
    Keys(settings.queue)  # refuses a wrong name before a model is loaded
    sys.setswitchinterval(_SWITCH_SECONDS)
    started = time.monotonic()
    stop, stop_now = asyncio.Event(), asyncio.Event()

    def on_signal() -> None:
        (stop_now if stop.is_set() else stop).set()

    _handle_signals(asyncio.get_running_loop(), on_signal)

    tracing = start_tracing("promptq-worker", settings.otlp_endpoint)
    worker: Worker | None = None
    probed = None
    if settings.health_port is not None:
        probed = HealthServer(
            lambda: Health() if worker is None else worker.health,
            settings.health_host,
            settings.health_port,
        )
    client = await _unless(stop, _open_when_there(redis_url, settings.redis_wait))
    try:
        start_up = StartUp()
        try:
            loading = asyncio.to_thread(build, settings, start_up)
            served = await _unless(stop, loading, start_up.close)
        finally:
            start_up.close()
        _spare_the_collector()
        worker = Worker(settings, served, client, start_up.seconds, tracing)
        exposed = None
        if settings.metrics_port is not None:
            exposed = MetricsServer(worker, settings.metrics_host, settings.metrics_port)
        async with watched(settings.stuck_seconds):
            await worker.start()
            try:
                seconds = time.monotonic() - started
                line = _ready_line(settings, served, redis_url, seconds, str(start_up))
                line += f"; metrics at {exposed.url}" if exposed else ""
                print(line + (f"; probes at {probed.url}" if probed else ""), flush=True)
                notify("READY=1")
                await worker.serve(stop)
                notify("STOPPING=1")
                await worker.drain(stop_now)
            finally:
                await worker.stop()
                if exposed is not None:
                    await asyncio.to_thread(exposed.close)
    except Exception as error:
        if isinstance(error, EngineStuckError) or (worker and worker.intake.is_preparing):
            _leave_at_once(_explain(error, redis_url) if isinstance(error, RedisError) else error)
        raise
    finally:
        await client.aclose()
        if probed is not None:
            await asyncio.to_thread(probed.close)
        if tracing is not None:
            await asyncio.to_thread(tracing.close)
    if worker.intake.is_preparing:
        _leave_at_once()


def _handle_signals(loop: asyncio.AbstractEventLoop, on_signal: Callable[[], None]) -> None:
    """Call `on_signal` in the loop at each SIGTERM and SIGINT.

    Handlers of the loop itself would end with the loop. A further signal while the process ends
    would then turn success into a failure.
    """

    def handle(_number: int, _frame: FrameType | None) -> None:
        with suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(on_signal)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, handle)


async def _unless(
    stop: asyncio.Event, starting: Awaitable[T], give_up: Callable[[], object] = lambda: None
) -> T:
    """Await a stage of the start, or end the process if it is told to stop first.

    The process holds no requests yet, and a thread that loads a model would go on for minutes.
    """
    part, stopping = asyncio.ensure_future(starting), asyncio.ensure_future(stop.wait())
    await asyncio.wait((part, stopping), return_when=asyncio.FIRST_COMPLETED)
    if not part.done():
        give_up()
        _leave_at_once()
    stopping.cancel()
    return await part


def _leave_at_once(error: Exception | None = None) -> NoReturn:
    """End the process now, because the interpreter would wait for a thread that may hang for ever.

    `error` is reported as at a normal end.
    """
    if isinstance(error, PromptqError):
        said = printable(str(error), keep="\n\t")
        print(f"promptq worker: {said}", file=sys.stderr)
    elif error is not None:
        said = "".join(traceback.format_exception(error))
        print(printable(said, keep="\n\t"), end="", file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0 if error is None else 1)


def _place_compute_threads() -> None:
    """Set how compute threads behave, before torch is loaded and reads it. Set variables stay.

    Compute threads sleep while they wait for each other, because other threads of this process need
    a core. Spinning cost a third of the tokens on two cores. If there are as many compute threads
    as cores, each stays on its own core. Two threads that share a core take turns for tens of
    milliseconds, which cost a tenth.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    if "OMP_NUM_THREADS" not in os.environ:
        os.environ.setdefault("OMP_PLACES", "cores")
        os.environ.setdefault("OMP_PROC_BIND", "close")


def _leave_torch_out() -> None:
    """Keep transformers from loading torch where it is installed, since its tokenizers need none.

    It would take 180 MB and half of the start. A model's own code may need it.
    """
    sys.modules.setdefault("torch", None)  # type: ignore[arg-type]


def _spare_the_collector() -> None:
    """Keep the garbage collector from scanning libraries and model, which stay anyway.

    A full collection stops every thread, also the engine's, and a busy worker makes many objects.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(_OBJECTS_BEFORE_COLLECTION)


async def _open_when_there(redis_url: str, wait_seconds: float) -> redis.asyncio.Redis:
    """Connect, and wait for a server that starts at the same time as the worker."""
    deadline = time.monotonic() + wait_seconds
    while True:
        try:
            return await open_async_redis(redis_url)
        except RedisUnavailableError:
            if time.monotonic() >= deadline:
                raise
            await asyncio.sleep(_RETRY_SECONDS)


def _ready_line(
    settings: Settings, served: Served, redis_url: str, seconds: float, stages: str
) -> str:
    limits = served.engine.limits
    megabytes = limits.kv_tokens * limits.bytes_per_token / 2**20
    memory = f" ({megabytes:,.0f} MiB)" if megabytes else ""
    dtype = f" in {served.dtype}" if served.dtype else ""
    return (
        f"ready after {seconds:.1f} s: model {served.identity.name} on {served.device}"
        f"{dtype}{', ' * bool(served.way)}{served.way},"
        f" queue {settings.queue} at {without_password(redis_url)},"
        f" {limits.max_num_seqs} slots, {limits.kv_tokens:,} KV tokens{memory},"
        f" up to {limits.max_model_len:,} tokens a request" + (f"; {stages}" if stages else "")
    )


def run(settings: Settings) -> None:
    """Run the command with these settings. Raises PromptqError."""
    if settings.engine == "native":
        _place_compute_threads()
    elif not settings.trust_remote_code:
        _leave_torch_out()
    configure_logs(settings.log_level, settings.log_format)
    redis_url = settings.redis_url or advertised()
    if redis_url is not None:
        _serve(settings, redis_url)
        return
    with EmbeddedServer(is_advertised=True) as server:
        where = f"{without_password(server.url)} ({how_to_find(server.url)})"
        print(f"no Redis given: started an embedded server at {where}", flush=True)
        _serve(settings, server.url)


def _serve(settings: Settings, redis_url: str) -> None:
    try:
        asyncio.run(serve(settings, redis_url))
        # The interpreter removes handlers when it ends. A signal that comes then would turn success
        # into a failure.
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
    except RedisError as error:
        raise _explain(error, redis_url) from error


def _explain(error: RedisError, redis_url: str) -> PromptqError:
    wrong_role = "may not do what a worker does; give it the URL of the user 'worker' (promptq acl)"
    return explain(error, redis_url, wrong_role)


def command() -> click.Command:
    """The command, with one option for each setting, so that each is described in one place."""

    def callback(**given: Any) -> None:
        run(read_settings(**given))

    options: list[click.Parameter] = []
    for key, field in Settings.model_fields.items():
        if key == _ARGUMENTS:
            continue
        is_flag = field.annotation is bool
        without_default = field.default is None or field.default is False
        default = "" if without_default else f" [default: {field.default}]"
        flag = flag_of(key)
        if field.default is True:
            flag, default = f"{flag}/--no-{flag.removeprefix('--')}", " [default: on]"
        options.append(
            click.Option(
                [flag, key],
                help=f"{field.description}{default}",
                is_flag=is_flag,
                default=None,
                metavar=None if is_flag else _metavar(field.annotation),
            )
        )
    return _WorkerCommand(
        "worker",
        params=options,
        callback=callback,
        help=HELP,
        options_metavar="[OPTIONS] [-- ARGUMENTS]",
        context_settings={"help_option_names": ["-h", "--help"]},
    )


class _WorkerCommand(click.Command):
    """Takes what follows `--` for the server. A stray word before it is a mistake, as ever."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        end = args.index("--") if "--" in args else len(args)
        rest = super().parse_args(ctx, args[:end])
        # None lets the environment have them.
        ctx.params[_ARGUMENTS] = tuple(args[end + 1 :]) or None
        return rest


def _metavar(annotation: Any) -> str:
    """What a setting takes: one of a few words, or a value."""
    if annotation == bool | None:
        return "true|false"
    words = get_args(annotation) if get_origin(annotation) is Literal else ()
    return "|".join(words) or "VALUE"

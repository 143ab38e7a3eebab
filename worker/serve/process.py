"""A worker's process, from its start to its end."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from traceback import format_exception
from types import FrameType
from typing import TYPE_CHECKING, NoReturn, Protocol, TypeVar

import redis.asyncio
from redis.exceptions import RedisError

from promptq.shared.errors import PromptqError, RedisUnavailableError
from promptq.shared.protocol.keys import Keys
from promptq.shared.runtime.garbage_collection import collect_rarely
from promptq.shared.runtime.printable import printable
from promptq.shared.runtime.tracing import start_tracing
from promptq.shared.server.connection import explain, open_async_redis, without_password
from promptq.shared.settings.worker import WorkerSettings
from promptq.worker.health.probes import Health, HealthServer
from promptq.worker.health.systemd import notify
from promptq.worker.health.watchdogs import EngineStuckError, watched
from promptq.worker.serve.build import Served, build
from promptq.worker.serve.metrics_server import MetricsServer
from promptq.worker.serve.start_up import StartUp
from promptq.worker.serve.worker import Worker

if TYPE_CHECKING:
    from promptq.worker.engine.load_check.checked_model import Verdict

T = TypeVar("T")

_RETRY_SECONDS = 0.2
_SWITCH_SECONDS = 0.0005
"""If this process computes a model, a thread keeps the interpreter's lock for this many seconds
(Python's default: 0.005). So after a step, the engine's thread waits at most this long for it.
Without a model here, all threads always need the lock, and each switch costs more than it gains."""


class Turn(Protocol):
    """Decides when a process may load its model, if several processes share the device."""

    def listen(self, stop: asyncio.Event, stop_now: asyncio.Event) -> None:
        """From now on, set these events when the owner (the parent process) orders this process to
        end. `handle_signals` sets the same events."""

    async def wait(self, settings: WorkerSettings, client: redis.asyncio.Redis) -> Verdict | None:
        """Wait until the model may be loaded. Returns an earlier load's test result, or None."""

    def serving(self, line: str, verdict: Verdict | None) -> None:
        """Report that the worker claims requests from now on. `line` is for the log."""


def serve_until_stopped(settings: WorkerSettings, redis_url: str, turn: Turn | None = None) -> None:
    """Run a worker until SIGTERM or SIGINT. If `turn` is not None, load the model only after
    `turn.wait`. Raises PromptqError."""
    try:
        asyncio.run(_serve(settings, redis_url, turn))
        # The interpreter removes signal handlers when it ends. A signal that arrives after that
        # would turn success into a failure.
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
    except RedisError as error:
        raise _explain(error, redis_url) from error


def _explain(error: RedisError, redis_url: str) -> PromptqError:
    wrong_role = "may not do what a worker does; give it the URL of the user 'worker' (promptq acl)"
    return explain(error, redis_url, wrong_role)


async def _serve(settings: WorkerSettings, redis_url: str, turn: Turn | None) -> None:
    Keys(settings.queue)  # refuses a wrong name before a model is loaded
    started = time.monotonic()
    stop, stop_now = asyncio.Event(), asyncio.Event()

    handle_signals(stop, stop_now)
    if turn is not None:
        turn.listen(stop, stop_now)

    tracing = start_tracing("promptq-worker", settings.otlp_endpoint)
    worker: Worker | None = None
    probed = None
    if settings.health_port is not None:
        probed = HealthServer(
            lambda: Health() if worker is None else worker.health,
            settings.health_host,
            settings.health_port,
        )
    client = await unless(stop, open_when_there(redis_url, settings.redis_wait))
    try:
        known = None
        if turn is not None:
            known = await unless(stop, turn.wait(settings, client))
            started = time.monotonic()
        start_up = StartUp()
        try:
            loading = asyncio.to_thread(build, settings, start_up, known)
            served = await unless(stop, loading, start_up.close)
        finally:
            start_up.close()
        collect_rarely()
        if served.computes_here:
            sys.setswitchinterval(_SWITCH_SECONDS)
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
                if turn is not None:
                    turn.serving(line, served.verdict)
                else:
                    print(line + (f"; probes at {probed.url}" if probed else ""), flush=True)
                notify("READY=1")
                await worker.serve(stop)
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


def handle_signals(stop: asyncio.Event, stop_now: asyncio.Event) -> None:
    """Set `stop` at the first SIGTERM or SIGINT, and `stop_now` at the next signal.

    Installs Python's signal handlers, because the event loop's handlers end with the loop. A signal
    after the loop's end would turn success into a failure.
    """
    loop = asyncio.get_running_loop()

    def on_signal() -> None:
        (stop_now if stop.is_set() else stop).set()

    def handle(_number: int, _frame: FrameType | None) -> None:
        with suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(on_signal)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, handle)


async def unless(
    stop: asyncio.Event, starting: Awaitable[T], give_up: Callable[[], object] = lambda: None
) -> T:
    """Await one stage of the worker's start, and return its result. If `stop` is set first, call
    `give_up` and end the process without waiting: a thread may still load a model for minutes. The
    worker holds no requests yet, so no request is lost."""
    stage, stopping = asyncio.ensure_future(starting), asyncio.ensure_future(stop.wait())
    await asyncio.wait((stage, stopping), return_when=asyncio.FIRST_COMPLETED)
    if not stage.done():
        give_up()
        _leave_at_once()
    stopping.cancel()
    return await stage


def _leave_at_once(error: Exception | None = None) -> NoReturn:
    # A normal end would wait for all threads, and one of them may hang for ever.
    if error is not None:
        is_ours = isinstance(error, PromptqError)
        text = f"promptq worker: {error}" if is_ours else "".join(format_exception(error))
        print(printable(text.removesuffix("\n"), keep="\n\t"), file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0 if error is None else 1)


async def open_when_there(redis_url: str, wait_seconds: float) -> redis.asyncio.Redis:
    """Returns a client that has reached the server. Retries for `wait_seconds`, because the server
    may be starting at the same time. Raises RedisUnavailableError."""
    deadline = time.monotonic() + wait_seconds
    while True:
        try:
            return await open_async_redis(redis_url)
        except RedisUnavailableError:
            if time.monotonic() >= deadline:
                raise
            await asyncio.sleep(_RETRY_SECONDS)


def _ready_line(
    settings: WorkerSettings, served: Served, redis_url: str, seconds: float, stages: str
) -> str:
    limits = served.engine.limits
    megabytes = limits.kv_tokens * limits.bytes_per_token / 2**20
    memory = f" ({megabytes:,.0f} MiB)" if megabytes else ""
    if limits.state_bytes:
        memory += f" and {limits.state_bytes / 2**20:,.0f} MiB of recurrent states"
    token_text = served.tokenizer.token_text
    ends = ", ".join(token_text(end) or f"<{end}>" for end in sorted(served.end_token_ids))
    dtype = f" in {served.dtype}" if served.dtype else ""
    return (
        f"ready after {seconds:.1f} s: model {served.identity.name} on {served.device}"
        f"{dtype}{', ' * bool(served.method)}{served.method},"
        f" queue {settings.queue} at {without_password(redis_url)},"
        f" {limits.max_num_seqs} slots, {limits.kv_tokens:,} KV tokens{memory},"
        f" up to {limits.max_model_len:,} tokens a request,"
        f" ends at {ends or 'no token'}" + (f"; {stages}" if stages else "")
    )

"""Runs one process for each of several models. Only one model is loaded at a time."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection

from redis.exceptions import RedisError

from promptq.shared.errors import PromptqError
from promptq.shared.queue.request_queue import AsyncRequestQueue
from promptq.shared.runtime.logs import configure_logs
from promptq.shared.runtime.tasks import end
from promptq.shared.settings.worker import WorkerSettings
from promptq.worker.health.probes import HealthServer
from promptq.worker.health.reaper import REAPS_PER_LEASE, Reaper
from promptq.worker.health.systemd import notify, watchdog_seconds
from promptq.worker.serve.model_identity import MODEL_FREE, NATIVE, shown_name
from promptq.worker.serve.process import (
    handle_signals,
    open_when_there,
    serve_until_stopped,
    unless,
)
from promptq.worker.swapping.model_choice import SwapTimes
from promptq.worker.swapping.model_process import ModelProcess, forking
from promptq.worker.swapping.standby import Report, Standby
from promptq.worker.swapping.swapper import Swapper

_LEAVING_SECONDS = 10.0  # for a process to end after its drain


async def take_turns(settings: Sequence[WorkerSettings], redis_url: str) -> None:
    """Run workers of several models, one loaded at a time, until SIGTERM or SIGINT. Raises
    PromptqError."""
    first, started = settings[0], time.monotonic()
    by_queue = {each.queue: _of_one(each, nth) for nth, each in enumerate(settings)}
    names = {queue: shown_name(each) for queue, each in by_queue.items()}
    stop, stop_now = asyncio.Event(), asyncio.Event()
    handle_signals(stop, stop_now)
    client = await unless(stop, open_when_there(redis_url, first.redis_wait))
    is_native = any(each.engine == NATIVE and each.model != MODEL_FREE for each in settings)
    slow_imports = ["promptq.worker.engine.runner.load_runner"] * is_native
    context = forking("promptq.worker.command", *slow_imports)
    cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None
    target = partial(_serve_in_turn, cores)
    swapper = Swapper(
        names,
        lambda queue, known: ModelProcess(context, target, by_queue[queue], redis_url, known),
        AsyncRequestQueue(client, first.queue),
        SwapTimes(first.swap_least_seconds, first.swap_longest_wait, first.swap_idle_seconds),
        overlaps=first.swap_overlap,
    )
    probed = None
    try:
        if first.health_port is not None:
            probed = HealthServer(lambda: swapper.health, first.health_host, first.health_port)
        await swapper.start(stop)
        if not stop.is_set():
            each = ", ".join(f"{name} (queue {queue})" for queue, name in names.items())
            line = f"ready after {time.monotonic() - started:.1f} s: models take turns: {each}"
            print(line + (f"; probes at {probed.url}" if probed else ""), flush=True)
            notify("READY=1")
            queue_of = partial(
                AsyncRequestQueue, client, lease_ms=first.lease_ms, max_crashes=first.max_crashes
            )
            beside = [_notify_service_manager(), _reap([*map(queue_of, by_queue)])]
            tasks = [asyncio.create_task(coroutine) for coroutine in beside]
            try:
                await swapper.run(stop)
            finally:
                await end(tasks)
        await swapper.drain(stop_now, first.drain_seconds + _LEAVING_SECONDS)
    finally:
        swapper.kill()
        await client.aclose()
        if probed is not None:
            await asyncio.to_thread(probed.close)


async def _reap(queues: Sequence[AsyncRequestQueue]) -> None:
    # A worker reaps only its own queue. A queue whose model is not loaded has no worker.
    reapers = [Reaper(queue) for queue in queues]
    while True:
        await asyncio.sleep(queues[0].lease_ms / 1000 / REAPS_PER_LEASE)
        for reaper in reapers:
            with suppress(RedisError, OSError):
                await reaper.run_once()


async def _notify_service_manager() -> None:
    while (seconds := watchdog_seconds()) is not None:
        notify("WATCHDOG=1")
        await asyncio.sleep(seconds)


def _of_one(settings: WorkerSettings, nth: int) -> WorkerSettings:
    # Each process has a separate metrics port. Only the owner answers probes.
    port = settings.metrics_port and settings.metrics_port + nth
    return settings.model_copy(update={"metrics_port": port, "health_port": None})


def _serve_in_turn(
    cores: set[int] | None, settings: WorkerSettings, redis_url: str, owner: Connection
) -> None:
    os.setpgid(0, 0)  # Ctrl-C must reach only the owner
    if cores is not None:
        os.sched_setaffinity(0, cores)  # a library may have bound the fork server to one core
    os.environ.pop("NOTIFY_SOCKET", None)  # the owner talks to the service manager
    configure_logs(settings.log_level, settings.log_format)
    standby = Standby(owner)
    try:
        serve_until_stopped(settings, redis_url, standby)
    except PromptqError as error:
        standby.report(Report.FAILED, str(error))
        sys.exit(1)

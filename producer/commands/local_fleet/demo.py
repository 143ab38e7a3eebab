"""`promptq demo`: starts a server and a worker, runs a dozen requests, and shows a table."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from typing import Any

from rich.console import Console
from rich.live import Live

from promptq.producer.clients.async_client import AsyncClient
from promptq.producer.commands.local_fleet.child_process import ChildProcess, worker_command
from promptq.producer.commands.local_fleet.supervisor import WorkersFailedError
from promptq.producer.commands.screens.demo_view import Board, Shown, finished_text, requests_table
from promptq.producer.commands.screens.render import workers_tables
from promptq.producer.commands.screens.terminal import SafeConsole
from promptq.shared.protocol.worker_stats import WorkerStats
from promptq.shared.queue import lookups
from promptq.shared.queue.request_queue import AsyncRequestQueue
from promptq.shared.runtime.tasks import end
from promptq.shared.server.connection import open_async_redis, without_password
from promptq.shared.server.embedded import EmbeddedServer
from promptq.shared.settings.common import ENV_PREFIX

SLOTS = 6
"""Number of slots: fewer than requests, so that requests wait and priorities matter."""

CANCEL_AFTER_TOKENS = 16
_FRAMES_PER_SECOND = 12
_HEARTBEAT_SECONDS = 5.0
_LOOK_SECONDS = 0.05


@dataclass(frozen=True)
class Part:
    """One request of the demo. `fields` are the fields of its payload."""

    title: str
    fields: dict[str, Any]
    is_cancelled: bool = False


def _story(title: str, prompt: str, max_tokens: int, priority: int = 0, **more: Any) -> Part:
    fields = {"prompt": prompt, "max_tokens": max_tokens, "priority": priority}
    return Part(title, {"temperature": 0.7, **fields, **more})


def _chat(title: str, message: str, max_tokens: int, priority: int = 0) -> Part:
    messages = [{"role": "user", "content": message}]
    fields = {"messages": messages, "max_tokens": max_tokens, "priority": priority}
    return Part(title, {"temperature": 0.7, **fields})


_SNAIL = {"prompt": "Once upon a time, there lived a snail who", "ignore_eos": True, "priority": -1}


PARTS: Sequence[Part] = [
    _story("fox", "Once upon a time, there lived a fox named Ruby.", 160),
    _story("owl", "Once upon a time, there lived an owl named Otto.", 60, priority=5),
    _story("bear", "Once upon a time, there lived a bear named Bruno.", 120),
    _chat("chat", "Tell me a story about a fox and a lantern.", 140),
    Part("endless", _SNAIL, is_cancelled=True),
    _story("mouse", "One morning, a mouse named Mia", 40, priority=-10),
    _story("frog", "Once upon a time, there lived a frog named Fred.", 200, priority=10),
    _story("greedy cat", "Once upon a time, there lived a cat named Kit.", 80, temperature=0.0),
    _chat("urgent chat", "Tell me a story about a bird.", 60, priority=-10),
    _story("rabbit", "One day, a rabbit named Rosie", 30),
    _story("goat", "Once upon a time, there lived a goat named Gus.", 100, priority=5),
    _story("duck", "In a little house by the river, a duck", 24, priority=-5),
]


def run_demo(worker_args: Sequence[str] = ()) -> int:
    """Runs the demo and returns the exit code. Ctrl-C ends everything that the demo started."""
    console = SafeConsole(highlight=False)
    try:
        with EmbeddedServer() as server:
            console.print(f"[green]✓[/] server   {without_password(server.url)}")
            with _running_worker(server.url, worker_args, console) as worker:
                asyncio.run(_interruptible(partial(_play, console, server.url, worker)))
    except (KeyboardInterrupt, asyncio.CancelledError):  # Ctrl-C, SIGTERM
        console.print("\nstopped; nothing is left running")
        return 130
    return 0


@contextmanager
def _running_worker(url: str, args: Sequence[str], console: Console) -> Iterator[ChildProcess]:
    """Context manager that runs a worker. After `ready`, shows the worker's warnings and errors."""
    env = {
        f"{ENV_PREFIX}REDIS_URL": url,
        f"{ENV_PREFIX}LOG_LEVEL": "warning",
        f"{ENV_PREFIX}LOG_FORMAT": "console",
    }
    slots = ["--max-num-seqs", str(SLOTS), "--queue", "default"]

    def show(line: str) -> None:
        if worker.is_ready and not line.startswith("ready"):
            console.out(line, highlight=False)

    worker = ChildProcess(worker_command([*slots, *args]), env, show)
    try:
        yield worker
    finally:
        worker.drain()
        worker.wait(timeout=5.0)
        worker.kill()


async def _interruptible(play: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Runs `play` until it ends, or until SIGTERM or Ctrl-C."""
    # A coroutine instead of `play` could end without ever being awaited, and Python would warn.
    this, task = asyncio.current_task(), asyncio.create_task(play())
    assert this is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, this.cancel)
    try:
        await asyncio.wait({task})
    finally:
        await end([task])
    task.result()


async def _play(console: Console, url: str, worker: ChildProcess) -> None:
    await _wait_until_ready(console, worker)
    async with await open_async_redis(url) as connection, AsyncClient(connection) as client:
        # Connect first, twice for each stream, so that the shown times do not include connecting.
        await asyncio.gather(*(connection.ping() for _ in range(2 * len(PARTS))))
        shown = await _run_parts(console, client, worker)
        console.print(requests_table(shown, console.width))
        console.print(workers_tables(await _final_heartbeat(client), console.width))


async def _wait_until_ready(console: Console, worker: ChildProcess) -> None:
    started = time.monotonic()
    loading = "worker   loads the model; at first it also compiles native code ..."
    if not console.is_terminal:  # such a console shows no status
        console.print(f"  {loading}")
    with console.status(loading):
        await _watch(worker, lambda: worker.is_ready)
    for warning in takewhile(lambda line: not line.startswith("ready"), [*worker.last_lines]):
        console.out(warning, highlight=False)
    console.print(f"[green]✓[/] worker   ready after {time.monotonic() - started:.1f} s")


async def _watch(worker: ChildProcess, is_over: Callable[[], bool]) -> None:
    """Waits until `is_over()` is true. Raises WorkersFailedError if the worker ends earlier."""
    while not is_over():
        if (exit_code := worker.exit_code) is not None:
            raise WorkersFailedError(
                f"the worker ended with exit code {exit_code}; it said:\n{worker.output}"
            )
        await asyncio.sleep(_LOOK_SECONDS)


async def _run_parts(console: Console, client: AsyncClient, worker: ChildProcess) -> list[Shown]:
    """Enqueues all requests, shows them until they have ended, and returns what was shown."""
    ids = await client.enqueue_many([part.fields for part in PARTS])
    console.print(f"[green]✓[/] queue    {len(ids)} requests pushed in, {SLOTS} run at a time\n")
    shown = [
        Shown(part.title, part.fields["priority"], part.fields.get("prompt", "")) for part in PARTS
    ]
    readers = asyncio.gather(
        *(_read(console, client, *item) for item in zip(ids, PARTS, shown, strict=True))
    )
    failure = asyncio.create_task(_watch(worker, lambda: False))
    with _live(console, shown):
        try:
            either: set[asyncio.Future[Any]] = {readers, failure}
            done, _ = await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            await end([readers, failure])
    await _read_missing_times(client.queue, ids, shown)
    return shown


async def _read(
    console: Console, client: AsyncClient, request_id: str, part: Part, shown: Shown
) -> None:
    will_cancel = part.is_cancelled
    async for event in client.stream(request_id):
        shown.add(event)
        if will_cancel and shown.num_tokens >= CANCEL_AFTER_TOKENS:
            will_cancel = False
            await client.cancel(request_id)
    if not console.is_terminal:
        console.print(finished_text(shown))


def _live(console: Console, shown: Sequence[Shown]) -> AbstractContextManager[object]:
    if not console.is_terminal:
        return nullcontext()
    return Live(
        Board(shown, SLOTS),
        console=console,
        refresh_per_second=_FRAMES_PER_SECOND,
        vertical_overflow="crop",
    )


async def _read_missing_times(
    queue: AsyncRequestQueue, ids: Sequence[str], shown: Sequence[Shown]
) -> None:
    """Reads queue times of requests that have no statistics: a Redis script has ended them."""
    for request_id, one in zip(ids, shown, strict=True):
        if one.queue_ms is None:
            record = await queue.run(lookups.record(queue.keys, request_id))
            if "claimed_at" in record:
                one.queue_ms = float(record["claimed_at"]) - float(record["enqueued_at"])


async def _final_heartbeat(client: AsyncClient) -> list[WorkerStats]:
    """Waits for a heartbeat after the last request. Returns the statistics of all workers."""
    now_ms = await client.queue.run(lookups.server_time_ms())
    deadline = time.monotonic() + _HEARTBEAT_SECONDS
    while time.monotonic() < deadline:
        workers = (await client.stats()).workers
        if workers and workers[0].heartbeat_at > now_ms + 1000:
            break
        await asyncio.sleep(_LOOK_SECONDS)
    return workers

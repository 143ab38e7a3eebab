"""An event loop with virtual time for several simulated processes.

Each callback belongs to the process in whose context the callback was made. A process runs its
callbacks in the order in which they became ready, as in asyncio. The seed decides which process is
next, and when a process pauses. Time passes a little with each callback, and jumps to the next
timer when no process is ready.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Callable, Coroutine
from contextvars import Context, ContextVar, copy_context
from heapq import heappop, heappush
from typing import Any

from tests.programs.simulation import clock

EPOCH = 1_800_000_000.0
"""The Unix time at which each world begins, in seconds."""
_CALLBACK_SECONDS = 5e-6
_PAUSES = 1 / 400
"""Share of callbacks after which the operating system lets the process wait."""
_LONGEST_PAUSE_SECONDS = 0.02

PROCESS: ContextVar[Process] = ContextVar("PROCESS")


class StandstillError(Exception):
    """Raised if no process will ever run again, or if a world runs too many callbacks."""


class Callback(asyncio.TimerHandle):
    """A call that waits until its process is next, or until its time. asyncio would need more time
    to make such a handle."""

    __slots__ = ("process",)
    _repr, _source_traceback, _scheduled = None, None, False

    def __init__(
        self,
        callback: Callable[..., object],
        args: tuple[Any, ...],
        loop: SimulatedLoop,
        context: Context | None,
        when: float = 0.0,
    ) -> None:
        if context is None:
            context = copy_context()
        self._callback, self._args, self._loop, self._context = callback, args, loop, context
        self._cancelled, self._when, self.process = False, when, context[PROCESS]

    def cancel(self) -> None:
        self._cancelled, self._callback, self._args = True, None, None


class Process:
    """A simulated process with its own clock. `rate` is the speed of its clock."""

    def __init__(self, loop: SimulatedLoop, name: str, rate: float = 1.0) -> None:
        loop.num_processes += 1
        self.loop = loop
        self.name = name
        self.pid = loop.num_processes
        self.is_alive = True
        self.ready: deque[Callback] = deque()
        self.num_callbacks = 0
        self.num_pauses = 0
        """Number of reasons for which the process does not run."""
        self.paused_at = 0.0
        """The world's time at which the last pause began."""
        self.thread: Any = None
        """The thread of a process with blocking code: a `BlockingThread`."""
        self.wall_ahead = 0.0
        """Seconds by which the clock of the machine is ahead."""
        self.computed_seconds = 0.0
        """Seconds of the engine's last step that have yet to pass; `perf_counter` adds them."""
        self._rate = rate
        self._rng = random.Random(f"{loop.seed} {self.pid}")
        self._kept: list[Any] = []
        self.context = copy_context()
        self.context.run(PROCESS.set, self)

    def monotonic(self) -> float:
        return self.pid * 1000 + self.loop.now * self._rate

    def perf_counter(self) -> float:
        return self.monotonic() + self.computed_seconds

    def wall(self) -> float:
        return EPOCH + self.loop.now * self._rate + self.wall_ahead

    def entropy(self, size: int) -> bytes:
        return self._rng.randbytes(size)

    def sleep(self, seconds: float) -> None:
        """Wait in blocking code. Raises RuntimeError in a process without blocking code."""
        if self.thread is not None:
            self.thread.wait(seconds, lambda wake: None)
        elif seconds > 0:
            raise RuntimeError(f"code of a simulated process blocks its loop for {seconds:g} s")

    def world_time(self, monotonic: float) -> float:
        """Returns the world's time at which the clock of this process shows `monotonic`."""
        return (monotonic - self.pid * 1000) / self._rate

    def start(self, main: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Run a coroutine in this process. Returns its task."""
        return self.context.copy().run(self.loop.create_task, main)

    def pause(self) -> None:
        self.num_pauses += 1
        self.paused_at = self.loop.now
        self.loop.withdraw(self)

    def go_on(self) -> None:
        self.num_pauses -= 1
        self.loop.offer(self)

    def kill(self) -> None:
        """Kill the process: no callback, timer or `finally` of the process runs again."""
        self.is_alive = False
        self.loop.withdraw(self)
        # Objects that nothing refers to would be finalized, which runs code of the dead process.
        tasks = (task for task in asyncio.all_tasks(self.loop) if isinstance(task, SimulatedTask))
        self._kept += [self.ready, *(task for task in tasks if task.process is self)]
        self.loop.buried.append(self)


class SimulatedTask(asyncio.Task[Any]):
    """A task whose order in a set does not depend on its memory address."""

    def __init__(self, coroutine: Any, **options: Any) -> None:
        loop: SimulatedLoop = options["loop"]
        loop.num_tasks += 1
        self._number = loop.num_tasks
        self.process = (options.get("context") or copy_context())[PROCESS]
        super().__init__(coroutine, **options)

    def __hash__(self) -> int:
        return self._number


def _make_task(loop: Any, coroutine: Any, **options: Any) -> SimulatedTask:
    return SimulatedTask(coroutine, loop=loop, **options)


class SimulatedLoop(asyncio.BaseEventLoop):
    """The loop of a world. `now` is the world's time in seconds since the beginning."""

    def __init__(self, seed: str, most_callbacks: int) -> None:
        super().__init__()
        self.seed = seed
        self.now = 0.0
        self.num_processes = 0
        self.num_tasks = 0
        self.num_callbacks = 0
        self.buried: list[Process] = []
        self.failures: list[str] = []
        """Errors that no code has caught, and other unhandled events."""
        self.connect: Callable[..., Coroutine[Any, Any, Any]] | None = None
        """Opens connections: the network's method."""
        self.listen: Callable[..., Any] | None = None
        """Accepts connections: the network's method."""
        self.tell: Callable[[Process, str], None]
        """Writes a line into the story of the world: a method of its trace."""
        self._most_callbacks = most_callbacks
        self._random = random.Random(f"{seed} loop").random
        self._runnable: list[Process] = []
        self._timers: list[tuple[float, int, Callback]] = []
        self._num_timers = 0
        self.set_task_factory(_make_task)
        self.set_exception_handler(_note_failure)
        self.root = Process(self, "world")

    # ------------------------------------------------------------ what asyncio calls

    def time(self) -> float:
        process = clock.running
        return process.monotonic() if process is not None else self.now

    def call_soon(
        self, callback: Any, *args: Any, context: Context | None = None
    ) -> asyncio.Handle:
        handle = Callback(callback, args, self, context)
        self._add(handle)
        return handle

    call_soon_threadsafe = call_soon  # there are no threads

    def call_at(
        self, when: float, callback: Any, *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        timer = Callback(callback, args, self, context, when)
        self._num_timers += 1
        heappush(self._timers, (timer.process.world_time(when), self._num_timers, timer))
        return timer

    def call_later(
        self, delay: float, callback: Any, *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        return self.call_at(self.time() + delay, callback, *args, context=context)

    def run_in_executor(  # type: ignore[override]
        self, executor: Any, function: Callable[..., Any], *args: Any
    ) -> asyncio.Future[Any]:
        """Run a function that would run in a thread. The function runs as a whole in one callback,
        after a time that the seed chooses."""
        future = self.create_future()

        def run() -> None:
            try:
                result = function(*args)
            except BaseException as error:
                if not future.done():
                    future.set_exception(error)
            else:
                if not future.done():
                    future.set_result(result)

        draw = self._random()
        self.call_later(0.01 * draw * draw * draw, run)
        return future

    async def create_connection(  # type: ignore[override]
        self, factory: Callable[[], Any], host: str, port: int, **_options: Any
    ) -> tuple[Any, Any]:
        assert self.connect is not None
        opened: tuple[Any, Any] = await self.connect(PROCESS.get(), factory, host, port)
        return opened

    async def create_server(  # type: ignore[override]
        self, factory: Callable[[], Any], host: str, **_options: Any
    ) -> Any:
        assert self.listen is not None
        return self.listen(host, PROCESS.get(), factory)

    # ------------------------------------------------------------ what the world calls

    def at(self, when: float, process: Process, callback: Any, *args: Any) -> None:
        """Call `callback` in a process at the world's time `when`."""
        self._num_timers += 1
        timer = Callback(callback, args, self, process.context)
        heappush(self._timers, (when, self._num_timers, timer))

    def withdraw(self, process: Process) -> None:
        if process in self._runnable:
            self._runnable.remove(process)

    def offer(self, process: Process) -> None:
        if process.ready and not process.num_pauses and process.is_alive:
            self._runnable.append(process)

    # ------------------------------------------------------------ the schedule

    def _add(self, handle: Callback) -> None:
        process = handle.process
        process.ready.append(handle)
        if len(process.ready) == 1 and not process.num_pauses and process.is_alive:
            self._runnable.append(process)

    def _run_once(self) -> None:
        """Run callbacks until one of them stops the loop."""
        draw, timers, runnable, root = self._random, self._timers, self._runnable, self.root
        while not self._stopping:
            if not runnable or (timers and timers[0][0] <= self.now):
                self._pass_time()
            process = runnable[int(draw() * len(runnable))]
            handle = process.ready.popleft()
            if not process.ready:
                runnable.remove(process)
            if handle._cancelled:
                continue
            self.num_callbacks += 1
            process.num_callbacks += 1
            if self.num_callbacks > self._most_callbacks:
                number = self.num_callbacks
                raise StandstillError(f"the world has not ended after {number} callbacks")
            clock.running = process
            handle._run()  # type: ignore[attr-defined]
            clock.running = None
            self.now += _CALLBACK_SECONDS
            if process is not root and draw() < _PAUSES and process.is_alive:
                self._let_wait(process)

    def _pass_time(self) -> None:
        """Let the timers that are due begin, and the next one if no process is ready."""
        timers, runnable = self._timers, self._runnable
        while not runnable or (timers and timers[0][0] <= self.now):
            if not timers:
                raise StandstillError("no process has a callback or a timer")
            when, _, handle = heappop(timers)
            if not handle._cancelled:
                if when > self.now:
                    self.now = when
                self._add(handle)

    def _let_wait(self, process: Process) -> None:
        draw = self._random()
        process.pause()
        self.at(self.now + _LONGEST_PAUSE_SECONDS * draw * draw, self.root, process.go_on)

    def _process_events(self, event_list: Any) -> None:
        pass

    def _write_to_self(self) -> None:
        pass


def _note_failure(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    assert isinstance(loop, SimulatedLoop)
    process = clock.running
    error = context.get("exception")
    who = process.name if isinstance(process, Process) else "nobody"
    loop.failures.append(f"{who}: {context['message']}" + (f": {error!r}" if error else ""))

"""The thread that drives the engine, and the two queues between it and the rest of the worker.

The thread reads the inbox between steps, and nothing else changes the engine from outside. So only
the engine frees KV blocks. Aborts never wait behind new requests. The outbox has a limit: if nobody
fetches outputs, the outbox fills up and the engine pauses.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable
from traceback import clear_frames
from typing import TypeVar

from promptq.shared.protocol.request import FinishReason
from promptq.shared.runtime.logs import get_logger
from promptq.worker.engine.api.messages import (
    EngineRequest,
    EngineSnapshot,
    EngineStats,
    SequenceOutput,
    StepOutput,
)
from promptq.worker.engine.api.port import Engine

T = TypeVar("T")

_MAX_UNFETCHED_STEPS = 64
_IDLE_TICK_SECONDS = 0.5


class EngineThread:
    """Implements `EnginePort` for an engine that computes step by step."""

    is_accepting = True

    def __init__(self, engine: Engine) -> None:
        self.limits = engine.limits
        self.abilities = engine.abilities
        self.stats: EngineStats = engine.stats
        self._engine = engine
        self._additions: deque[EngineRequest] = deque()
        self._aborts: deque[int] = deque()
        self._snapshots: deque[asyncio.Future[EngineSnapshot]] = deque()
        self._inbox = threading.Condition()
        self._is_waiting = False
        """Whether the thread waits for a message, or is about to wait."""
        self._outbox: deque[StepOutput] = deque()
        self._unfetched = threading.BoundedSemaphore(_MAX_UNFETCHED_STEPS)
        self._fetchable = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopping = False
        self._failure: BaseException | None = None
        self._log = get_logger()
        self._last_progress = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    async def stop(self, patience: float) -> None:
        self._stopping = True
        self._wake()
        while self._thread.is_alive() and self.seconds_without_progress() <= patience:
            self._take_outbox()
            await asyncio.sleep(0.005)

    def add(self, request: EngineRequest) -> None:
        self._additions.append(request)
        self._wake()

    def abort(self, sequence_id: int) -> None:
        self._aborts.append(sequence_id)
        self._wake()

    async def snapshot(self) -> EngineSnapshot:
        answer: asyncio.Future[EngineSnapshot] = asyncio.get_running_loop().create_future()
        self._snapshots.append(answer)
        self._wake()
        return await answer

    async def fetch(self) -> list[StepOutput]:
        while True:
            self._fetchable.clear()
            if steps := self._take_outbox():
                return steps
            if self._failure is not None:
                raise self._failure
            await self._fetchable.wait()

    @property
    def has_failed(self) -> bool:
        return self._failure is not None

    @property
    def num_aborting(self) -> int:
        return len(self._aborts)

    def seconds_without_progress(self) -> float:
        return time.monotonic() - self._last_progress

    def _wake(self) -> None:
        if self._is_waiting:
            with self._inbox:
                self._is_waiting = False
                self._inbox.notify()

    def _take_outbox(self) -> list[StepOutput]:
        steps = []
        while self._outbox:
            steps.append(self._outbox.popleft())
            self._unfetched.release()
        return steps

    def _run(self) -> None:
        try:
            while self._apply_inbox():
                self._last_progress = time.monotonic()
                if self._engine.has_work:
                    self._put(self._step())
        except BaseException as error:  # `fetch` raises it in the event loop
            self._failure = error
            self._in_loop(self._fetchable.set)

    def _step(self) -> StepOutput:
        try:
            return self._engine.step()
        except Exception as error:
            self._log.exception("a step failed; it is computed again, if necessary in parts")
            clear_frames(error.__traceback__)  # frees memory that the parts need
            self._last_progress = time.monotonic()
            return self._engine.recover(error)

    def _apply_inbox(self) -> bool:
        # Returns False if the thread must stop.
        if not self._engine.has_work:
            self._wait()
        # Read the aborts first. A sequence's addition precedes its abort, so it is read too.
        snapshots, aborts = _all_of(self._snapshots), _all_of(self._aborts)
        additions = _all_of(self._additions)
        for request in additions:
            try:
                self._engine.add(request)
            except Exception as error:  # one failure must not stop other requests
                refusal = SequenceOutput(
                    request.sequence_id, [], finish_reason=FinishReason.ERROR, error=str(error)
                )
                self._put(StepOutput([refusal], self._engine.stats))
        for sequence_id in aborts:  # after the additions, among which the sequence may be
            self._engine.abort(sequence_id)
            self.stats = self._engine.stats  # perhaps no later step reports them
        if snapshots:
            snapshot = self._engine.snapshot()

            def answer() -> None:
                for future in snapshots:
                    if not future.done():
                        future.set_result(snapshot)

            self._in_loop(answer)
        return not self._stopping

    def _wait(self) -> None:
        with self._inbox:
            self._is_waiting = True  # before the check, so that no later message is missed
            while not (self._stopping or self._additions or self._aborts or self._snapshots):
                self._last_progress = time.monotonic()
                self._inbox.wait(_IDLE_TICK_SECONDS)
                self._is_waiting = True
            self._is_waiting = False

    def _put(self, output: StepOutput) -> None:
        while not self._unfetched.acquire(timeout=_IDLE_TICK_SECONDS):
            self._last_progress = time.monotonic()  # a full outbox is no hang
            if self._stopping:
                return
        self.stats = output.stats
        self._outbox.append(output)
        self._in_loop(self._fetchable.set)

    def _in_loop(self, callback: Callable[[], object]) -> None:
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(callback)


def _all_of(mail: deque[T]) -> list[T]:
    # Another thread may append meanwhile.
    return [mail.popleft() for _ in range(len(mail))]

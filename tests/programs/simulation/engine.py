"""The engine of a simulated worker: the real scheduler and cache, stepped in virtual time."""

from __future__ import annotations

import asyncio
import random
import time
from collections import deque

from promptq.shared.protocol.request import FinishReason
from promptq.worker.engine.api.messages import (
    EngineRequest,
    EngineSnapshot,
    EngineStats,
    SequenceOutput,
    StepOutput,
)
from promptq.worker.engine.api.port import Engine
from promptq.worker.engine.core.sequence import Batch
from tests.programs.simulation.step_costs import step_seconds
from tests.support.model_free import ModelFreeRunner, ModelFreeStep

_MOST_UNFETCHED_STEPS = 64


class CountingRunner(ModelFreeRunner):
    """Counts the tokens of the last step: of prompts and of outputs."""

    num_tokens = 0

    def launch(self, batch: Batch, after: ModelFreeStep | None = None) -> ModelFreeStep:
        self.num_tokens = sum(share.num_tokens for share in batch.scheduled)
        return super().launch(batch, after)


class SimulatedEngine:
    """Implements `EnginePort` for an engine that computes step by step, without a thread.

    It replaces `EngineThread`: messages have an effect between steps, and the outputs of a step
    arrive when the step is over. A step takes about `slowness` times as long as a measured one.
    """

    is_accepting = True

    def __init__(
        self, engine: Engine, runner: CountingRunner, rng: random.Random, slowness: float
    ) -> None:
        self.engine = engine
        self._runner = runner
        self.limits = engine.limits
        self.abilities = engine.abilities
        self.stats: EngineStats = engine.stats
        self._rng = rng
        self._slowness = slowness
        self._additions: deque[EngineRequest] = deque()
        self._aborts: deque[int] = deque()
        self._snapshots: deque[asyncio.Future[EngineSnapshot]] = deque()
        self._outbox: deque[StepOutput] = deque()
        self._mail = asyncio.Event()
        self._fetchable = asyncio.Event()
        self._fetched = asyncio.Event()
        self._aborted: set[int] = set()
        """Sequences whose blocks are free since the last step began."""
        self.num_late_outputs = 0
        """Number of tokens of steps that began after their sequence was aborted."""
        self._failure: BaseException | None = None
        self._is_stopping = False
        self._last_progress = time.monotonic()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._run())

    async def stop(self, patience: float) -> None:
        self._is_stopping = True
        self._mail.set()
        self._outbox.clear()
        self._fetched.set()
        if self._task is not None:
            await asyncio.wait([self._task], timeout=patience)

    def add(self, request: EngineRequest) -> None:
        self._additions.append(request)
        self._mail.set()

    def abort(self, sequence_id: int) -> None:
        self._aborts.append(sequence_id)
        self._mail.set()

    async def snapshot(self) -> EngineSnapshot:
        answer: asyncio.Future[EngineSnapshot] = asyncio.get_running_loop().create_future()
        self._snapshots.append(answer)
        self._mail.set()
        return await answer

    async def fetch(self) -> list[StepOutput]:
        while True:
            self._fetchable.clear()
            if self._outbox:
                steps = list(self._outbox)
                self._outbox.clear()
                self._fetched.set()
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
        return time.monotonic() - self._last_progress if self.engine.has_work else 0.0

    async def _run(self) -> None:
        try:
            while True:
                self._mail.clear()
                self._apply_mail()
                if self._is_stopping:
                    return
                self._last_progress = time.monotonic()
                if not self.engine.has_work:
                    await self._mail.wait()
                    continue
                step = self.engine.step()
                late = [out for out in step.outputs if out.sequence_id in self._aborted]
                self.num_late_outputs += len(late)
                seconds = self._slowness * step_seconds(self._runner.num_tokens)
                await asyncio.sleep(seconds * (0.5 + self._rng.random()))
                await self._put(step)
        except Exception as error:  # `fetch` raises it
            self._failure = error
            self._fetchable.set()

    def _apply_mail(self) -> None:
        aborts, additions = list(self._aborts), list(self._additions)
        self._aborts.clear()
        self._additions.clear()
        for request in additions:
            try:
                self.engine.add(request)
            except ValueError as error:
                refusal = SequenceOutput(
                    request.sequence_id, [], finish_reason=FinishReason.ERROR, error=str(error)
                )
                self._outbox.append(StepOutput([refusal], self.engine.stats))
                self._fetchable.set()
        for sequence_id in aborts:
            self.engine.abort(sequence_id)
            self._aborted.add(sequence_id)
            self.stats = self.engine.stats
        snapshots = list(self._snapshots)
        self._snapshots.clear()
        for answer in snapshots:
            if not answer.done():
                answer.set_result(self.engine.snapshot())

    async def _put(self, step: StepOutput) -> None:
        while len(self._outbox) >= _MOST_UNFETCHED_STEPS and not self._is_stopping:
            self._last_progress = time.monotonic()
            self._fetched.clear()
            await self._fetched.wait()
        self.stats = step.stats
        step.ended_at = time.monotonic()
        self._outbox.append(step)
        self._fetchable.set()

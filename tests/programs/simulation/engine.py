"""The engine of a simulated worker: the real scheduler and cache, stepped in virtual time."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable

from promptq.worker.engine.api.messages import EngineRequest, StepOutput
from promptq.worker.engine.api.port import Engine
from promptq.worker.engine.core.llm_engine import LLMEngine
from promptq.worker.engine.core.runner import SampledToken
from promptq.worker.engine.core.sequence import Batch
from promptq.worker.serve.engine_thread import EngineThread
from tests.programs.simulation.loop import Process
from tests.programs.simulation.step_costs import step_seconds
from tests.support.model_free import ModelFreeRunner, ModelFreeStep

_MOST_UNFETCHED_STEPS = 64


class CountingRunner(ModelFreeRunner):
    """Counts the prompt tokens and the output tokens of the last step."""

    num_tokens = 0

    def launch(self, batch: Batch, after: ModelFreeStep | None = None) -> ModelFreeStep:
        self.num_tokens = sum(share.num_tokens for share in batch.scheduled)
        return super().launch(batch, after)

    def seconds_of_step(self, slowness: float, rng: random.Random) -> float:
        """Returns a random time for the last step: about `slowness` times the measured time."""
        return slowness * step_seconds(self.num_tokens) * (0.5 + rng.random())


class SimulatedRunner(CountingRunner):
    """A runner whose steps take virtual time, `slowness` times as long as measured ones.

    `collect` returns at once, but the engine's clock then shows the end of the step. The caller
    lets the `seconds` of the step pass.
    """

    seconds = 0.0

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        process: Process,
        rng: random.Random,
        slowness: float,
    ) -> None:
        super().__init__(num_blocks, block_size)
        self._process = process
        self._rng = rng
        self._slowness = slowness

    def collect(self, launched: ModelFreeStep) -> list[list[SampledToken]]:
        self.seconds = self.seconds_of_step(self._slowness, self._rng)
        self._process.computed_seconds = self.seconds
        return super().collect(launched)

    async def pass_time(self) -> None:
        """Let the time of the last step pass."""
        await asyncio.sleep(self.seconds)
        self._process.computed_seconds = 0.0


def engine_of(runner: CountingRunner, num_slots: int) -> LLMEngine:
    """Returns the engine of a world's worker."""
    return LLMEngine(runner, max_num_seqs=num_slots, max_num_batched_tokens=64, prefill_chunk=32)


class SimulatedEngine(EngineThread):
    """An `EngineThread` that starts no thread: a task of the event loop computes the steps.

    The outputs of a step arrive when the step is over. For each output, calls `note` with the
    request and the number of tokens so far. The third argument of `note` is True for the first
    output of an attempt or after a preemption.
    """

    def __init__(
        self,
        engine: Engine,
        runner: SimulatedRunner,
        note: Callable[[str, int, bool], None],
    ) -> None:
        super().__init__(engine)
        self.engine = engine
        self._runner = runner
        self._note = note
        self._requests: dict[int, tuple[str, int]] = {}
        """By sequence: the request, and the number of its tokens so far."""
        self._aborted: set[int] = set()
        self.num_late_outputs = 0
        """Number of outputs of steps that began after their sequence was aborted."""
        self._mail = asyncio.Event()
        self._fetched = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._compute())

    async def stop(self, patience: float) -> None:
        self._stopping = True
        self._wake()
        self._take_outbox()
        if self._task is not None:
            await asyncio.wait([self._task], timeout=patience)

    def add(self, request: EngineRequest) -> None:
        _, request_id = request.order
        self._requests[request.sequence_id] = request_id, len(request.output_token_ids)
        super().add(request)

    def seconds_without_progress(self) -> float:
        return super().seconds_without_progress() if self.engine.has_work else 0.0

    async def _compute(self) -> None:
        try:
            while True:
                self._mail.clear()
                if not self._apply_inbox():
                    return
                self._last_progress = time.monotonic()
                if not self.engine.has_work:
                    await self._mail.wait()
                    continue
                step = self._step()
                self.num_late_outputs += sum(
                    output.sequence_id in self._aborted for output in step.outputs
                )
                await self._runner.pass_time()
                self._note_tokens(step)
                while len(self._outbox) >= _MOST_UNFETCHED_STEPS and not self._stopping:
                    self._last_progress = time.monotonic()
                    self._fetched.clear()
                    await self._fetched.wait()
                step.ended_at = time.monotonic()
                self._put(step)
        except Exception as error:  # `fetch` raises it
            self._failure = error
            self._fetchable.set()

    def _apply_inbox(self) -> bool:
        aborts = {*self._aborts}
        goes_on = super()._apply_inbox()
        self._aborted |= aborts
        return goes_on

    def _note_tokens(self, step: StepOutput) -> None:
        for output in step.outputs:
            request_id, num_tokens = self._requests[output.sequence_id]
            num_tokens += len(output.token_ids)
            self._requests[output.sequence_id] = request_id, num_tokens
            begins = output.timing is not None and output.finish_reason is None
            self._note(request_id, num_tokens, begins)

    def _wait(self) -> None:
        """Returns at once: `_compute` waits for a message."""

    def _wake(self) -> None:
        self._mail.set()

    def _put(self, output: StepOutput) -> None:
        self.stats = output.stats
        self._outbox.append(output)
        self._fetchable.set()

    def _take_outbox(self) -> list[StepOutput]:
        steps = [*self._outbox]
        self._outbox.clear()
        self._fetched.set()
        return steps

    def _in_loop(self, callback: Callable[[], object]) -> None:
        callback()

"""The engine's thread: what goes in between steps, and what comes out, in order and complete."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from itertools import pairwise

import pytest

from promptq.shared.protocol.request import FinishReason, SamplingParams
from promptq.worker.engine.api.messages import EngineRequest, SequenceOutput
from promptq.worker.engine.core.llm_engine import LLMEngine
from promptq.worker.engine.core.runner import SampledToken
from promptq.worker.serve.engine_thread import EngineThread
from tests.support.model_free import (
    ModelFreeRunner,
    ModelFreeStep,
    build_model_free_engine,
    tokens_of,
)
from tests.support.waiting import async_until

PATIENCE = 60.0


def request(sequence_id: int, max_tokens: int = 10, prompt: int = 3) -> EngineRequest:
    return EngineRequest(
        sequence_id=sequence_id,
        prompt_token_ids=[1] * prompt,
        params=SamplingParams(),
        seed=sequence_id,
        max_tokens=max_tokens,
    )


class HookedRunner(ModelFreeRunner):
    """Calls `hook` with the number of each step before it."""

    def __init__(self, hook: Callable[[int], None]) -> None:
        super().__init__()
        self._hook = hook
        self._num_steps = 0

    def collect(self, launched: ModelFreeStep) -> list[list[SampledToken]]:
        self._hook(self._num_steps)
        self._num_steps += 1
        return super().collect(launched)


def hooked_engine(hook: Callable[[int], None]) -> LLMEngine:
    return LLMEngine(HookedRunner(hook), max_num_seqs=8, max_num_batched_tokens=64)


async def outputs_until_end(thread: EngineThread, sequence_id: int) -> list[SequenceOutput]:
    outputs: list[SequenceOutput] = []
    while not any(it.sequence_id == sequence_id and it.finish_reason for it in outputs):
        outputs += [output for step in await thread.fetch() for output in step.outputs]
    return outputs


def tokens_in(outputs: list[SequenceOutput], sequence_id: int) -> list[int]:
    return [token for it in outputs if it.sequence_id == sequence_id for token in it.token_ids]


async def test_gives_all_tokens_in_order() -> None:
    thread = EngineThread(build_model_free_engine())
    thread.start()
    thread.add(request(1, max_tokens=30))
    assert tokens_in(await outputs_until_end(thread, 1), 1) == tokens_of(1, 30)
    assert thread.stats.num_processed == 1
    await thread.stop(PATIENCE)


async def test_an_abort_that_leaves_nothing_to_do_shows_in_the_stats() -> None:
    """No step comes that would tell of it, and an idle worker must not look busy."""
    thread = EngineThread(build_model_free_engine(step_seconds=0.001))
    thread.start()
    thread.add(request(1, max_tokens=4000))
    await thread.fetch()
    assert thread.stats.num_used_blocks > 0
    thread.abort(1)
    await async_until(lambda: not thread.stats.num_running)
    assert (thread.stats.num_running, thread.stats.num_used_blocks) == (0, 0)
    await thread.stop(PATIENCE)


async def test_an_abort_ends_a_sequence_and_frees_its_blocks() -> None:
    engine = build_model_free_engine(step_seconds=0.001)
    thread = EngineThread(engine)
    thread.start()
    thread.add(request(1, max_tokens=4000))
    await thread.fetch()
    thread.abort(1)
    await async_until(lambda: not thread.stats.num_running)
    thread.add(request(2))
    outputs = await outputs_until_end(thread, 2)
    behind = outputs[next(n for n, it in enumerate(outputs) if it.sequence_id == 2) :]
    assert tokens_in(behind, 1) == []
    await thread.stop(PATIENCE)
    assert engine.stats.num_used_blocks == 0


async def test_an_abort_finds_what_was_added_just_before_it() -> None:
    engine = build_model_free_engine()
    thread = EngineThread(engine)
    thread.add(request(1, max_tokens=1000))
    thread.abort(1)
    thread.add(request(2))
    thread.start()
    assert tokens_in(await outputs_until_end(thread, 2), 1) == []
    await thread.stop(PATIENCE)
    assert not engine.has_work


async def test_a_sequence_that_cannot_be_taken_ends_with_the_reason_and_alone() -> None:
    thread = EngineThread(build_model_free_engine(max_model_len=50))
    thread.start()
    thread.add(request(1, prompt=50))
    thread.add(request(2))
    outputs = await outputs_until_end(thread, 2)
    (refusal,) = [it for it in outputs if it.sequence_id == 1]
    assert refusal.finish_reason is FinishReason.ERROR
    assert "prompt_token_ids" in (refusal.error or "")
    assert tokens_in(outputs, 2) == tokens_of(2, 10)
    await thread.stop(PATIENCE)


async def test_an_engine_whose_output_is_not_fetched_stops_and_loses_nothing() -> None:
    engine = build_model_free_engine()
    thread = EngineThread(engine)
    thread.start()
    thread.add(request(1, max_tokens=500))
    await async_until(lambda: engine.stats.num_steps >= 64)
    await asyncio.sleep(0.05)
    assert engine.stats.num_steps <= 65
    assert tokens_in(await outputs_until_end(thread, 1), 1) == tokens_of(1, 500)
    await thread.stop(PATIENCE)


async def test_stops_with_a_full_outbox() -> None:
    engine = build_model_free_engine()
    thread = EngineThread(engine)
    thread.start()
    thread.add(request(1, max_tokens=500))
    await async_until(lambda: engine.stats.num_steps >= 64)
    await thread.stop(PATIENCE)
    assert engine.stats.num_steps < 500


async def test_a_failure_is_reported_after_all_earlier_outputs() -> None:
    def fail(step: int) -> None:
        if step == 3:
            raise RuntimeError("out of luck")

    thread = EngineThread(hooked_engine(fail))
    thread.start()
    thread.add(request(1))
    outputs: list[SequenceOutput] = []
    while len(tokens_in(outputs, 1)) < 3:
        outputs += [output for step in await thread.fetch() for output in step.outputs]
    with pytest.raises(RuntimeError, match="out of luck"):
        await thread.fetch()
    assert tokens_in(outputs, 1) == tokens_of(1, 3)
    assert thread.has_failed
    await thread.stop(PATIENCE)


async def test_says_how_long_a_step_takes_and_does_not_wait_for_one_that_hangs() -> None:
    entered, go_on = threading.Event(), threading.Event()

    def hang(_: int) -> None:
        entered.set()
        go_on.wait()

    thread = EngineThread(hooked_engine(hang))
    thread.start()
    idle = []
    for _ in range(200):
        idle.append(thread.seconds_without_progress())
        await asyncio.sleep(0.01)
    assert any(later < before for before, later in pairwise(idle)), "being idle is no hang"
    thread.add(request(1))
    await async_until(entered.is_set)
    await async_until(lambda: thread.seconds_without_progress() >= 0.2)
    await thread.stop(patience=0.1)
    go_on.set()
    await thread.stop(PATIENCE)


async def test_steps_are_progress() -> None:
    """At each step, the last progress was made after the step before it."""
    looks: list[tuple[float, float]] = []

    def look(step: int) -> None:
        idle = thread.seconds_without_progress()
        now = time.monotonic()
        looks.append((now - idle, now))

    thread = EngineThread(hooked_engine(look))
    thread.start()
    thread.add(request(1, max_tokens=50))
    await outputs_until_end(thread, 1)
    await thread.stop(PATIENCE)
    assert len(looks) >= 50
    assert all(progress > before for (_, before), (progress, _) in pairwise(looks))

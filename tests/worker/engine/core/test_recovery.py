"""A step that failed is computed again, in parts: who fails alone ends, nobody else notices."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from promptq.shared.protocol.request import FinishReason, SamplingParams
from promptq.worker.engine.api.messages import EngineRequest, SequenceOutput
from promptq.worker.engine.core.llm_engine import LLMEngine
from promptq.worker.engine.core.sequence import Batch, Sequence
from promptq.worker.engine.model.loading import LoadOptions
from promptq.worker.engine.runner.load_runner import load_runner
from promptq.worker.engine.runner.model_runner import ModelRunner
from promptq.worker.engine.sampling import sampler
from promptq.worker.engine.sampling.penalties import Penalties
from tests.support.model_free import ModelFreeRunner, ModelFreeStep, tokens_of
from tests.worker.engine.tiny_models import save_model

Fault = Callable[[Batch, int], Exception | None]


class FaultyRunner(ModelFreeRunner):
    """Raises what `fault` says of a batch and the number of launches before it."""

    def __init__(self, fault: Fault) -> None:
        super().__init__()
        self._fault = fault
        self.sizes: list[int] = []

    def launch(self, batch: Batch, after: ModelFreeStep | None = None) -> ModelFreeStep:
        error = self._fault(batch, len(self.sizes))
        self.sizes.append(batch.num_tokens)
        if error is not None:
            raise error
        return super().launch(batch, after)


def run(
    fault: Fault, count: int, *, prompt: int = 3, max_tokens: int = 10, **options: object
) -> tuple[dict[int, list[int]], dict[int, SequenceOutput], FaultyRunner, LLMEngine]:
    """Serve so many sequences to their ends, recovering from every step that raises."""
    runner = FaultyRunner(fault)
    engine = LLMEngine(runner, max_num_seqs=64, max_num_batched_tokens=256, **options)
    requests = [
        EngineRequest(
            sequence_id,
            [1] * (prompt - 1) + [sequence_id],
            SamplingParams(),
            seed=sequence_id,
            max_tokens=max_tokens,
        )
        for sequence_id in range(count)
    ]
    tokens, last = serve(engine, requests)
    return tokens, last, runner, engine


def serve(
    engine: LLMEngine, requests: list[EngineRequest]
) -> tuple[dict[int, list[int]], dict[int, SequenceOutput]]:
    """The tokens of each to its end, and its last output."""
    for request in requests:
        engine.add(request)
    tokens: dict[int, list[int]] = {request.sequence_id: [] for request in requests}
    last: dict[int, SequenceOutput] = {}
    while engine.has_work:
        try:
            outputs = engine.step().outputs
        except Exception as error:
            outputs = engine.recover(error).outputs
        for output in outputs:
            tokens[output.sequence_id] += output.token_ids
            if output.finish_reason or output.given_back:
                last[output.sequence_id] = output
    engine.check_integrity()
    assert engine.stats.num_used_blocks == 0
    return tokens, last


def is_in(batch: Batch, sequence_id: int) -> bool:
    return any(share.sequence.sequence_id == sequence_id for share in batch.scheduled)


@pytest.mark.parametrize("ahead", [False, True], ids=["in-step", "a-step-ahead"])
@pytest.mark.parametrize("since", [0, 5], ids=["prefill", "decode"])
def test_one_guilty_among_64_ends_alone(ahead: bool, since: int) -> None:
    def fault(batch: Batch, num_launches: int) -> Exception | None:
        return ValueError("bad state") if num_launches >= since and is_in(batch, 40) else None

    tokens, last, runner, engine = run(fault, 64, async_scheduling=ahead)
    assert last[40].finish_reason is FinishReason.ERROR
    assert last[40].error == "the engine cannot compute it: bad state"
    assert tokens[40] == tokens_of(40, len(tokens[40]))
    for n in set(range(64)) - {40}:
        assert tokens[n] == tokens_of(n, 10)
        assert last[n].finish_reason is FinishReason.LENGTH
    assert engine.stats.recomputed_tokens == 0
    assert len(runner.sizes) < 40, "found by halves"


def test_a_step_that_fails_once_fails_nobody() -> None:
    def fault(batch: Batch, num_launches: int) -> Exception | None:
        return OSError("a hiccup") if num_launches in (0, 4) else None

    tokens, last, _, _ = run(fault, 8)
    assert tokens == {n: tokens_of(n, 10) for n in range(8)}
    assert {output.finish_reason for output in last.values()} == {FinishReason.LENGTH}


def test_short_memory_makes_steps_smaller_and_fails_nobody() -> None:
    def fault(batch: Batch, _: int) -> Exception | None:
        return MemoryError() if batch.num_tokens > 20 else None

    tokens, last, runner, engine = run(fault, 3, prompt=150)
    assert tokens == {n: tokens_of(n, 10) for n in range(3)}
    assert engine.stats.prompt_tokens + engine.stats.cached_tokens == 450
    assert sum(size > 20 for size in runner.sizes) < 30
    assert {output.finish_reason for output in last.values()} == {FinishReason.LENGTH}


def test_an_engine_that_can_no_longer_compute_blames_nobody() -> None:
    def fault(_: Batch, num_launches: int) -> Exception | None:
        return OSError("the device is gone") if num_launches >= 3 else None

    with pytest.raises(OSError, match="the device is gone"):
        run(fault, 8)


def out_of_memory(since: int, times: int) -> Fault:
    """Every step fails from launch `since` on, until those of one token have so many times."""
    failed: list[int] = []

    def fault(batch: Batch, num_launches: int) -> Exception | None:
        if num_launches < since or len(failed) == times:
            return None
        if batch.num_tokens == 1:
            failed.append(num_launches)
        return MemoryError("so short")

    return fault


@pytest.mark.parametrize("ahead", [False, True], ids=["in-step", "a-step-ahead"])
@pytest.mark.parametrize("since", [0, 5], ids=["prefill", "decode"])
@pytest.mark.parametrize("times", [1, 7], ids=["for-one", "for-all"])
def test_memory_that_is_short_at_one_token_for_a_while_fails_nobody(
    ahead: bool, since: int, times: int
) -> None:
    """A sequence that finds no memory waits without blocks, and continues after its tokens."""
    tokens, last, _, engine = run(out_of_memory(since, times), 5, async_scheduling=ahead)
    assert tokens == {n: tokens_of(n, 10) for n in range(5)}
    assert {output.finish_reason for output in last.values()} == {FinishReason.LENGTH}
    assert engine.stats.num_preemptions == times


def test_one_that_found_no_memory_waits_for_another_to_leave() -> None:
    done: set[int] = set()

    def fault(batch: Batch, _: int) -> Exception | None:
        for sequence in (share.sequence for share in batch.scheduled):
            if sequence.sequence_id != 2 and sequence.num_output_tokens == 9:
                done.add(sequence.sequence_id)
        return MemoryError("so short") if is_in(batch, 2) and len(done) < 3 else None

    tokens, last, _, engine = run(fault, 4)
    assert tokens == {n: tokens_of(n, 10) for n in range(4)}
    assert last[2].finish_reason is FinishReason.LENGTH
    assert engine.stats.num_preemptions == 1


def test_one_that_needs_more_memory_than_there_is_goes_back_alone() -> None:
    """With its progress; it is no longer here, and nobody else has noticed."""

    def fault(batch: Batch, num_launches: int) -> Exception | None:
        return MemoryError("so short") if num_launches >= 5 and is_in(batch, 2) else None

    tokens, last, _, _ = run(fault, 4)
    assert last[2].given_back
    assert last[2].finish_reason is None
    assert tokens[2] == tokens_of(2, len(tokens[2]))
    assert 0 < len(tokens[2]) < 10
    for n in (0, 1, 3):
        assert tokens[n] == tokens_of(n, 10)
        assert last[n].finish_reason is FinishReason.LENGTH


def test_memory_that_is_short_for_everything_and_for_good_is_the_engines_end() -> None:
    with pytest.raises(MemoryError, match="so short"):
        run(out_of_memory(5, 10**9), 5)


# --- the real sampler, which knows from step to step what its sequences ask for

ASKING = SamplingParams(repetition_penalty=1.3, frequency_penalty=0.5, min_tokens=3, logprobs=1)


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> ModelRunner:
    directory = save_model(tmp_path_factory.mktemp("llama"), "llama", 7)
    return load_runner(
        str(directory), LoadOptions(device="cpu", dtype="float32", kv_cache_memory=1 << 20)
    )


def seeded(count: int) -> list[EngineRequest]:
    """Of different lengths, so that the three that run are often others."""
    return [
        EngineRequest(n, [5 + n, 9, 30], ASKING, seed=n, max_tokens=6 + 3 * n, order=(n, ""))
        for n in range(count)
    ]


def alone(runner: ModelRunner, request: EngineRequest) -> list[int]:
    engine = LLMEngine(runner, max_num_seqs=1, max_num_batched_tokens=64)
    tokens, _ = serve(engine, [request])
    return tokens[request.sequence_id]


def test_no_memory_for_what_a_new_set_asks_for_changes_no_token(
    runner: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step is computed again for the same sequences, and not by what others asked for."""
    expected = {request.sequence_id: alone(runner, request) for request in seeded(6)}
    failed: list[list[int]] = []

    def short_once(sequences: list[Sequence], *args: Any) -> Penalties:
        ids = [sequence.sequence_id for sequence in sequences]
        if len(ids) == 3 and ids not in failed:
            failed.append(ids)
            raise MemoryError("so short")
        return Penalties(sequences, *args)

    monkeypatch.setattr(sampler, "Penalties", short_once)
    engine = LLMEngine(runner, max_num_seqs=3, max_num_batched_tokens=64)
    tokens, last = serve(engine, seeded(6))
    assert len(failed) >= 3
    assert tokens == expected
    assert {output.finish_reason for output in last.values()} == {FinishReason.LENGTH}


def test_one_whose_parameters_cannot_be_worked_out_ends_alone(runner: ModelRunner) -> None:
    expected = {request.sequence_id: alone(runner, request) for request in seeded(6)}
    requests = seeded(6)
    requests[3] = replace(requests[3], seed=-5)  # as no worker would let through
    engine = LLMEngine(runner, max_num_seqs=3, max_num_batched_tokens=64)
    tokens, last = serve(engine, requests)
    assert last[3].finish_reason is FinishReason.ERROR
    assert tokens == {**expected, 3: []}
    assert {last[n].finish_reason for n in (0, 1, 2, 4, 5)} == {FinishReason.LENGTH}

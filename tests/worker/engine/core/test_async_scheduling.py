"""A step is launched before the last one's tokens are known: the same tokens come out, once."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from promptq.shared.protocol.request import FinishReason, SamplingParams
from promptq.worker.engine.api.grammar import Masker
from promptq.worker.engine.api.messages import EngineRequest
from promptq.worker.engine.core.llm_engine import LLMEngine
from promptq.worker.engine.core.runner import SampledToken
from promptq.worker.engine.core.sequence import Batch
from promptq.worker.engine.model.loading import LoadOptions
from promptq.worker.engine.runner.load_runner import load_runner
from tests.support.model_free import (
    ModelFreeRunner,
    ModelFreeStep,
    token_at,
    tokens_of,
)
from tests.worker.engine.core.stepping import make_request, run_to_end
from tests.worker.engine.tiny_models import save_model

SEED = 11


class AnyToken:
    """A grammar that allows everything. The model-free runner does not ask for its masks."""

    is_complete = False

    @property
    def masker(self) -> Masker:
        raise NotImplementedError

    def allows(self, token_id: int) -> bool:
        return True

    def accept(self, token_id: int) -> None:
        pass


class RecordingRunner(ModelFreeRunner):
    """Notes what is launched and collected, and can lose the device once."""

    def __init__(self, num_blocks: int = 64) -> None:
        super().__init__(num_blocks, block_size=4)
        self.events: list[str] = []
        self.fails = False

    def launch(self, batch: Batch, after: ModelFreeStep | None = None) -> ModelFreeStep:
        sequence_ids = sorted(share.sequence.sequence_id for share in batch.scheduled)
        self.events.append(f"{'launch' if after is None else 'launch ahead'} {sequence_ids}")
        return super().launch(batch, after)

    def collect(self, launched: ModelFreeStep) -> list[list[SampledToken]]:
        self.events.append("collect")
        if self.fails:
            self.fails = False
            raise OSError("the device is gone")
        return super().collect(launched)


def make_engine(
    num_blocks: int = 64, max_num_seqs: int = 4, max_num_batched_tokens: int = 32
) -> tuple[LLMEngine, RecordingRunner]:
    runner = RecordingRunner(num_blocks)
    engine = LLMEngine(
        runner,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        async_scheduling=True,
    )
    return engine, runner


def take_steps(engine: LLMEngine, count: int) -> None:
    for _ in range(count):
        engine.step()


def test_decodes_are_launched_before_the_last_ones_are_collected() -> None:
    engine, runner = make_engine()
    engine.add(make_request(1, max_tokens=4))
    assert run_to_end(engine)[1][0] == tokens_of(1, 4)
    ahead = ["launch ahead [1]", "collect"]
    assert runner.events == ["launch [1]", *ahead, *ahead, *ahead, "collect"]


def test_nothing_is_launched_for_a_sequence_that_its_length_ends() -> None:
    engine, runner = make_engine()
    engine.add(make_request(1, max_tokens=3))
    engine.add(make_request(2, max_tokens=5))
    ended = run_to_end(engine)
    assert {key: tokens for key, (tokens, _) in ended.items()} == {
        1: tokens_of(1, 3),
        2: tokens_of(2, 5),
    }
    launched = [event for event in runner.events if event != "collect"]
    assert launched == [
        "launch [1, 2]",
        "launch ahead [1, 2]",
        "launch ahead [1, 2]",
        "launch ahead [2]",
        "launch ahead [2]",
    ]


def test_what_was_launched_behind_a_stop_is_dropped() -> None:
    engine, runner = make_engine()
    stop = token_at(1, 2)
    assert stop not in tokens_of(1, 2)
    engine.add(make_request(1, max_tokens=20, end_token_ids=frozenset({stop})))
    engine.add(make_request(2, max_tokens=8))
    ended = run_to_end(engine)
    assert ended[1][0] == tokens_of(1, 3)
    assert ended[1][1].finish_reason is FinishReason.STOP
    assert ended[2][0] == tokens_of(2, 8)
    # Token 3 of both was launched when token 2 of 1 was not known to be a stop.
    assert runner.events.count("launch ahead [1, 2]") == 3
    assert engine.stats.generation_tokens == 11
    assert engine.stats.num_used_blocks == 0


def test_an_abort_while_a_step_is_under_way_frees_its_blocks_at_once() -> None:
    engine, runner = make_engine()
    for sequence_id in (1, 2):
        engine.add(make_request(sequence_id, max_tokens=20))
    take_steps(engine, 3)
    assert runner.events[-2:] == ["launch ahead [1, 2]", "collect"]
    used = engine.stats.num_used_blocks
    assert engine.abort(1)
    assert engine.stats.num_used_blocks < used
    engine.check_integrity()
    [output] = engine.step().outputs
    assert output.sequence_id == 2
    engine.add(make_request(3, max_tokens=2))
    tokens = {2: output.token_ids, 3: []}
    while engine.has_work:
        for output in engine.step().outputs:
            tokens[output.sequence_id] += output.token_ids
        engine.check_integrity()
    assert tokens[2] == tokens_of(2, 20)[-len(tokens[2]) :]
    assert tokens[3] == tokens_of(3, 2)


@pytest.mark.parametrize(("max_num_seqs", "priority", "batch"), [(4, 0, "[1, 2]"), (1, -1, "[2]")])
def test_one_who_waits_for_a_free_slot_or_is_more_urgent_is_let_in_at_the_next_step(
    max_num_seqs: int, priority: int, batch: str
) -> None:
    engine, runner = make_engine(max_num_seqs=max_num_seqs)
    engine.add(make_request(1, max_tokens=30))
    take_steps(engine, 5)
    engine.add(make_request(2, max_tokens=30, priority=priority))
    runner.events.clear()
    take_steps(engine, 2)  # one was under way when it came
    assert runner.events == ["collect", f"launch {batch}", f"launch ahead {batch}", "collect"]


def test_a_batch_of_full_slots_is_launched_ahead_though_others_wait() -> None:
    engine, runner = make_engine(max_num_seqs=1)
    for sequence_id in (1, 2):
        engine.add(make_request(sequence_id, max_tokens=4))
    ended = run_to_end(engine)
    assert [ended[key][0] for key in (1, 2)] == [tokens_of(1, 4), tokens_of(2, 4)]
    assert runner.events.count("launch ahead [1]") == runner.events.count("launch ahead [2]") == 3


def test_the_chunks_of_a_prompt_are_launched_ahead_beside_decodes() -> None:
    engine, runner = make_engine(num_blocks=512)
    engine.add(make_request(1, max_tokens=200))
    take_steps(engine, 5)
    engine.add(make_request(2, prompt=[*range(2, 202)], max_tokens=6))
    runner.events.clear()
    tokens: list[int] = []
    while 2 in [it.sequence_id for it in engine.snapshot().sequences]:
        for output in engine.step().outputs:
            tokens += output.token_ids if output.sequence_id == 2 else []
    assert tokens == tokens_of(2, 6)
    launched = [event for event in runner.events if event.startswith("launch")]
    assert [event for event in launched if not event.startswith("launch ahead")] == [
        "launch [1, 2]"  # the one that let it in
    ]
    assert launched.count("launch ahead [1, 2]") >= 200 // 32 + 5


def test_an_abort_in_the_middle_of_a_prompt_counts_nothing_of_what_is_under_way() -> None:
    engine, runner = make_engine(num_blocks=512)
    engine.add(make_request(1, max_tokens=20))
    engine.add(make_request(2, prompt=[*range(2, 202)], max_tokens=6))
    take_steps(engine, 5)  # of which two have decodes alone, to tell what these take
    assert runner.events[-2:] == ["launch ahead [1, 2]", "collect"]
    counted = engine.stats.prompt_tokens
    assert engine.abort(2)
    engine.step()
    assert engine.stats.prompt_tokens == counted
    engine.check_integrity()
    engine.add(make_request(3, prompt=[*range(2, 202)], max_tokens=2))
    assert run_to_end(engine)[3][0] == tokens_of(3, 2)


def test_a_batch_is_launched_ahead_while_memory_is_short_for_those_who_wait() -> None:
    engine, runner = make_engine(num_blocks=24)  # of 4 tokens
    for sequence_id in (1, 2):
        engine.add(make_request(sequence_id, max_tokens=30))
    take_steps(engine, 10)
    engine.add(make_request(3, prompt=[*range(2, 72)], max_tokens=2))  # 18 blocks
    runner.events.clear()
    assert run_to_end(engine)[3][0] == tokens_of(3, 2)
    first_of_the_third = next(at for at, event in enumerate(runner.events) if "3" in event)
    before = [event for event in runner.events[:first_of_the_third] if event != "collect"]
    assert before == ["launch ahead [1, 2]"] * 19
    assert engine.stats.num_preemptions == 0


def test_one_that_fits_behind_one_that_waits_for_a_prefix_is_let_in() -> None:
    engine, runner = make_engine(num_blocks=200, max_num_seqs=8, max_num_batched_tokens=64)
    engine.add(make_request(0, max_tokens=300))
    take_steps(engine, 5)
    prompt = [*range(2, 252)] * 3  # 188 blocks of 4 tokens, in small chunks beside a decode
    engine.add(make_request(1, prompt[:600], max_tokens=2))
    take_steps(engine, 2)
    engine.add(make_request(2, [*prompt[:600], 7, 8], max_tokens=2))  # waits for the blocks of 1
    engine.add(make_request(3, 5, max_tokens=2))
    runner.events.clear()
    take_steps(engine, 2)
    assert "launch [0, 1, 3]" in runner.events


def test_under_load_almost_every_step_is_ahead_that_neither_admits_nor_preempts() -> None:
    """Memory for about half of the slots, requests that always wait, and penalties in some."""
    rng = random.Random(SEED)
    engine, runner = make_engine(num_blocks=400, max_num_seqs=32, max_num_batched_tokens=512)
    for number in range(150):
        params = SamplingParams(presence_penalty=rng.choice([0.0, 0.0, 0.5]))
        length, max_tokens = rng.randint(4, 30), rng.randint(10, 90)
        engine.add(make_request(number, length, max_tokens=max_tokens, params=params))
    running: set[int] = set()
    num_preemptions = num_ahead = num_late = 0
    while engine.has_work:
        runner.events.clear()
        engine.step()
        for event in runner.events[:-1]:  # the last one is to collect
            batch = set(json.loads(event[event.index("[") :]))
            is_ahead = event.startswith("launch ahead")
            makes_room = engine.stats.num_preemptions > num_preemptions
            num_ahead += is_ahead
            num_late += not (is_ahead or batch - running or makes_room)
            running = batch
        num_preemptions = engine.stats.num_preemptions
    assert num_late <= num_ahead / 10


def test_a_more_urgent_one_that_no_room_can_be_made_for_does_not_hold_up_the_others() -> None:
    engine, runner = make_engine(num_blocks=24)
    engine.add(make_request(1, max_tokens=40, priority=-2))
    engine.add(make_request(2, max_tokens=40))
    take_steps(engine, 30)
    engine.add(make_request(3, prompt=[*range(2, 78)], max_tokens=2, priority=-1))
    runner.events.clear()
    take_steps(engine, 5)
    assert runner.events.count("launch ahead [1, 2]") == 5


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(repetition_penalty=1.1),
        SamplingParams(presence_penalty=0.5),
        SamplingParams(frequency_penalty=0.5),
    ],
    ids=lambda params: next(iter(params.model_fields_set)),
)
def test_penalties_do_not_keep_a_step_from_being_ahead(params: SamplingParams) -> None:
    engine, runner = make_engine()
    engine.add(make_request(1, max_tokens=20, params=params))
    assert run_to_end(engine)[1][0] == tokens_of(1, 20)
    assert runner.events.count("launch ahead [1]") == 19


@pytest.mark.parametrize(
    "asked",
    [
        {"params": SamplingParams(min_tokens=20)},
        {"bad_token_sequences": ((1, 2),)},
        {"grammar": AnyToken()},
    ],
    ids=lambda asked: next(iter(asked)),
)
def test_a_choice_that_hangs_on_the_last_token_waits_for_it(asked: dict[str, Any]) -> None:
    engine, runner = make_engine()
    engine.add(make_request(1, max_tokens=20, **asked))
    assert run_to_end(engine)[1][0] == tokens_of(1, 20)
    assert "launch ahead [1]" not in runner.events


def test_a_step_that_fails_takes_the_one_behind_it_along() -> None:
    engine, runner = make_engine()
    engine.add(make_request(1, max_tokens=12))
    tokens = []
    for _ in range(5):
        tokens += engine.step().outputs[0].token_ids
    runner.fails = True
    with pytest.raises(OSError, match="the device is gone"):
        engine.step()
    engine.check_integrity()
    runner.events.clear()
    while engine.has_work:
        tokens += engine.step().outputs[0].token_ids
    assert runner.events[0] == "launch [1]"
    assert tokens == tokens_of(1, 12)


def test_a_model_gives_the_same_tokens_and_logprobs(tmp_path: Path) -> None:
    """Greedy and seeded, with stops and with penalties, which count tokens on the device."""
    directory = save_model(tmp_path, "qwen3", SEED)
    kinds = [
        SamplingParams(temperature=0.0, logprobs=2),
        SamplingParams(temperature=1.0, top_p=0.9),
        SamplingParams(temperature=0.7, top_k=5, logprobs=0),
        SamplingParams(temperature=1.0, frequency_penalty=1.8, repetition_penalty=1.3),
    ]

    def outputs_of(*, async_scheduling: bool, ends: dict[int, int]) -> dict[int, list[object]]:
        runner = load_runner(
            str(directory), LoadOptions(device="cpu", dtype="float32", max_model_len=64)
        )
        ahead = []
        launch = runner.launch

        def counted(batch: Batch, after: object = None) -> object:
            ahead.append(after is not None)
            return launch(batch, after)

        runner.launch = counted
        engine = LLMEngine(
            runner, max_num_seqs=3, max_num_batched_tokens=32, async_scheduling=async_scheduling
        )
        for number in range(12):
            engine.add(
                EngineRequest(
                    number,
                    [5 + number, 9, 4 + number],
                    kinds[number % 4 if number % 3 == 0 else number % 3],
                    seed=number,
                    max_tokens=6 + number,
                    end_token_ids=frozenset({ends[number]} if number in ends else ()),
                    order=(number, ""),
                )
            )
        found: dict[int, list[object]] = {number: [] for number in range(12)}
        while engine.has_work:
            for output in engine.step().outputs:
                found[output.sequence_id] += zip(
                    output.token_ids, output.logprobs or output.token_ids, strict=True
                )
                found[output.sequence_id] += [output.finish_reason] if output.finish_reason else []
            engine.check_integrity()
        assert any(ahead) is async_scheduling
        return found

    whole = outputs_of(async_scheduling=False, ends={})
    ends = {number: whole[number][3][0] for number in (1, 4, 5, 8)}
    expected = outputs_of(async_scheduling=False, ends=ends)
    assert expected != whole
    assert outputs_of(async_scheduling=True, ends=ends) == expected

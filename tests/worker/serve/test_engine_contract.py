"""Tests each engine for what a worker relies on. A new engine is one more entry of `ENGINES`."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from promptq.shared.protocol.request import FinishReason, SamplingParams
from promptq.worker.engine.api.messages import EngineLimits, EngineRequest, SequenceOutput
from promptq.worker.engine.api.port import EnginePort
from promptq.worker.engine.core.llm_engine import LLMEngine
from promptq.worker.engine.model.loading import LoadOptions
from promptq.worker.engine.runner.load_runner import load_runner
from promptq.worker.serve.engine_thread import EngineThread
from promptq.worker.shipped import MODEL_DIR
from promptq.worker.upstream.dialects.llama_cpp import LlamaCppDialect
from promptq.worker.upstream.dialects.sglang import SglangDialect
from promptq.worker.upstream.dialects.vllm import VllmDialect
from promptq.worker.upstream.forwarding_engine import ForwardingEngine
from tests.programs.engines.real_servers import NAMES, real_server
from tests.programs.stand_in_server.starting import DESCRIPTION, stand_in_server
from tests.support.model_free import build_model_free_engine
from tests.worker.engine.tiny_models import save_model

SLOTS, LENGTH = 2, 128
PATIENCE = 60.0
FOR_EVER = LENGTH - 8
"""The number of tokens that fit behind the prompts of these tests."""


def model_free(_directory: Path) -> EnginePort:
    engine = build_model_free_engine(
        max_num_seqs=SLOTS,
        max_model_len=LENGTH,
        step_seconds=0.003,  # or all is over before another thread says a word
    )
    return EngineThread(engine)


def native(directory: Path) -> EnginePort:
    options = LoadOptions(device="cpu", dtype="float32", kv_cache_memory=2**22)
    runner = load_runner(str(directory), options)
    engine = LLMEngine(runner, max_num_seqs=SLOTS, max_num_batched_tokens=64, max_model_len=LENGTH)
    return EngineThread(engine)


def forwarding(url: str, dialect: str, vocab_size: int) -> EnginePort:
    """One that forwards to a server of two slots."""
    limits = EngineLimits(
        max_num_seqs=SLOTS,
        max_num_batched_tokens=64,
        max_model_len=LENGTH,
        kv_tokens=SLOTS * LENGTH,
        block_size=16,
        bytes_per_token=0,
        vocab_size=vocab_size,
    )
    stand_in = STAND_INS[dialect](is_exact=True)
    return ForwardingEngine(url, None, stand_in, limits, DESCRIPTION, PATIENCE)


ENGINES: dict[str, Callable[[Path], EnginePort]] = {"model-free": model_free, "native": native}
STAND_INS = {"vllm": VllmDialect, "llama.cpp": LlamaCppDialect, "sglang": SglangDialect}
"""Dialects of the server without a model, to which an engine forwards."""

VOCAB_SIZE = 257
"""Of the stand-ins, and of the native engine's model."""


def _shipped_vocab_size() -> int:
    config = json.loads((MODEL_DIR / "config.json").read_text())
    size: int = config["vocab_size"]
    return size


PAD_TOKEN_ID = 3
"""Of the shipped model, which never writes it."""

MakesEngine = Callable[[], Any]
"""A context in which a new engine runs."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"), "llama", 5, vocab_size=VOCAB_SIZE)


@pytest.fixture(scope="module")
def stand_ins() -> Iterator[dict[str, str]]:
    """URLs by dialect."""
    with ExitStack() as stack:
        options = ("--max-num-seqs", str(SLOTS), "--max-model-len", str(LENGTH))
        yield {it: stack.enter_context(stand_in_server(it, *options)).url for it in STAND_INS}


REAL = NAMES if os.environ.get("PROMPTQ_TEST_ENGINES") else ()
"""Real servers, which `python -m tests engines` has built. Their model is the shipped one."""


@pytest.fixture(scope="module")
def real_servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """URLs by name, with the same slots and length as the others."""
    model = _without_end_tokens(tmp_path_factory.mktemp("model") / "model")
    with ExitStack() as stack:
        urls = {}
        for name in REAL:
            folder = tmp_path_factory.mktemp("server")
            options = {"model": model, "slots": SLOTS, "length": LENGTH}
            urls[f"real-{name}"] = stack.enter_context(real_server(name, folder, **options)).url
        yield urls


def _without_end_tokens(folder: Path) -> Path:
    """The shipped model with other names of its end tokens: llama.cpp knows them by these, and
    always ends there."""
    shutil.copytree(MODEL_DIR, folder)
    tokenizer = folder / "tokenizer.json"
    text = tokenizer.read_text()
    tokenizer.write_text(text.replace("<|endoftext|>", "<|zero|>").replace("<|im_end|>", "<|two|>"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "eos_token_id": PAD_TOKEN_ID}))
    return folder


@pytest.fixture(params=[*ENGINES, *STAND_INS, *(f"real-{it}" for it in REAL)])
def running(
    request: pytest.FixtureRequest,
    model: Path,
    stand_ins: dict[str, str],
    real_servers: dict[str, str],
) -> MakesEngine:
    @asynccontextmanager
    async def run() -> AsyncIterator[EnginePort]:
        make = ENGINES.get(request.param)
        if make:
            engine = make(model)
        elif request.param in stand_ins:
            engine = forwarding(stand_ins[request.param], request.param, VOCAB_SIZE)
        else:
            name = request.param.removeprefix("real-")
            engine = forwarding(real_servers[request.param], name, _shipped_vocab_size())
        engine.start()
        yield engine
        await engine.stop(PATIENCE)

    return run


def sequence(sequence_id: int, max_tokens: int = 10, **fields: Any) -> EngineRequest:
    fields.setdefault("prompt_token_ids", [sequence_id, 2, 3, 4])
    return EngineRequest(
        sequence_id=sequence_id,
        params=SamplingParams(**fields.pop("params", {})),
        seed=fields.pop("seed", 7),
        max_tokens=max_tokens,
        order=(float(sequence_id), str(sequence_id)),
        **fields,
    )


async def until(
    engine: EnginePort, is_over: Callable[[list[SequenceOutput]], bool]
) -> list[SequenceOutput]:
    outputs: list[SequenceOutput] = []
    while not is_over(outputs):
        outputs += [output for step in await engine.fetch() for output in step.outputs]
    return outputs


async def ended(engine: EnginePort, *sequence_ids: int) -> dict[int, list[SequenceOutput]]:
    """All outputs of these, by sequence, once all have their last."""

    def all_ended(outputs: list[SequenceOutput]) -> bool:
        return {it.sequence_id for it in outputs if it.finish_reason} >= {*sequence_ids}

    outputs = await until(engine, all_ended)
    return {it: [each for each in outputs if each.sequence_id == it] for it in sequence_ids}


def tokens(outputs: list[SequenceOutput]) -> list[int]:
    return [token_id for output in outputs for token_id in output.token_ids]


async def run_one(running: MakesEngine, **fields: Any) -> list[SequenceOutput]:
    async with running() as engine:
        engine.add(sequence(1, **fields))
        return (await ended(engine, 1))[1]


async def test_each_sequence_gets_its_tokens_one_end_and_its_times(running: MakesEngine) -> None:
    async with running() as engine:
        lengths = {1: 3, 2: 12, 3: 1, 4: 7}
        for sequence_id, length in lengths.items():
            engine.add(sequence(sequence_id, length))
        outputs = await ended(engine, *lengths)
        for sequence_id, length in lengths.items():
            of_it = outputs[sequence_id]
            assert len(tokens(of_it)) == length
            assert [it.finish_reason for it in of_it[:-1]] == [None] * (len(of_it) - 1)
            assert of_it[-1].finish_reason is FinishReason.LENGTH
            first, last = of_it[0].timing, of_it[-1].timing
            assert first is not None
            assert last is not None
            assert first.scheduled_at is not None
            assert first.first_token_at is not None
            assert first.scheduled_at <= first.first_token_at
        assert engine.stats.num_processed == len(lengths)
        assert engine.stats.generation_tokens == sum(lengths.values())
        assert (engine.stats.num_running, engine.stats.num_used_blocks) == (0, 0)


async def test_what_is_beside_a_sequence_does_not_change_it(running: MakesEngine) -> None:
    alone = tokens(await run_one(running))
    async with running() as engine:
        for sequence_id in (3, 1, 4):
            engine.add(sequence(sequence_id))
        assert tokens((await ended(engine, 1, 3, 4))[1]) == alone


async def test_randomness_is_a_function_of_seed_and_position(
    running: MakesEngine, request: pytest.FixtureRequest
) -> None:
    if request.node.callspec.params["running"] == "real-sglang":
        pytest.skip("SGLang ignores seeds, unless it is deterministic")
    sampled = [tokens(await run_one(running, seed=seed)) for seed in (1, 1, 2)]
    assert sampled[0] == sampled[1] != sampled[2]


async def test_an_end_token_ends_a_sequence_and_is_its_last(running: MakesEngine) -> None:
    whole = tokens(await run_one(running))
    outputs = await run_one(running, end_token_ids=frozenset({whole[4]}))
    assert outputs[-1].finish_reason is FinishReason.STOP
    assert tokens(outputs) == whole[: whole.index(whole[4]) + 1]


async def test_an_abort_ends_one_and_frees_what_it_had(running: MakesEngine) -> None:
    async with running() as engine:
        engine.add(sequence(1, FOR_EVER))
        await until(engine, lambda outputs: any(it.sequence_id == 1 for it in outputs))
        engine.add(sequence(2, 20))
        engine.abort(1)
        engine.add(sequence(3, 5))
        outputs = await ended(engine, 2, 3)
        assert len(tokens(outputs[3])) == 5
        while engine.num_aborting or engine.stats.num_running:
            await engine.snapshot()
        assert engine.stats.num_used_blocks == 0
        engine.add(sequence(4, 5))
        steps = await until(engine, lambda found: any(it.finish_reason for it in found))
        assert {it.sequence_id for it in steps} == {4}, "nothing is told of what was aborted"


async def test_an_abort_of_what_is_not_there_is_without_effect(running: MakesEngine) -> None:
    async with running() as engine:
        engine.abort(99)
        engine.add(sequence(1))
        await ended(engine, 1)
        engine.abort(1)
        engine.add(sequence(2))
        assert len(tokens((await ended(engine, 2))[2])) == 10


async def test_what_can_never_run_fails_alone_and_says_why(running: MakesEngine) -> None:
    async with running() as engine:
        engine.add(sequence(1, prompt_token_ids=[1] * LENGTH))
        engine.add(sequence(2, prompt_token_ids=[engine.limits.vocab_size]))
        engine.add(sequence(3))
        outputs = await ended(engine, 1, 2, 3)
        for sequence_id in (1, 2):
            assert outputs[sequence_id][-1].finish_reason is FinishReason.ERROR
            assert "prompt_token_ids" in (outputs[sequence_id][-1].error or "")
        assert len(tokens(outputs[3])) == 10
        assert not engine.has_failed


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"temperature": 0.0},
        {"top_k": 5, "top_p": 0.9, "min_p": 0.01},
        {"repetition_penalty": 1.3},
        {"presence_penalty": 0.5, "frequency_penalty": 0.5},
        {"min_tokens": 9},
        {"logit_bias": {"5": 3.0}},
    ],
    ids=lambda params: "-".join(params) or "plain",
)
async def test_another_attempt_goes_on_with_the_same_tokens_where_that_is_promised(
    running: MakesEngine, params: dict[str, Any]
) -> None:
    async with running() as engine:
        abilities = engine.abilities
        engine.add(sequence(1, 16, params=params))
        whole = tokens((await ended(engine, 1))[1])
        engine.add(sequence(2, 16, prompt_token_ids=[1, 2, 3, 4], params=params))
        for at in (1, 7, 15):
            rest = sequence(100 + at, 16, prompt_token_ids=[1, 2, 3, 4], params=params)
            rest.output_token_ids = whole[:at]
            engine.add(rest)
        outputs = await ended(engine, 2, 101, 107, 115)
        for at in (1, 7, 15):
            assert len(tokens(outputs[100 + at])) == 16 - at, "no gap and no repeat"
            if abilities.resumes_exactly(SamplingParams(**params)):
                assert tokens(outputs[100 + at]) == whole[at:]


async def test_log_probabilities_come_with_ranks_where_there_are_any(running: MakesEngine) -> None:
    async with running() as engine:
        if not engine.abilities.logprobs:
            assert "logprobs" in engine.abilities.refused
            return
        engine.add(sequence(1, 6, params={"logprobs": 1, "temperature": 0.0}))
        outputs = (await ended(engine, 1))[1]
        logprobs = [it for output in outputs for it in output.logprobs or ()]
        assert [it.token_id for it in logprobs] == tokens(outputs)
        assert {it.rank for it in logprobs} == {1}, "greedy"
        assert all(it.top and it.top[0].token_id == it.token_id for it in logprobs)


@pytest.mark.parametrize("fields", [{"priority": 0}, {"priority": 1, "tenant": "few"}])
async def test_a_more_urgent_sequence_takes_a_place_where_that_is_promised(
    running: MakesEngine, fields: dict[str, Any]
) -> None:
    """So does one of a tenant of which none runs."""
    async with running() as engine:
        if not engine.abilities.preemption:
            pytest.skip("it runs what it has begun")
        for sequence_id in (1, 2):
            greedy = {"temperature": 0.0}  # resumes exactly with every engine
            engine.add(sequence(sequence_id, FOR_EVER, priority=1, params=greedy))
        await until(engine, lambda outputs: {it.sequence_id for it in outputs} == {1, 2})
        engine.add(sequence(3, 2, **fields))
        before = await until(engine, lambda outputs: any(it.finish_reason for it in outputs))
        assert [it.sequence_id for it in before if it.finish_reason] == [3]
        outputs = await ended(engine, 1, 2)
        preempted = [of_it[-1].timing for of_it in outputs.values()]
        assert sum(timing.preemptions for timing in preempted if timing) == 1


async def test_a_snapshot_shows_who_runs_and_who_waits(running: MakesEngine) -> None:
    async with running() as engine:
        assert (await engine.snapshot()).sequences == []
        for sequence_id in (1, 2, 3):
            engine.add(sequence(sequence_id, FOR_EVER))
        shown = (await engine.snapshot()).sequences
        assert [it.sequence_id for it in shown] == [1, 2, 3]
        assert [it.slot is not None for it in shown] in ([True, True, False], [False] * 3)
        assert all(it.num_tokens >= 4 for it in shown)


async def test_limits_are_those_that_hold(running: MakesEngine) -> None:
    async with running() as engine:
        assert (engine.limits.max_num_seqs, engine.limits.max_model_len) == (SLOTS, LENGTH)
        engine.add(sequence(1, LENGTH - 4))
        assert len(tokens((await ended(engine, 1))[1])) == LENGTH - 4


async def test_stops_whatever_it_is_at(running: MakesEngine) -> None:
    async with running() as engine:
        for sequence_id in range(1, 20):
            engine.add(sequence(sequence_id, FOR_EVER))
        await engine.fetch()
    assert not engine.has_failed

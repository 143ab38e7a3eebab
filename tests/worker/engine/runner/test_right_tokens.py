"""Greedy tokens of the engine equal those of the library's `generate`, whatever the batch does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from promptq.shared.errors import UnsupportedModelError
from promptq.shared.protocol.request import FinishReason, SamplingParams
from promptq.worker.engine.api.messages import EngineRequest, SequenceTiming
from promptq.worker.engine.attention.backend import AttentionBackend
from promptq.worker.engine.core.llm_engine import LLMEngine
from promptq.worker.engine.model.backend_choice import backends_on
from promptq.worker.engine.model.loading import LoadOptions
from promptq.worker.engine.recurrent.mixer import Mixer
from promptq.worker.engine.recurrent.recognition import mixers_of
from promptq.worker.engine.recurrent.state_pool import pool_bytes
from promptq.worker.engine.runner.load_runner import load_runner
from tests.worker.engine.tiny_models import (
    FAMILIES,
    NATIVE,
    VOCAB_SIZE,
    generate,
    make_model,
    save_model,
)

SEED = 7
CPU = torch.device("cpu")
BLOCK_SIZE = 4
GREEDY = SamplingParams(temperature=0.0)


@dataclass(frozen=True)
class Family:
    """A tiny model as a directory, prompts, and what `generate` makes of them."""

    directory: Path
    prompts: list[list[int]]
    expected: list[list[int]]
    bytes_per_token: int
    mixers: list[Mixer]
    """The recurrent layers."""


@pytest.fixture(scope="module")
def family_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Family]:
    made: dict[str, Family] = {}

    def make(name: str) -> Family:
        if name not in made:
            directory = save_model(tmp_path_factory.mktemp(name), name, SEED)
            prompts = make_prompts()
            model = make_model(name, SEED)
            expected = [
                generate(model, prompt, 5 + 3 * (index % 5)) for index, prompt in enumerate(prompts)
            ]
            layout = load_runner(str(directory), LoadOptions(device="cpu")).kv_layout
            made[name] = Family(
                directory, prompts, expected, layout.bytes_per_token, mixers_of(model)
            )
        return made[name]

    return make


def make_prompts() -> list[list[int]]:
    """Of many lengths, most longer than any window of the families; half share a long prefix."""
    generator = torch.Generator().manual_seed(SEED)
    prefix = torch.randint(3, VOCAB_SIZE, (17,), generator=generator).tolist()
    prompts = []
    for index, length in enumerate((1, 13, 30, 6, 21, 2, 11, 26)):
        prompt = torch.randint(3, VOCAB_SIZE, (length,), generator=generator).tolist()
        prompts.append(prefix + prompt if index % 2 else prompt)
    return prompts


def make_engine(
    family: Family,
    *,
    num_blocks: int = 200,
    max_num_seqs: int = 4,
    prefill_chunk: int = 64,
    speculative_tokens: int = 0,
    native: bool = True,
    attention: str = "auto",
) -> LLMEngine:
    runner = load_runner(
        str(family.directory),
        LoadOptions(
            device="cpu",
            dtype="float32",
            block_size=BLOCK_SIZE,
            kv_cache_memory=(
                num_blocks * BLOCK_SIZE * family.bytes_per_token
                + pool_bytes(family.mixers, max_num_seqs)
            ),
            max_num_seqs=max_num_seqs,
            native=native,
            attention=attention,
        ),
    )
    return LLMEngine(
        runner,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=40,
        prefill_chunk=prefill_chunk,
        speculative_tokens=speculative_tokens,
    )


def run(
    engine: LLMEngine, requests: list[EngineRequest], *, every: int = 2
) -> tuple[list[list[int]], list[SequenceTiming]]:
    """Add a request every few steps, with one in between that soon leaves; step until done."""
    outputs: dict[int, list[int]] = {request.sequence_id: [] for request in requests}
    timings: dict[int, SequenceTiming] = {}
    waiting = list(requests)
    num_steps = 0
    while waiting or engine.has_work:
        if waiting and num_steps % every == 0:
            engine.add(waiting.pop(0))
            leaver = 1000 + num_steps
            engine.add(EngineRequest(leaver, [5, num_steps + 3, 9], GREEDY, seed=0, max_tokens=30))
        for output in engine.step().outputs:
            if output.sequence_id in outputs:
                outputs[output.sequence_id] += output.token_ids
                if output.finish_reason is not None:
                    assert output.finish_reason is FinishReason.LENGTH
                    assert output.timing is not None
                    timings[output.sequence_id] = output.timing
        if num_steps % 3 == 2:
            for leaver in range(1000, 1000 + num_steps):
                engine.abort(leaver)
        engine.check_integrity()
        num_steps += 1
    ids = [request.sequence_id for request in requests]
    return [outputs[sequence_id] for sequence_id in ids], [timings[each] for each in ids]


def greedy_requests(family: Family) -> list[EngineRequest]:
    return [
        EngineRequest(index, prompt, GREEDY, seed=0, max_tokens=len(expected), order=(index, ""))
        for index, (prompt, expected) in enumerate(
            zip(family.prompts, family.expected, strict=True)
        )
    ]


@pytest.mark.matrix(3)
@pytest.mark.parametrize("name", FAMILIES)
def test_joining_and_leaving(name: str, family_of: Callable[[str], Family]) -> None:
    """Requests join and leave all the time, and nothing is computed twice."""
    family = family_of(name)
    assert len({token for tokens in family.expected for token in tokens}) >= 10
    engine = make_engine(family)
    runner: Any = engine._runner
    assert (runner.why_no_own_code == "") == (name in NATIVE), runner.why_no_own_code
    outputs, timings = run(engine, greedy_requests(family))
    assert outputs == family.expected
    assert engine.stats.num_preemptions == 0
    assert engine.stats.recomputed_tokens == 0
    assert [timing.recomputed_tokens for timing in timings] == [0] * len(timings)


@pytest.mark.matrix(3)
@pytest.mark.parametrize("name", FAMILIES)
def test_chunks_preemption_and_prefixes(name: str, family_of: Callable[[str], Family]) -> None:
    """Prompts come in chunks of three, the cache is too small for all, and prefixes are shared."""
    family = family_of(name)
    engine = make_engine(family, num_blocks=23, prefill_chunk=3)
    outputs, _ = run(engine, greedy_requests(family), every=1)
    assert outputs == family.expected
    assert engine.stats.num_preemptions > 0
    assert engine.stats.cached_tokens > 0


@pytest.mark.matrix(2)
@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss", "llama4_text"])
@pytest.mark.parametrize("backend", backends_on(CPU, "auto"), ids=lambda backend: backend.name)
def test_every_attention_backend(
    backend: AttentionBackend, name: str, family_of: Callable[[str], Family]
) -> None:
    """Each backend computes these tokens, or refuses the model and names the reason."""
    family, refused = family_of(name), ""
    try:
        engine = make_engine(family, attention=backend.name, prefill_chunk=3)
    except UnsupportedModelError as error:
        refused = str(error)
    if refused:
        assert any(feature in refused for feature in backend.refuses)
    else:
        assert run(engine, greedy_requests(family))[0] == family.expected


def test_blocks_of_the_departed_leave_nothing(family_of: Callable[[str], Family]) -> None:
    """Values that a former owner left in a block, even NaN, reach nobody."""
    family = family_of("llama")
    engine = make_engine(family, num_blocks=40)
    runner: Any = engine._runner
    for layer in runner.cache.layers:
        layer.key.fill_(float("nan"))
        layer.value.fill_(float("nan"))
    outputs, _ = run(engine, greedy_requests(family))
    assert outputs == family.expected


SAMPLED = SamplingParams(
    temperature=1.3,
    top_p=0.95,
    top_k=60,
    min_p=0.001,
    repetition_penalty=1.1,
    presence_penalty=0.3,
    frequency_penalty=0.2,
)


@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_a_seed_decides(name: str, family_of: Callable[[str], Family]) -> None:
    """A sampled request gets the same tokens alone, in a full batch, preempted, and resumed."""
    family = family_of(name)
    request = EngineRequest(0, family.prompts[1], SAMPLED, seed=42, max_tokens=24)
    others = [
        EngineRequest(index, prompt, SAMPLED, seed=index, max_tokens=12, order=(index, ""))
        for index, prompt in enumerate(family.prompts, start=1)
    ]
    [alone], _ = run(make_engine(family, max_num_seqs=1), [request])
    assert len(set(alone)) >= 10

    crowded, _ = run(make_engine(family, max_num_seqs=8), [*others[:4], request, *others[4:]])
    assert crowded[4] == alone

    last = EngineRequest(0, family.prompts[1], SAMPLED, seed=42, max_tokens=24, order=(99, ""))
    preempted, timings = run(make_engine(family, num_blocks=25), [last, *others], every=1)
    assert timings[0].preemptions > 0
    assert preempted[0] == alone

    resumed = EngineRequest(
        0, family.prompts[1], SAMPLED, seed=42, max_tokens=24, output_token_ids=alone[:10]
    )
    [rest], _ = run(make_engine(family), [resumed])
    assert rest == alone[10:]

    other_seed = EngineRequest(0, family.prompts[1], SAMPLED, seed=43, max_tokens=24)
    [different], _ = run(make_engine(family), [other_seed])
    assert different != alone


FEW_TOKENS = {str(token): 100.0 for token in (11, 23, 42, 67, 90)}
"""A `logit_bias` that leaves five tokens to choose from: such a text often repeats itself."""


def repeating_requests(family: Family) -> list[EngineRequest]:
    """Greedy ones and seeded ones."""
    greedy = SamplingParams(temperature=0.0, logit_bias=FEW_TOKENS)
    sampled = SamplingParams(temperature=1.3, top_p=0.9, logit_bias=FEW_TOKENS)
    return [
        EngineRequest(
            index,
            prompt,
            (greedy, sampled)[index % 2],
            seed=index,
            max_tokens=30 + 4 * index,
            order=(index, ""),
        )
        for index, prompt in enumerate(family.prompts)
    ]


@pytest.mark.matrix(2)
@pytest.mark.parametrize(
    ("name", "native"),
    [
        *(("llama", True), ("mistral", True), ("llama", False), ("gpt2", False)),
        *(("llama4_text", False), ("qwen3_5_text", True), ("granitemoehybrid", True)),
        *(("lfm2", True), ("olmo_hybrid", True)),
        *(("deepseek_v3", True), ("kimi_linear", True)),
    ],
)
@pytest.mark.usefixtures("costless")
def test_drafts_change_no_token(
    name: str, native: bool, family_of: Callable[[str], Family]
) -> None:
    """Neither greedy nor seeded: alone, in a batch, preempted, and resumed."""
    family = family_of(name)
    requests = repeating_requests(family)
    expected, _ = run(make_engine(family), requests)
    for options, every in (
        ({"max_num_seqs": 1}, 2),
        ({}, 9),
        ({"num_blocks": 40, "prefill_chunk": 5}, 1),
    ):
        engine = make_engine(family, speculative_tokens=7, native=native, **options)
        outputs, timings = run(engine, requests, every=every)
        assert outputs == expected
        runner: Any = engine._runner
        assert (runner.why_no_own_code == "") == native
        assert engine.stats.drafted_tokens > engine.stats.accepted_tokens > 0
        preempted = any(timing.preemptions for timing in timings)
        assert preempted == ("num_blocks" in options)

    resumed = [
        replace(each, output_token_ids=made[:9])
        for each, made in zip(requests, expected, strict=True)
    ]
    outputs, _ = run(make_engine(family, speculative_tokens=7, native=native), resumed)
    assert outputs == [made[9:] for made in expected]

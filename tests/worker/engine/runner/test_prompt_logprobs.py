"""Log-probabilities of prompts are those of the library, however the prompt is computed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from promptq.shared.protocol.request import SamplingParams
from promptq.worker.engine.api.messages import EngineRequest, PromptLogprobs
from promptq.worker.engine.core import step_plan
from promptq.worker.engine.core.llm_engine import LLMEngine
from promptq.worker.engine.core.sequence import Batch
from promptq.worker.engine.model.loading import LoadOptions
from promptq.worker.engine.runner.load_runner import load_runner
from tests.worker.engine.tiny_models import VOCAB_SIZE, make_model, save_model

SEED = 11
BLOCK_SIZE = 4
NUM_TOP = 4
ASKED = SamplingParams(temperature=0.7, top_k=3, prompt_logprobs=NUM_TOP)
LENGTHS = (1, 2, 33, 17, 64, 40, 5)


@dataclass(frozen=True)
class Told:
    """The log-probabilities of one prompt, and the steps that they took."""

    logprobs: list[float]
    ranks: list[int]
    top_ids: list[list[int]]
    top_logprobs: list[list[float]]
    preemptions: int
    cached_tokens: int


@cache
def prompts() -> list[list[int]]:
    """Of many lengths; those of 10 tokens and more begin with the same ones."""
    generator = torch.Generator().manual_seed(SEED)
    prefix = torch.randint(3, VOCAB_SIZE, (10,), generator=generator).tolist()
    own = [torch.randint(3, VOCAB_SIZE, (it,), generator=generator).tolist() for it in LENGTHS]
    return [prefix + it[10:] if len(it) > 10 else it for it in own]


@pytest.fixture(scope="module")
def directory_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    return cache(lambda name: save_model(tmp_path_factory.mktemp(name), name, SEED))


def make_engine(
    directory: Path, *, native: bool, num_blocks: int = 300, chunk: int = 64
) -> LLMEngine:
    options = LoadOptions(
        device="cpu", dtype="float32", block_size=BLOCK_SIZE, native=native, max_num_seqs=8
    )
    layout = load_runner(str(directory), options).kv_layout
    memory = num_blocks * BLOCK_SIZE * layout.bytes_per_token + layout.state_bytes
    options = replace(options, kv_cache_memory=memory)
    runner = load_runner(str(directory), options)
    return LLMEngine(runner, max_num_seqs=8, max_num_batched_tokens=70, prefill_chunk=chunk)


def requests(
    params: SamplingParams = ASKED, *, max_tokens: int = 3, first_id: int = 0
) -> list[EngineRequest]:
    return [
        EngineRequest(first_id + n, it, params, seed=n, max_tokens=max_tokens, order=(n, ""))
        for n, it in enumerate(prompts())
    ]


def tell(
    engine: LLMEngine, asked: list[EngineRequest], late: Sequence[EngineRequest] = ()
) -> dict[int, Told]:
    """Run all requests, the late ones from the third step on, beside those that run, and check that
    each is told once, with its first token."""
    asked_ids = {request.sequence_id for request in (*asked, *late)}
    pieces: dict[int, list[PromptLogprobs]] = {}
    told: dict[int, Told] = {}
    outputs: dict[int, int] = {}
    for request in asked:
        engine.add(request)
    for num_steps in count():
        if num_steps == 2:
            for request in late:
                engine.add(request)
        if not engine.has_work:
            break
        for output in engine.step().outputs:
            number = output.sequence_id
            if number not in asked_ids:
                assert output.prompt_logprobs is None
                continue
            outputs[number] = outputs.get(number, 0) + 1
            assert (output.prompt_logprobs is not None) == (outputs[number] == 1)
            if output.prompt_logprobs is not None:
                pieces[number] = output.prompt_logprobs
            if output.finish_reason is not None and output.timing is not None:
                timing, found = output.timing, pieces[number]
                told[number] = Told(
                    [it for piece in found for it in piece.logprobs.tolist()],
                    [it for piece in found for it in piece.ranks.tolist()],
                    [it for piece in found for it in piece.top_ids.tolist()],
                    [it for piece in found for it in piece.top_logprobs.tolist()],
                    timing.preemptions,
                    timing.cached_tokens,
                )
    engine.check_integrity()
    assert told.keys() == asked_ids
    return told


def check_against(model: torch.nn.Module, prompt: list[int], told: Told) -> None:
    with torch.inference_mode():
        logits = model(torch.tensor([prompt])).logits[0, :-1]
    expected = logits.float().log_softmax(-1)
    following = torch.tensor(prompt[1:], dtype=torch.int64).unsqueeze(1)
    chosen = expected.gather(1, following)
    assert len(told.logprobs) == len(prompt) - 1
    np.testing.assert_allclose(told.logprobs, chosen.squeeze(1), rtol=0, atol=2e-5)
    assert told.ranks == ((expected > chosen).sum(1) + 1).tolist()
    if len(prompt) > 1:
        top = expected.topk(NUM_TOP)
        assert told.top_ids == top.indices.tolist()
        np.testing.assert_allclose(told.top_logprobs, top.values, rtol=0, atol=2e-5)


@pytest.mark.matrix(2)
@pytest.mark.parametrize(
    ("name", "native"),
    [
        ("llama", True),
        ("llama", False),
        ("gemma2", False),
        ("gpt2", False),
        ("bamba", False),
    ],
)
def test_they_are_those_of_the_library(
    name: str,
    native: bool,
    directory_of: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Together, in chunks, with few logits a step, with a prefix in the cache, and preempted."""
    model, directory = make_model(name, SEED), directory_of(name)
    told = tell(make_engine(directory, native=native), requests())
    for number, prompt in enumerate(prompts()):
        check_against(model, prompt, told[number])

    monkeypatch.setattr(step_plan, "_MAX_LOGITS", 9 * VOCAB_SIZE)
    engine = make_engine(directory, native=native, num_blocks=24, chunk=13)
    launch, most_rows = engine._runner.launch, []

    def launching(batch: Batch, after: Any = None) -> Any:
        most_rows.append(sum(len(share.reported_rows) for share in batch.reporting))
        return launch(batch, after)

    monkeypatch.setattr(engine._runner, "launch", launching)
    preempting = [
        EngineRequest(100 + n, it, ASKED, seed=n, max_tokens=20, priority=-n, order=(n, ""))
        for n, it in enumerate(prompts())
    ]
    tight = tell(engine, preempting)
    assert max(most_rows) == 9
    assert any(it.preemptions for it in tight.values())
    for number, prompt in enumerate(prompts()):
        check_against(model, prompt, tight[100 + number])

    [long, urgent] = [it for it in requests(first_id=200) if len(it.prompt_token_ids) in (64, 40)]
    long.priority = 9
    halved = tell(engine, [long], late=[urgent])
    assert halved[long.sequence_id].preemptions == 1
    for request in (long, urgent):
        check_against(model, request.prompt_token_ids, halved[request.sequence_id])


def test_they_are_the_same_to_the_last_bit(
    directory_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever is beside them, and whatever was computed before."""
    directory = directory_of("llama")
    engine = make_engine(directory, native=True)
    alone = [tell(engine, [request])[request.sequence_id] for request in requests()]
    together = tell(engine, requests(first_id=20))
    beside = requests(SamplingParams(temperature=0.0, logprobs=2), max_tokens=30, first_id=40)
    for request in beside:
        engine.add(request)
    engine.step()
    mixed = tell(engine, requests(first_id=60))
    monkeypatch.setattr(step_plan, "_MAX_LOGITS", 5 * VOCAB_SIZE)
    small = tell(make_engine(directory, native=True, chunk=7), requests(first_id=80))
    for number, it in enumerate(alone):
        for other in (together[20 + number], mixed[60 + number], small[80 + number]):
            assert (other.logprobs, other.ranks) == (it.logprobs, it.ranks)
            assert (other.top_ids, other.top_logprobs) == (it.top_ids, it.top_logprobs)
            assert other.cached_tokens == 0, "its logits would be missing"


def test_a_reported_event_is_not_reported_again(directory_of: Callable[[str], Path]) -> None:
    """A resumed request, whose first tokens were sent, uses the cache like any other."""
    engine = make_engine(directory_of("llama"), native=True)
    [request] = [it for it in requests() if len(it.prompt_token_ids) == 64]
    tell(engine, [request])
    engine.add(
        EngineRequest(
            500, request.prompt_token_ids, ASKED, seed=0, max_tokens=9, output_token_ids=[5, 6]
        )
    )
    outputs = []
    while engine.has_work:
        outputs += engine.step().outputs
    assert all(output.prompt_logprobs is None for output in outputs)
    assert outputs[-1].timing is not None
    assert outputs[-1].timing.cached_tokens == 64

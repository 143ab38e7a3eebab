"""Vectors of prompts equal those that are made of the library's last hidden states."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from promptq.shared.protocol.request import FinishReason, Pooling, SamplingParams
from promptq.worker.engine.api.messages import EngineRequest, SequenceOutput
from promptq.worker.engine.core.llm_engine import LLMEngine
from promptq.worker.engine.core.pooling import Pool
from promptq.worker.engine.model.loading import LoadOptions
from promptq.worker.engine.runner.load_runner import load_runner
from promptq.worker.engine.runner.model_runner import ModelRunner
from tests.worker.engine.core.stepping import run_to_end
from tests.worker.engine.tiny_models import VOCAB_SIZE, make_model, save_model

GREEDY = SamplingParams(temperature=0.0)
POOLINGS: list[Pooling] = ["last", "mean"]
Vector = npt.NDArray[np.float32]


def load(directory: Path, **options: Any) -> ModelRunner:
    return load_runner(str(directory), LoadOptions(device="cpu", block_size=4, **options))


def make_prompts(seed: int) -> list[list[int]]:
    """Of many lengths; every second one begins with the same long prefix."""
    generator = torch.Generator().manual_seed(seed)

    def tokens(length: int) -> list[int]:
        made: list[int] = torch.randint(3, VOCAB_SIZE, (length,), generator=generator).tolist()
        return made

    prefix = tokens(17)
    lengths = (1, 13, 30, 6, 21, 2, 11, 26)
    return [prefix * (index % 2) + tokens(length) for index, length in enumerate(lengths)]


def asking(sequence_id: int, prompt: list[int], pooling: Pooling, **fields: Any) -> EngineRequest:
    order = (float(sequence_id), str(sequence_id))
    return EngineRequest(
        sequence_id, prompt, GREEDY, 0, max_tokens=1, pooling=pooling, order=order, **fields
    )


def vector_of(output: SequenceOutput) -> Vector:
    assert output.finish_reason is FinishReason.STOP, output.error
    assert output.embedding is not None
    return output.embedding


@torch.inference_mode()
def expected(model: Any, prompt: list[int], pooling: Pooling) -> Vector:
    body = model.transformer if hasattr(model, "transformer") else model.model
    states = body(torch.tensor([prompt]), use_cache=False).last_hidden_state[0]
    return (states[-1] if pooling == "last" else states.mean(dim=0)).numpy()


def assert_equal_directions(found: Vector, wanted: Vector) -> None:
    lengths = np.linalg.norm(found), np.linalg.norm(wanted)
    np.testing.assert_allclose(found / lengths[0], wanted / lengths[1], atol=1e-5)
    np.testing.assert_allclose(lengths[0], lengths[1], rtol=1e-5)


@pytest.mark.matrix(3)
@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2", "llama4_text", "opt", "lfm2"])
def test_vectors_are_those_of_the_library(family: str, seed: int, tmp_path: Path) -> None:
    """Beside streams and each other, in chunks, with cached prefixes, and with preemption."""
    runner = load(save_model(tmp_path, family, seed), dtype="float32")
    model = make_model(family, seed)
    engine = LLMEngine(runner, max_num_seqs=3, max_num_batched_tokens=24, prefill_chunk=9)
    requests = [
        asking(2 * number + place, prompt, pooling, priority=-number)
        for number, prompt in enumerate(make_prompts(seed))
        for place, pooling in enumerate(POOLINGS)
    ]
    assert engine.limits.embedding_size == len(expected(model, [3], "last"))
    for stream in range(3):
        prompt = make_prompts(seed)[stream + 1]
        engine.add(EngineRequest(100 + stream, prompt, GREEDY, 0, max_tokens=20, priority=5))
    outputs: dict[int, SequenceOutput] = {}
    for request in requests:  # one joins after each step
        outputs.update((it.sequence_id, it) for it in engine.step().outputs)
        engine.add(request)
    outputs |= {number: last for number, (_, last) in run_to_end(engine).items()}
    for request in requests:
        assert request.pooling is not None
        output = outputs[request.sequence_id]
        assert output.token_ids == []
        wanted = expected(model, request.prompt_token_ids, request.pooling)
        assert_equal_directions(vector_of(output), wanted)
    assert engine.stats.num_preemptions > 0
    assert engine.stats.cached_tokens > 0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_vector_does_not_depend_on_what_is_beside_it(
    dtype: str, seed: int, tmp_path: Path
) -> None:
    """To the last bit: alone, in company, and in chunks of any size."""
    runner = load(save_model(tmp_path, "qwen3", seed), dtype=dtype)
    assert runner.is_row_invariant
    prompts = make_prompts(seed)

    def run(pooling: Pooling, together: int, chunk: int, num_streams: int) -> list[bytes]:
        engine = LLMEngine(runner, max_num_seqs=8, max_num_batched_tokens=64, prefill_chunk=chunk)
        vectors = {}
        for begin in range(0, len(prompts), together):
            for stream in range(num_streams):
                number = 1000 + 10 * begin + stream
                engine.add(EngineRequest(number, [5 + stream] * 9, GREEDY, 0, max_tokens=9))
            for number, prompt in enumerate(prompts[begin : begin + together], begin):
                engine.add(asking(number, prompt, pooling))
            vectors.update(run_to_end(engine))
        return [vector_of(vectors[number][1]).tobytes() for number in range(len(prompts))]

    for pooling in POOLINGS:
        alone = run(pooling, together=1, chunk=64, num_streams=0)
        assert run(pooling, together=8, chunk=5, num_streams=3) == alone
        assert run(pooling, together=3, chunk=16, num_streams=1) == alone


def test_a_mean_has_the_same_bits_however_it_is_cut(seed: int) -> None:
    """Also where large numbers cancel each other out, so that the order of a sum shows."""
    rows = np.random.default_rng(seed).normal(size=(300, 7)).astype(np.float32)
    rows[0:100] *= 1e12
    rows[200:300] = -rows[0:100]
    whole = Pool()
    whole.add(rows)
    for size in (1, 2, 37, 128):
        parts = Pool()
        for begin in range(0, len(rows), size):
            parts.add(rows[begin : begin + size])
        assert parts.mean().tobytes() == whole.mean().tobytes()
    wanted = rows[100:200].mean(axis=0, dtype=np.float64) / 3
    np.testing.assert_allclose(whole.mean(), wanted, atol=1e-3)


def test_a_preempted_mean_begins_anew(seed: int, tmp_path: Path) -> None:
    runner = load(save_model(tmp_path, "qwen3", seed), dtype="float32")
    prompt = make_prompts(seed)[7]
    vectors = []
    for is_preempted in (False, True):
        engine = LLMEngine(runner, max_num_seqs=1, max_num_batched_tokens=8)
        engine.add(asking(1, prompt, "mean"))
        engine.step()
        if is_preempted:
            engine.add(asking(2, prompt[1:], "last", priority=-1))
        vectors.append(vector_of(run_to_end(engine)[1][1]).tobytes())
        assert engine.stats.num_preemptions == is_preempted
    assert vectors[0] == vectors[1]


def test_only_the_last_token_may_come_after_a_cached_prefix(seed: int, tmp_path: Path) -> None:
    """The mean needs the hidden states of all tokens, so all are computed again."""
    runner = load(save_model(tmp_path, "llama", seed), dtype="float32")
    engine = LLMEngine(runner, max_num_seqs=2, max_num_batched_tokens=64)
    prompt = make_prompts(seed)[7]
    computed = []
    for number, pooling in enumerate(("last", "last", "mean", "mean")):
        before = engine.stats.prompt_tokens
        engine.add(asking(number, prompt, pooling))
        run_to_end(engine)
        computed.append(engine.stats.prompt_tokens - before)
    assert computed == [43, 3, 43, 43]


def test_a_vector_that_is_aborted_in_its_prefill_frees_its_blocks(
    seed: int, tmp_path: Path
) -> None:
    runner = load(save_model(tmp_path, "llama", seed), dtype="float32")
    engine = LLMEngine(runner, max_num_seqs=2, max_num_batched_tokens=8)
    engine.add(asking(1, make_prompts(seed)[7], "mean"))
    engine.step()
    assert engine.stats.num_used_blocks > 0
    assert engine.abort(1)
    assert engine.stats.num_used_blocks == 0
    engine.check_integrity()

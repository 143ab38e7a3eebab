"""Measures the sampler's part of a decode step.

The suite's 473m model, with random weights and a vocabulary of 150,000, decodes 64 sequences of
about 250 tokens in the real engine. For each set of parameters, the time in the sampler and the
time of the whole step come from the same steps.
"""

from __future__ import annotations

import argparse
import itertools
import random
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from rich.table import Table

from benchmarks.lib.models import MODELS, random_model
from promptq.producer.commands.screens.terminal import console_for_list
from promptq.shared.protocol.request import SamplingParams
from promptq.worker.engine.api.messages import EngineRequest
from promptq.worker.engine.core.llm_engine import LLMEngine
from promptq.worker.engine.model.loading import LoadedModel, LoadOptions
from promptq.worker.engine.runner.load_runner import runner_of
from promptq.worker.engine.sampling import sampler

VOCAB_SIZE = 150_000
BATCH = 64
PROMPT = 235
WARM_UP, STEPS = 3, 15
MAX_TOKENS = 200
"""Enough that the first sequences still run after the last prompt and all counted steps."""
SEED = 1
_LIMIT = 0.15
_LIMITS = {"greedy": 0.05, "temperature": 0.05}
"""The largest allowed share of a step; `_LIMIT` for all other cases."""
_FILTERS = {"temperature": 0.8, "top_k": 50, "top_p": 0.9, "min_p": 0.01}
_PENALTIES = {"repetition_penalty": 1.1, "presence_penalty": 0.1, "frequency_penalty": 0.1}
_BIAS = {"logit_bias": {str(token): 1.0 for token in range(10)}}
CASES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 0.8},
    "top_k 50": {"top_k": 50},
    "top_k 20,000": {"top_k": 20_000},
    "min_p": {"min_p": 0.05},
    "top_p, flat": {"top_p": 0.9},
    "top_p, peaked": {"top_p": 0.9, "temperature": 0.1},
    "penalties": {"temperature": 0.0, **_PENALTIES},
    "logprobs 20": {"temperature": 0.0, "logprobs": 20},
    "everything": {**_FILTERS, **_PENALTIES, **_BIAS, "logprobs": 20},
}


def make_model() -> LoadedModel:
    model = random_model(MODELS["473m"], VOCAB_SIZE, SEED)
    model.requires_grad_(False).eval()
    return LoadedModel("473m with 150,000 tokens", model, frozenset())


@contextmanager
def timed_sampling() -> Iterator[list[float]]:
    """Yields a list that gets the seconds in which each step chooses tokens from its logits."""
    seconds: list[float] = []
    sample, tokens = sampler.Sampler.sample, sampler.SamplerOutput.tokens

    def timed_sample(*arguments: Any) -> Any:
        began = time.perf_counter()
        result = sample(*arguments)
        seconds.append(time.perf_counter() - began)
        return result

    def timed_tokens(output: Any) -> Any:
        began = time.perf_counter()
        result = tokens(output)
        seconds[-1] += time.perf_counter() - began
        return result

    patched: Any = sampler
    patched.Sampler.sample, patched.SamplerOutput.tokens = timed_sample, timed_tokens
    try:
        yield seconds
    finally:
        patched.Sampler.sample, patched.SamplerOutput.tokens = sample, tokens


def measure(
    engine: LLMEngine, ids: Iterator[int], prompts: list[list[int]], case: dict[str, Any]
) -> tuple[float, float]:
    """Returns the median seconds in the sampler, and of the step."""
    params = SamplingParams.model_validate(case)
    added = list(itertools.islice(ids, len(prompts)))
    for prompt, index in zip(prompts, added, strict=True):
        engine.add(EngineRequest(index, prompt, params, seed=index, max_tokens=MAX_TOKENS))
    steps: list[tuple[float, float]] = []
    with timed_sampling() as samplings:
        while engine.has_work and len(steps) < WARM_UP + STEPS:
            began = time.perf_counter()
            emitted = len(engine.step().outputs)
            if emitted == len(prompts):
                steps.append((samplings[-1], time.perf_counter() - began))
    for index in added:
        engine.abort(index)
    counted = steps[WARM_UP:]
    return statistics.median(s for s, _ in counted), statistics.median(s for _, s in counted)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks sampling", description=__doc__)
    parser.add_argument("--no-native", action="store_true", help="sample and compute with torch")
    options = parser.parse_args()
    runner = runner_of(
        make_model(),
        LoadOptions(
            kv_cache_memory=MODELS["473m"].kv_cache_bytes,
            max_num_seqs=BATCH,
            native=not options.no_native,
        ),
    )
    engine = LLMEngine(runner, max_num_seqs=BATCH, max_num_batched_tokens=2048)
    rng = random.Random(SEED)
    ids = itertools.count()
    prompts = [[rng.randrange(VOCAB_SIZE) for _ in range(PROMPT)] for _ in range(BATCH)]
    how = f"not native: {runner.why_no_own_code}" if runner.why_no_own_code else "native"
    table = Table(
        title=f"Sampling, {BATCH} x {VOCAB_SIZE:,}, {torch.get_num_threads()} threads, {how}"
    )
    table.add_column("parameters")
    for heading in ("sampling, ms", "step, ms", "share", "at most"):
        table.add_column(heading, justify="right")
    for name, case in CASES.items():
        sampling, step = measure(engine, ids, prompts, case)
        limit = _LIMITS.get(name, _LIMIT)
        table.add_row(
            name,
            f"{sampling * 1e3:.1f}",
            f"{step * 1e3:.0f}",
            f"{sampling / step:.1%}",
            f"{limit:.0%}",
        )
    console_for_list().print(table)


if __name__ == "__main__":
    main()

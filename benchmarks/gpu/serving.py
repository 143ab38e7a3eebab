"""Measures the whole engine under load: batches, sampling parameters, Poisson arrivals, and a long
prompt (the guest) beside decodes."""

from __future__ import annotations

import random
import statistics
import time
from dataclasses import dataclass

import torch

from benchmarks.gpu.checks import GREEDY, run
from benchmarks.gpu.models import BLOCK_SIZE, SEED, Size
from benchmarks.gpu.throughput import MAX_BATCHED_TOKENS, prompts_of, random_prompts
from benchmarks.gpu.timing import wait
from promptq.shared.protocol.request import SamplingParams
from promptq.worker.engine.api.messages import EngineRequest
from promptq.worker.engine.core.llm_engine import LLMEngine
from promptq.worker.engine.model.loading import LoadedModel, LoadOptions
from promptq.worker.engine.runner.load_runner import runner_of

LOAD = 0.7
"""Requests arrive at this share of the rate at which the engine can serve them."""
PARAMS = {
    "top_p": SamplingParams(temperature=0.8, top_p=0.9),
    "penalties": SamplingParams(
        temperature=0.8, repetition_penalty=1.1, presence_penalty=0.2, frequency_penalty=0.2
    ),
    "logprobs": SamplingParams(temperature=0.0, logprobs=5),
}


@dataclass(frozen=True, slots=True)
class Latencies:
    """Seconds from arrival to the first token, and between tokens."""

    first: list[float]
    gaps: list[float]

    def text(self) -> str:
        return (
            f"first token p50 {_at(self.first, 50):.3f} s, p99 {_at(self.first, 99):.3f} s;"
            f" between tokens p50 {_at(self.gaps, 50) * 1e3:.1f} ms,"
            f" p99 {_at(self.gaps, 99) * 1e3:.1f} ms"
        )


class Serving:
    """One runner with a KV cache of the default size, and a fresh engine for each measurement."""

    def __init__(self, loaded: LoadedModel, size: Size, device: torch.device) -> None:
        self._size, self._device = size, device
        self._most = max(size.batch, size.requests, *size.batches)
        options = LoadOptions(
            max_num_seqs=self._most,
            max_num_batched_tokens=MAX_BATCHED_TOKENS,
            max_model_len=size.max_length,
            block_size=BLOCK_SIZE,
            native=device.type == "cuda",  # native code on a CPU would free the weights
        )
        self._runner = runner_of(loaded, options)

    def rate(self, count: int, params: SamplingParams = GREEDY) -> float:
        """Returns output tokens per second for `count` requests that come at once."""
        size = self._size
        run(self._engine(), random_prompts(size, count, SEED), 2, params)
        wait(self._device)
        started = time.perf_counter()
        prompts = random_prompts(size, count, SEED + 1)
        outputs = run(self._engine(), prompts, size.request_output, params)
        return sum(map(len, outputs)) / (time.perf_counter() - started)

    def poisson(self, tokens_per_second: float) -> Latencies:
        """Measure requests that arrive at random, with LOAD times `tokens_per_second` output tokens
        in a second."""
        size, engine = self._size, self._engine()
        chance = random.Random(SEED)
        rate = LOAD * tokens_per_second / size.request_output
        due, at = [], 0.0
        for _ in range(size.requests):
            at += chance.expovariate(rate)
            due.append(at)
        prompts = prompts_of(size, SEED + 2)
        found = Latencies([], [])
        last: dict[int, float] = {}
        started = time.perf_counter()
        added = 0
        while added < len(due) or engine.has_work:
            now = time.perf_counter() - started
            while added < len(due) and due[added] <= now:
                engine.add(_request(added, prompts[added], size.request_output))
                added += 1
            if not engine.has_work:
                time.sleep(max(0.0, due[added] - now))
                continue
            outputs = engine.step().outputs
            now = time.perf_counter() - started
            for output in outputs:
                index = output.sequence_id
                if index in last:
                    found.gaps.append(now - last[index])
                else:
                    found.first.append(now - due[index])
                last[index] = now
        return found

    def long_guest(self) -> tuple[float, float, float]:
        """Measure a long prompt (the guest) beside decodes. Returns three times in seconds: of a
        step of decodes alone, of the longest step with the guest, and until the guest's first
        token."""
        size, engine = self._size, self._engine()
        # They outlast the guest, and are then dropped.
        length = size.max_length - size.request_prompt
        for index, prompt in enumerate(random_prompts(size, size.batch, SEED)):
            engine.add(_request(index, prompt, length))
        with_first: set[int] = set()
        while len(with_first) < size.batch:
            with_first.update(output.sequence_id for output in engine.step().outputs)
        alone = [self._step(engine)[0] for _ in range(10)]
        guest, [prompt] = size.batch, random_prompts(size, 1, SEED + 1, size.guest)
        engine.add(_request(guest, prompt, 2))
        beside: list[float] = []
        has_begun = False
        while not has_begun:
            took, sequence_ids = self._step(engine)
            beside.append(took)
            has_begun = guest in sequence_ids
        for index in range(size.batch + 1):
            engine.abort(index)
        return statistics.median(alone), max(beside), sum(beside)

    @staticmethod
    def _step(engine: LLMEngine) -> tuple[float, list[int]]:
        started = time.perf_counter()
        outputs = engine.step().outputs
        return time.perf_counter() - started, [output.sequence_id for output in outputs]

    def _engine(self) -> LLMEngine:
        return LLMEngine(
            self._runner,
            max_num_seqs=self._most,
            max_num_batched_tokens=MAX_BATCHED_TOKENS,
            async_scheduling=self._device.type == "cuda",
        )


def _request(index: int, prompt: list[int], num_tokens: int) -> EngineRequest:
    return EngineRequest(index, prompt, GREEDY, seed=0, max_tokens=num_tokens, order=(index, ""))


def _at(values: list[float], percent: int) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, len(ordered) * percent // 100)]

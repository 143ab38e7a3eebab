"""Measures tokens a second of the engine, of transformers' continuous batching and of vLLM."""

from __future__ import annotations

import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig

from benchmarks.gpu.checks import run
from benchmarks.gpu.models import BLOCK_SIZE, SEED, Size
from benchmarks.gpu.timing import wait
from promptq.worker.engine.core.llm_engine import LLMEngine
from promptq.worker.engine.model.loading import LoadedModel, LoadOptions
from promptq.worker.engine.runner.load_runner import runner_of
from promptq.worker.engine.runner.model_runner import ModelRunner

MAX_BATCHED_TOKENS = 8192

PEER_SETTINGS: dict[str, dict[str, Any]] = {
    "graphs, async batching": {"use_cuda_graph": True, "use_async_batching": True},
    "as it chooses": {},
    "graphs, async batching, compiled": {
        "use_cuda_graph": True,
        "use_async_batching": True,
        "default_compile_level": 1,
    },
}


def peer_settings(device: torch.device) -> dict[str, dict[str, Any]]:
    """Returns the settings of transformers' continuous batching, by name. A CPU has neither graphs
    nor a second stream."""
    return PEER_SETTINGS if device.type == "cuda" else {"as it chooses": {}}


def prompts_of(size: Size, seed: int) -> list[list[int]]:
    return random_prompts(size, size.requests, seed)


def random_prompts(size: Size, count: int, seed: int, length: int | None = None) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    shape = (count, length or size.request_prompt)
    prompts: list[list[int]] = torch.randint(size.vocab, shape, generator=generator).tolist()
    return prompts


def engine_rate(
    loaded: LoadedModel, size: Size, device: torch.device, *, compiled: bool
) -> tuple[float, float]:
    """Returns output tokens per second, and the seconds of loading, with the capture of graphs."""
    tokens = size.requests * (size.request_prompt + size.request_output + BLOCK_SIZE)
    started = time.perf_counter()
    text = loaded.text_config
    per_token = text.num_hidden_layers * size.kv_heads * size.head_size * 2 * 2
    runner = runner_of(
        loaded,
        LoadOptions(
            kv_cache_memory=tokens * per_token,
            max_num_seqs=size.requests,
            max_num_batched_tokens=MAX_BATCHED_TOKENS,
            max_model_len=size.request_prompt + size.request_output,
            block_size=BLOCK_SIZE,
            # Native code on a CPU would free the weights.
            native=device.type == "cuda" and not compiled,
            compile=compiled,
        ),
    )
    loading = time.perf_counter() - started
    try:
        rate = _rate(runner, size, device)
        if runner.compiled is not None and not runner.compiled.is_compiled:
            raise RuntimeError("the layers cannot be compiled here")
    finally:
        if runner.compiled is not None:
            runner.compiled.undo()
    return rate, loading


def _rate(runner: ModelRunner, size: Size, device: torch.device) -> float:
    engine = LLMEngine(
        runner,
        max_num_seqs=size.requests,
        max_num_batched_tokens=MAX_BATCHED_TOKENS,
        async_scheduling=device.type == "cuda",
    )
    run(engine, prompts_of(size, SEED), size.request_output)  # compiles what is still to compile
    prompts = prompts_of(size, SEED + 1)
    wait(device)
    started = time.perf_counter()
    outputs = run(engine, prompts, size.request_output)
    return sum(map(len, outputs)) / (time.perf_counter() - started)


def peer_rate(
    loaded: LoadedModel, size: Size, device: torch.device, settings: dict[str, Any]
) -> float:
    """Returns the tokens per second of transformers' continuous batching, measured after a run of
    the same kind that warms up the device."""
    model: Any = loaded.model
    model.set_attn_implementation("sdpa")  # it changes to flash attention where that is installed
    config = ContinuousBatchingConfig(allow_block_sharing=False, **settings)
    greedy = GenerationConfig(
        max_new_tokens=size.request_output, do_sample=False, eos_token_id=-1, pad_token_id=0
    )
    try:
        rate = 0.0
        for seed in (SEED, SEED + 1):
            prompts = prompts_of(size, seed)
            wait(device)
            started = time.perf_counter()
            results = model.generate_batch(
                prompts,
                generation_config=greedy,
                continuous_batching_config=config,
                persistent_manager=True,
            )
            took = time.perf_counter() - started
            num_tokens = sum(len(each.generated_tokens) for each in results.values())
            if num_tokens != size.requests * size.request_output:
                raise RuntimeError(f"{num_tokens} tokens came of {size.requests} requests")
            rate = num_tokens / took
        return rate
    finally:
        manager = getattr(model, "_cached_continuous_batching_manager", None)
        if manager is not None:
            manager.stop(block=True)
            model._cached_continuous_batching_manager = None


def vllm_rates(loaded: LoadedModel, size: Size, counts: list[int]) -> dict[int, float]:
    """Returns vLLM's output tokens per second, by the number of requests at once. vLLM makes random
    weights of the same shapes, in a separate process. vLLM needs the whole device, so first free
    all memory that this process has there."""
    config: Any = loaded.model.config
    with TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
            return pool.submit(_vllm_rates, Path(folder), size, counts).result()


def _vllm_rates(folder: Path, size: Size, counts: list[int]) -> dict[int, float]:
    import vllm

    engine = vllm.LLM(
        str(folder),
        load_format="dummy",
        skip_tokenizer_init=True,
        dtype="bfloat16",
        max_model_len=size.request_prompt + size.request_output,
        max_num_seqs=max(counts),
        enable_prefix_caching=False,
    )
    params = vllm.SamplingParams(
        temperature=0.0, max_tokens=size.request_output, ignore_eos=True, detokenize=False
    )
    rates = {}
    for count in counts:
        for seed in (SEED, SEED + 1):  # the first run warms it up
            prompts = [{"prompt_token_ids": ids} for ids in random_prompts(size, count, seed)]
            started = time.perf_counter()
            outputs = engine.generate(prompts, params, use_tqdm=False)
            took = time.perf_counter() - started
        rates[count] = sum(len(it.outputs[0].token_ids) for it in outputs) / took
    return rates

"""Loads a model into a runner: checks and quantizes the model, allocates a cache, and warms up."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import torch

from promptq.shared.errors import ConfigurationError
from promptq.worker.engine.api.port import Progress, ignore_progress
from promptq.worker.engine.attention.kv_cache import KVCache, bytes_per_token
from promptq.worker.engine.attention.kv_cache_size import MIN_BLOCKS, fitting_blocks
from promptq.worker.engine.decoders.native import NativeDecoder, release
from promptq.worker.engine.device.memory import MemoryPeak, counts_memory, free_bytes, give_back
from promptq.worker.engine.load_check.checked_model import CheckedModel, Verdict
from promptq.worker.engine.load_check.formula import check_model
from promptq.worker.engine.load_check.rounded import Expectation, check_packed
from promptq.worker.engine.model.backend_choice import (
    TURNED_OFF,
    backends_on,
    decoder_of_saved_weights,
    own_decoders,
    resolve_device,
    why_no_native_code,
)
from promptq.worker.engine.model.loading import LoadedModel, LoadOptions, load_model
from promptq.worker.engine.model.model_length import model_length
from promptq.worker.engine.recurrent.state_pool import pool_bytes
from promptq.worker.engine.runner.cuda_graphs import graph_bytes, graph_kinds, on_device
from promptq.worker.engine.runner.head_drafts import attention_of_head
from promptq.worker.engine.runner.model_runner import ModelRunner
from promptq.worker.engine.runner.quantizing import (
    check_quantization,
    is_quantized,
    quantize,
    rounding_options,
)
from promptq.worker.engine.runner.warm_up import largest_steps, warm_up, warm_up_kinds

LENGTH_WITHOUT_LIMIT = 8192
"""The model length for a model without a limit, if the options set no length."""


def load_runner(
    name_or_dir: str,
    options: LoadOptions,
    progress: Progress = ignore_progress,
    known: Verdict | None = None,
) -> ModelRunner:
    """Load a model, check that it is computed correctly, and allocate its KV cache.

    Calls `progress` with each stage. `known` is the verdict of an earlier load of the same files
    with the same options. Raises ModelNotFoundError, UnsupportedModelError or ConfigurationError.
    The message is one sentence that names the fault.
    """
    device = resolve_device(options.device)
    backends_on(device, options.attention)  # raises before anything is loaded
    check_quantization(options, device)
    progress("weights")
    with on_device(device):
        loaded = load_model(
            name_or_dir,
            device=device,
            dtype=options.dtype,
            trust_remote_code=options.trust_remote_code,
            decoder=decoder_of_saved_weights(device, options),
            with_head=device.type == "cpu" if options.drafts is None else options.drafts,
        )
    return runner_of(loaded, options, progress, known)


def runner_of(
    loaded: LoadedModel,
    options: LoadOptions,
    progress: Progress = ignore_progress,
    known: Verdict | None = None,
) -> ModelRunner:
    """Returns a runner for a loaded model, on its device and in its dtype. See `load_runner`."""
    device = loaded.model.device
    with on_device(device):
        backends = backends_on(device, options.attention)
        limit = model_length(loaded, None)
        length = model_length(loaded, options.max_model_len) or LENGTH_WITHOUT_LIMIT
        progress("native code")
        no_native_code = why_no_native_code(loaded) if options.native else TURNED_OFF
        progress("checking")
        decoders, why_none = own_decoders(device, options, no_native_code)
        checked = check_model(
            loaded, backends, limit, decoders=decoders, why_no_own_code=why_none, known=known
        )
        if is_quantized(loaded, options):
            progress("quantizing")
            checked = quantize(loaded, checked, options)
        if checked.decoder is not None:
            checked.decoder.arrange(loaded.model)
        give_back(device)
        reserved_bytes = 0
        if counts_memory(device) and options.kv_cache_memory is None:
            progress("largest step")
            with _refusing_shortage("--max-num-batched-tokens", "the memory beside the weights"):
                reserved_bytes = _bytes_beside_cache(loaded, checked, length, options)
            give_back(device)
        progress("KV cache")
        loaded, specs_of_head = attention_of_head(loaded, checked, options.drafts)
        num_blocks = fitting_blocks(
            [*checked.specs, *specs_of_head],
            block_size=options.block_size,
            memory_bytes=options.kv_cache_memory,
            wanted_tokens=options.max_num_seqs * length,
            device=device,
            reserved_bytes=reserved_bytes,
            state_bytes=pool_bytes(checked.mixers, options.max_num_seqs),
        )
        new_cache = partial(
            KVCache, num_blocks=num_blocks, block_size=options.block_size, device=device
        )
        cache = new_cache(checked.specs)
        length = min(length, num_blocks * options.block_size)  # bounds the size of block tables
        progress("compiling" if options.compile and checked.why_no_own_code else "packing")
        expected: Expectation | None = None
        if checked.decoder is not None and checked.decoder.unpacked and not checked.is_known:
            expected = Expectation.of(loaded, checked, cache, length)
        runner = ModelRunner(
            *(loaded, checked, cache, length, options),
            native_sampling=not no_native_code,
            head_cache=new_cache(specs_of_head) if specs_of_head else None,
        )
        if isinstance(runner.model, NativeDecoder):
            if expected is not None:
                rounding = rounding_options(options)
                check_packed(loaded, runner.model, cache, expected, rounding)
            release(loaded.model.modules())
            release(loaded.head.module.modules() if loaded.head is not None else ())
        give_back(device)  # memory that captures took besides the graphs
        progress("warm-up")
        with _refusing_shortage("--kv-cache-memory", "what the KV cache leaves free"):
            warm_up(runner)
            if counts_memory(device):
                warm_up_kinds(runner, options.max_num_batched_tokens, options.max_num_seqs)
        return runner


def _bytes_beside_cache(
    loaded: LoadedModel, checked: CheckedModel, length: int, options: LoadOptions
) -> int:
    """Returns the CUDA memory of the largest step and the CUDA graphs, in bytes."""
    device, block_size = loaded.model.device, options.block_size
    fitting_tokens = free_bytes(device) // max(1, bytes_per_token(checked.specs))
    context = min(length, max(1, fitting_tokens // options.max_num_seqs))
    sizes = options.max_num_batched_tokens, options.max_num_seqs
    peak = MemoryPeak(device)
    cache = KVCache(checked.specs, num_blocks=MIN_BLOCKS, block_size=block_size, device=device)
    plain = replace(options, compile=False, cuda_graphs=False)
    runner = ModelRunner(loaded, checked, cache, length, plain, native_sampling=False)
    for batch in largest_steps(runner, *sizes, context):
        runner.collect(runner.launch(batch))
    needed = peak.bytes() - runner.kv_layout.state_bytes
    if options.cuda_graphs and checked.takes_padding:
        kinds = graph_kinds(options.max_num_seqs, options.max_num_batched_tokens)
        needed += graph_bytes(kinds, runner.capturing(options), device)
    checked.leave()  # otherwise its modules keep this cache in memory
    return needed


@contextmanager
def _refusing_shortage(option: str, where: str) -> Iterator[None]:
    """In this block, turn an out-of-memory error into a ConfigurationError that names `option`."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise ConfigurationError(
            f"{option}: the largest step does not fit into {where}; a smaller"
            f" --max-num-batched-tokens or --max-num-seqs also helps"
        ) from error

"""Computes the number of blocks of the KV cache, from the free memory."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from promptq.shared.errors import ConfigurationError
from promptq.worker.engine.attention.kv_cache import bytes_per_token
from promptq.worker.engine.attention.types import LayerSpec
from promptq.worker.engine.core.block_manager import num_blocks_for
from promptq.worker.engine.device.memory import counts_memory, free_bytes

MIN_BLOCKS = 2
"""The fewest blocks. With a single block, a sequence that fills it could never continue."""
CPU_SHARE = 0.4
CUDA_SHARE = 0.95
"""The KV cache gets this fraction of the free CUDA memory that the largest step and CUDA graphs
leave. The rest is a reserve, for example for gaps between allocations."""


def fitting_blocks(
    specs: Sequence[LayerSpec],
    *,
    block_size: int,
    memory_bytes: int | None,
    wanted_tokens: int,
    device: torch.device,
    reserved_bytes: int = 0,
    state_bytes: int = 0,
) -> int:
    """Returns how many blocks fit into `memory_bytes` minus `state_bytes` (for recurrent layers).

    If `memory_bytes` is None, returns the number of blocks for `wanted_tokens`, but not more than
    fit into `default_memory_bytes`. Raises ConfigurationError if fewer than two blocks fit, or if a
    CPU has fewer than `memory_bytes` free. A model without attention gets the blocks for
    `wanted_tokens`.
    """
    block_bytes = bytes_per_token(specs) * block_size
    is_limited = memory_bytes is None
    if memory_bytes is not None:
        # On a CPU the cache takes memory only when written, and then the system kills the process.
        if not counts_memory(device) and memory_bytes > (free := free_bytes(device)):
            raise ConfigurationError(
                f"--kv-cache-memory: {memory_bytes / 2**30:,.1f} GiB are requested, but"
                f" {free / 2**30:,.1f} GiB are free on {device}"
            )
    else:
        memory_bytes = default_memory_bytes(device, reserved_bytes)
    left = memory_bytes - state_bytes
    num_blocks = max(num_blocks_for(wanted_tokens, block_size), MIN_BLOCKS)
    if block_bytes:
        fitting = max(0, left) // block_bytes
        num_blocks = min(num_blocks, fitting) if is_limited else fitting
    elif left < 0:
        num_blocks = 0
    if num_blocks >= MIN_BLOCKS:
        return num_blocks
    if reserved_bytes:
        raise ConfigurationError(
            f"--max-num-batched-tokens: a step, with its CUDA graphs, takes {reserved_bytes} bytes"
            f" of {device}, which leaves {memory_bytes} for the KV cache, but this model needs at"
            f" least {MIN_BLOCKS * block_bytes}; a smaller --max-num-seqs helps too"
        )
    if state_bytes:
        raise ConfigurationError(
            f"--max-num-seqs: the states of the recurrent layers take {state_bytes} bytes for all"
            f" slots, and at least {MIN_BLOCKS * block_bytes} are needed for the KV cache, but"
            f" there are {memory_bytes} for both; use fewer slots or a larger --kv-cache-memory"
        )
    raise ConfigurationError(
        f"--kv-cache-memory: {memory_bytes} bytes hold {num_blocks} blocks of {block_size} tokens,"
        f" and this model needs at least {MIN_BLOCKS * block_bytes} bytes ({block_bytes} a block)"
    )


def default_memory_bytes(device: torch.device, reserved_bytes: int = 0) -> int:
    """Returns the KV cache's default size in bytes (without `--kv-cache-memory`): a fraction of the
    free memory, after `reserved_bytes` are subtracted."""
    share = CUDA_SHARE if counts_memory(device) else CPU_SHARE
    return max(0, int((free_bytes(device) - reserved_bytes) * share))

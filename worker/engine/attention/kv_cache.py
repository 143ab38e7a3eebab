"""The KV cache: each layer's tensors, and how many blocks fit into memory."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from promptq.shared.errors import ConfigurationError
from promptq.worker.engine.attention.backend import LayerCache, LayerSpec
from promptq.worker.engine.core.block_manager import num_blocks_for
from promptq.worker.engine.device.memory import free_bytes

MIN_BLOCKS = 2
"""With one block, a sequence that fills it could never go on."""
CPU_SHARE = 0.4
CUDA_SHARE = 0.9


class KVCache:
    """K and V of all layers, in blocks of `block_size` tokens.

    A layer that uses an earlier layer's K and V shares that layer's tensors.
    """

    def __init__(
        self,
        specs: Sequence[LayerSpec],
        *,
        num_blocks: int,
        block_size: int,
        device: torch.device,
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.bytes_per_token = bytes_per_token(specs)
        self.layers: list[LayerCache] = []
        for spec in specs:
            if spec.shares_kv_of is not None:
                self.layers.append(self.layers[spec.shares_kv_of])
                continue
            shape = (num_blocks, spec.num_kv_heads, block_size)
            key = torch.zeros(*shape, spec.key_size, dtype=spec.key_dtype, device=device)
            value = torch.zeros(*shape, spec.value_size, dtype=spec.value_dtype, device=device)
            self.layers.append(LayerCache(key, value))


def bytes_per_token(specs: Sequence[LayerSpec]) -> int:
    """The bytes of one token's K and V in all layers."""
    return sum(spec.bytes_per_token for spec in specs)


def fitting_blocks(
    specs: Sequence[LayerSpec],
    *,
    block_size: int,
    memory_bytes: int | None,
    wanted_tokens: int,
    device: torch.device,
) -> int:
    """How many blocks to allocate: as many as fit into `memory_bytes`.

    If that is None, as many as `wanted_tokens` need, up to a share of the memory that is free now.
    Raises ConfigurationError if fewer than two fit.
    """
    block_bytes = bytes_per_token(specs) * block_size
    if memory_bytes is not None:
        num_blocks = memory_bytes // block_bytes
    else:
        memory_bytes = default_memory_bytes(device)
        wanted_blocks = max(num_blocks_for(wanted_tokens, block_size), MIN_BLOCKS)
        num_blocks = min(memory_bytes // block_bytes, wanted_blocks)
    if num_blocks < MIN_BLOCKS:
        raise ConfigurationError(
            f"--kv-cache-memory: {memory_bytes} bytes hold {num_blocks} blocks of {block_size} "
            f"tokens, and this model needs at least {MIN_BLOCKS * block_bytes} bytes "
            f"({block_bytes} a block)"
        )
    return num_blocks


def default_memory_bytes(device: torch.device) -> int:
    """The share of the device's free memory that a cache takes if no amount was asked for."""
    return int(free_bytes(device) * (CUDA_SHARE if device.type == "cuda" else CPU_SHARE))

"""The KV cache: each layer's tensors."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from promptq.worker.engine.attention.backend import LayerCache, LayerSpec


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

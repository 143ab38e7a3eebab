"""The tensors of the KV cache, for each layer."""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence
from contextlib import suppress

import torch

from promptq.worker.engine.attention.types import LayerCache, LayerSpec

_LEAST_MAPPED_BYTES = 2**20


class KVCache:
    """K and V of all layers, in blocks of `block_size` tokens. If a layer uses an earlier layer's K
    and V, both layers share the tensors."""

    def __init__(
        self, specs: Sequence[LayerSpec], *, num_blocks: int, block_size: int, device: torch.device
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
            key = zeros_in_pages((*shape, spec.key_size), spec.key_dtype, device)
            value = zeros_in_pages((*shape, spec.value_size), spec.value_dtype, device)
            self.layers.append(LayerCache(key, value))


def zeros_in_pages(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Returns a tensor of zeros. On a CPU, the system zeroes each page at the first use of the
    page. Writing all zeros here would take a second per 2 GiB. Large pages avoid most TLB
    misses."""
    num_bytes = math.prod(shape) * dtype.itemsize
    if device.type != "cpu" or num_bytes < _LEAST_MAPPED_BYTES:
        return torch.zeros(shape, dtype=dtype, device=device)
    pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without huge pages
            pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=torch.uint8).view(dtype).view(shape)


def bytes_per_token(specs: Sequence[LayerSpec]) -> int:
    """Returns the bytes of one token's K and V in all layers."""
    return sum(spec.bytes_per_token for spec in specs)

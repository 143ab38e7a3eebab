"""Converts the blocks of GGUF files to the format of promptq's matrix products.

Source: ggml/src/ggml-common.h and ggml-quants.c of llama.cpp. A block has the weights of one
output for 32 or 256 inputs. Each reader's docstring lists the content of a block, in the order of
its bytes.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from promptq.worker.engine.quantization.weight import QuantizedWeight


def _q8_0(blocks: torch.Tensor) -> QuantizedWeight:
    """Q8_0: a scale in fp16, then 32 signed integers of 8 bits."""
    scales, numbers = _halves(blocks[..., :2]), blocks[..., 2:].view(torch.int8).short() + 128
    return QuantizedWeight.pack(numbers.flatten(1), scales.flatten(1), 8, 32)


def _q4_0(blocks: torch.Tensor) -> QuantizedWeight:
    """Q4_0: a scale in fp16, then 16 bytes: inputs 0-15 in lower halves, 16-31 in upper halves."""
    scales, numbers = _halves(blocks[..., :2]), _nibbles(blocks[..., 2:])
    return QuantizedWeight.pack(numbers.flatten(1), scales.flatten(1), 4, 32)


def _q5_0(blocks: torch.Tensor) -> QuantizedWeight:
    """Q5_0: a scale in fp16, 4 bytes of the inputs' fifth bits, then the lower bits as in Q4_0."""
    scales, upper = _halves(blocks[..., :2]), _bits(blocks[..., 2:6]).flatten(-2)
    numbers = (_nibbles(blocks[..., 6:]) | upper << 4) + (128 - 16)
    return QuantizedWeight.pack(numbers.flatten(1), scales.flatten(1), 8, 32)


def _q4_k(blocks: torch.Tensor) -> QuantizedWeight:
    """Q4_K: scales and minima, then four groups of 32 bytes. A group has 32 inputs in the lower 4
    bits of its bytes, and the next 32 inputs in the upper 4 bits."""
    scales, offsets = _scales_and_offsets(blocks)
    numbers = _nibbles(_split(blocks[..., 16:], 4, 32))
    return QuantizedWeight.pack(numbers.flatten(1), scales, 4, 32, offsets)


def _q5_k(blocks: torch.Tensor) -> QuantizedWeight:
    """Q5_K: scales and minima, then 32 bytes with the inputs' fifth bits (bit i of byte j is for
    input 32 i + j), then the lower bits as in Q4_K."""
    scales, offsets = _scales_and_offsets(blocks)
    upper = _bits(blocks[..., 16:48]).transpose(-1, -2).flatten(-2)
    numbers = _nibbles(_split(blocks[..., 48:], 4, 32)).flatten(-2) | upper << 4
    return QuantizedWeight.pack(numbers.flatten(1), scales, 8, 32, offsets)


def _scales_and_offsets(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the scales and offsets [outputs, groups] of Q4_K or Q5_K. A block begins with
    two factors in fp16, then has 8 scales and 8 minima of 6 bits each in 12 bytes."""
    factors, packed = _halves(blocks[..., :4]), blocks[..., 4:16]
    low, middle, high = _split(packed, 3, 4).unbind(-2)
    scales = torch.cat((low & 63, high & 15 | low >> 6 << 4), -1)
    minima = torch.cat((middle & 63, high >> 4 | middle >> 6 << 4), -1)
    return (factors[..., :1] * scales).flatten(1), (-factors[..., 1:] * minima).flatten(1)


def _q6_k(blocks: torch.Tensor) -> QuantizedWeight:
    """Q6_K: the lower 4 bits of all integers, then the upper 2 bits, 16 signed scales, and a factor
    of the scales in fp16. For 128 inputs, 64 bytes hold the lower bits and 32 bytes the upper bits.
    """
    low = _split(blocks[..., :128], 2, 2, 32)
    low = torch.stack((low & 15, low >> 4), -3).flatten(-3, -2)
    high = _split(blocks[..., 128:192], 2, 1, 32)
    high = high >> torch.tensor([0, 2, 4, 6], dtype=torch.uint8).view(4, 1) & 3
    numbers = (low | high << 4) + (128 - 32)
    scales = _halves(blocks[..., 208:]) * blocks[..., 192:208].view(torch.int8)
    return QuantizedWeight.pack(numbers.flatten(1), scales.flatten(1), 8, 16)


READERS: dict[str, tuple[int, Callable[[torch.Tensor], QuantizedWeight]]] = {
    "Q8_0": (34, _q8_0),
    "Q4_0": (18, _q4_0),
    "Q5_0": (22, _q5_0),
    "Q4_K": (144, _q4_k),
    "Q5_K": (176, _q5_k),
    "Q6_K": (210, _q6_k),
}
"""For each GGUF type: the number of bytes of a block, and the function that reads blocks."""


def read_blocks(rows: torch.Tensor, kind: str) -> QuantizedWeight:
    """Returns the weight in `rows` [outputs, bytes of a row]. `kind` is the rows' GGUF type."""
    size, read = READERS[kind]
    return read(_split(rows, -1, size))


def _split(data: torch.Tensor, *sizes: int) -> torch.Tensor:
    return data.reshape(*data.shape[:-1], *sizes)


def _halves(data: torch.Tensor) -> torch.Tensor:
    """Returns fp32 [..., n] for the bytes [..., 2 n] of fp16 numbers."""
    return data.contiguous().view(torch.float16).float()


def _bits(data: torch.Tensor) -> torch.Tensor:
    """Returns the bits [..., n, 8] of bytes [..., n], the lowest bit first."""
    return data.unsqueeze(-1) >> torch.arange(8, dtype=torch.uint8) & 1


def _nibbles(data: torch.Tensor) -> torch.Tensor:
    """Returns the 4-bit halves [..., 2 n] of bytes [..., n]: lower halves, then upper halves."""
    return torch.cat((data & 15, data >> 4), -1)

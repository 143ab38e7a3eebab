"""Whether the processor is fast in bf16, and how to run a model exactly in fp32 for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from torch import nn

from promptq.worker.engine.device.memory import free_bytes

_HALVES = (torch.bfloat16, torch.float16)
_SHARE = 0.5
"""The share of free memory that fp32 copies of the weights may take."""


def has_fast_bf16_products() -> bool:
    """Whether torch has vector code for bf16 products here. If not, it takes number by number."""
    ops: Any = torch.ops
    return bool(ops.mkldnn._is_mkldnn_bf16_supported())


@contextmanager
def exact_products(device: torch.device) -> Iterator[bool]:
    """Switch TF32 off, in which CUDA multiplies fp32 numbers with 11 bits, and restore it on exit.

    Yields whether products are exact now. They are not if the environment forces TF32, as
    NVIDIA_TF32_OVERRIDE=1 does, so this is tried and not asked for.
    """
    with _without_tf32():
        # 1 + 2^-12 is exact in fp32, and 1 in TF32.
        number = torch.full((256, 256), 1 + 2.0**-12, device=device)
        product = torch.mm(number, torch.eye(256, device=device))
        yield torch.equal(product, number)


@contextmanager
def _without_tf32() -> Iterator[None]:
    try:
        before = torch.get_float32_matmul_precision()
    except RuntimeError:  # it was set through torch's newer attribute, and the two do not mix
        matmul: Any = torch.backends.cuda.matmul
        before, matmul.fp32_precision = matmul.fp32_precision, "ieee"
        try:
            yield
        finally:
            matmul.fp32_precision = before
        return
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


@contextmanager
def in_float32(model: nn.Module) -> Iterator[bool]:
    """Convert 16-bit weights to fp32, and restore the originals on exit.

    Yields whether the whole model now computes in fp32. The model is left unchanged if there is
    too little memory, or if some weights have another type.
    """
    tensors = list(chain(model.parameters(), model.buffers()))
    floating = [tensor for tensor in tensors if tensor.is_floating_point()]
    halves = [tensor for tensor in floating if tensor.dtype in _HALVES]
    if any(tensor.dtype not in (*_HALVES, torch.float32) for tensor in floating):
        yield False
        return
    needed = sum(4 * tensor.numel() for tensor in halves)
    if halves and needed > _SHARE * free_bytes(halves[0].device):
        yield False
        return
    originals = [tensor.data for tensor in halves]
    try:
        for tensor in halves:
            tensor.data = tensor.data.float()
        yield True
    finally:
        for tensor, original in zip(halves, originals, strict=True):
            tensor.data = original

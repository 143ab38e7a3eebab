"""Tests whether the processor is fast in bf16, and makes a model compute in fp32 temporarily."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import nn

from promptq.worker.engine.device.expert_weights import (
    expert_weights,
    has_experts,
    input_weights,
    misread_experts,
    sum_of_experts,
)
from promptq.worker.engine.device.memory import free_bytes

_HALVES = (torch.bfloat16, torch.float16)
_SHARE = 0.5
"""The fraction of free memory that fp32 copies of the weights may take."""
_PART = 2**22
"""Number of elements of a weight that are converted to fp32 at a time."""


def has_fast_bf16_products() -> bool:
    """Whether torch multiplies bf16 numbers in vectors on this processor, not one by one."""
    ops: Any = torch.ops
    return bool(ops.mkldnn._is_mkldnn_bf16_supported())


@contextmanager
def exact_products(device: torch.device) -> Iterator[bool]:
    """Switch off TF32, in which CUDA multiplies numbers with 11 significant bits, and restore the
    setting on exit.

    Yields whether products are exact now. Products are not exact if the environment forces TF32, as
    NVIDIA_TF32_OVERRIDE=1 does. torch's flag does not show this, so this function tests a product.
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
    except RuntimeError:  # set through torch's newer attribute, and the two do not mix
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
def in_float32(model: nn.Module, *, by_parts: bool = False) -> Iterator[bool]:
    """Make a model with 16-bit weights compute in fp32, and restore the model on exit.

    Without `by_parts`, all weights are converted to fp32. With `by_parts`, linear layers,
    embeddings and experts keep their weights, and convert some rows or one expert at a time while
    they run. Experts that `sum_of_experts` does not compute correctly are converted as a whole at
    the beginning. Yields whether the model now computes in fp32. The model does not change if there
    is too little memory, or if some weights are neither in a 16-bit type nor in fp32.
    """
    tensors = list(chain(model.parameters(), model.buffers()))
    if any(
        tensor.is_floating_point() and tensor.dtype not in (*_HALVES, torch.float32)
        for tensor in tensors
    ):
        yield False
        return
    widening = [module for module in model.modules() if by_parts and _can_widen(module)]
    misread = misread_experts(model) if widening else set()
    widening = [module for module in widening if type(module) not in misread]
    kept = {id(weight) for module in widening for weight in _large_weights(module)}
    halves = [tensor for tensor in tensors if tensor.dtype in _HALVES and id(tensor) not in kept]
    needed = sum(4 * tensor.numel() for tensor in halves)
    if halves and needed > _SHARE * free_bytes(halves[0].device):
        yield False
        return
    originals = [tensor.data for tensor in halves]
    try:
        for tensor in halves:
            tensor.data = tensor.data.float()
        for module in widening:
            module.forward = partial(_widening_forward(module), module)
        yield True
    finally:
        for module in widening:
            vars(module).pop("forward", None)
        for tensor, original in zip(halves, originals, strict=True):
            tensor.data = original


def _can_widen(module: Any) -> bool:
    is_plain = "forward" not in vars(module)
    return is_plain and any(weight.dtype in _HALVES for weight in _large_weights(module))


def _large_weights(module: Any) -> list[torch.Tensor]:
    """Returns the weights of a module that can be converted to fp32 part by part."""
    if has_experts(module):
        return [input_weights(module), module.down_proj]
    return [module.weight] if _kind(module) in _WIDENING and module.weight.numel() else []


def _widening_forward(module: nn.Module) -> Callable[..., torch.Tensor]:
    return _widening_experts if has_experts(module) else _WIDENING[_kind(module)]


def _kind(module: nn.Module) -> type[nn.Module]:
    return type(module) if embedding_scale(module) is None else nn.Embedding


def embedding_scale(module: nn.Module) -> float | None:
    """Returns the factor by which an embedding module such as Gemma's multiplies its rows; None if
    the module has no factor. The module rounds the factor to the model's dtype."""
    return getattr(module, "scalar_embed_scale", None)


def product(
    x: torch.Tensor,
    num_outputs: int,
    bias: torch.Tensor | None,
    weight_of: Callable[[slice], torch.Tensor],
) -> torch.Tensor:
    """Returns the output of a linear layer, computed in fp32. `weight_of(rows)` returns some rows
    of the weight in fp32, because all rows at once may need too much memory."""
    step = max(1, _PART // x.shape[-1])
    parts = [slice(first, first + step) for first in range(0, num_outputs, step)]
    y = torch.cat([nn.functional.linear(x.float(), weight_of(part)) for part in parts], dim=-1)
    return y if bias is None else y + bias.float()


def _widening_linear(module: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    return product(x, module.out_features, module.bias, lambda rows: module.weight[rows].float())


def _widening_embedding(module: Any, ids: torch.Tensor) -> torch.Tensor:
    rows = nn.functional.embedding(ids, module.weight).float()
    scale = embedding_scale(module)
    return rows if scale is None else rows * scale


def _widening_experts(
    module: nn.Module, hidden: torch.Tensor, chosen: torch.Tensor, shares: torch.Tensor
) -> torch.Tensor:
    return sum_of_experts(module, hidden, chosen, shares, partial(expert_weights, module))


_WIDENING: dict[type[nn.Module], Callable[..., torch.Tensor]] = {
    nn.Linear: _widening_linear,
    nn.Embedding: _widening_embedding,
}

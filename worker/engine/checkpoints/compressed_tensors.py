"""Reads weights that compressed-tensors packs, for example for llm-compressor.

Source: https://github.com/vllm-project/compressed-tensors. The settings for quantized
activations are ignored: promptq's matrix products choose how to quantize their inputs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from promptq.shared.errors import UnsupportedModelError
from promptq.worker.engine.checkpoints.fp8 import scaled
from promptq.worker.engine.checkpoints.unpacking import unpack, weight_of
from promptq.worker.engine.quantization.modules import FewBits

_FORMATS = {
    "dense",
    "float-quantized",
    "int-quantized",
    "mixed-precision",
    "naive-quantized",
    "pack-quantized",
}


class CompressedTensors:
    """Reads the layers of checkpoints of the method `compressed-tensors`."""

    marker = "weight_scale"

    def __init__(self, config: Mapping[str, Any]) -> None:
        groups = (config.get("config_groups") or {}).values()
        formats = {config.get("format"), *(group.get("format") for group in groups)} - {None}
        schemes = [group.get("weights") or {} for group in groups]
        sparsity = (config.get("sparsity_config") or {}).get("format", "dense")
        problem = ""
        if strange := formats - _FORMATS:
            problem = f"its format {min(strange)!r} is not one of {', '.join(sorted(_FORMATS))}"
        elif strange := {scheme.get("num_bits", 8) for scheme in schemes} - {4, 8}:
            problem = f"its weights have {min(strange)} bits, but only 4 or 8 are supported"
        elif any((each.get("type"), each.get("num_bits")) == ("float", 4) for each in schemes):
            problem = "its weights are floating-point numbers of 4 bits"
        elif sparsity != "dense":
            problem = f"its weights are sparse ({sparsity})"
        elif (config.get("transform_config") or {}).get("config_groups"):
            problem = "it transforms inputs"
        if problem:
            raise UnsupportedModelError(f"compressed-tensors: {problem}")
        blocks = [scheme["block_structure"] for scheme in schemes if scheme.get("block_structure")]
        self._block = blocks[0] if blocks else None
        self.bits = min((scheme.get("num_bits", 8) for scheme in schemes), default=8)

    def weight(self, parts: Mapping[str, torch.Tensor]) -> FewBits | torch.Tensor:
        scales = parts[self.marker]
        if "weight_packed" in parts:
            packed, (outputs, inputs) = parts["weight_packed"], parts["weight_shape"].tolist()
            bits = 8 if packed.shape[1] > -(-inputs // 8) else 4
            numbers = unpack(packed, bits)[:, :inputs]
        else:
            weight = parts["weight"]
            if weight.dtype.is_floating_point:
                return scaled(weight, scales, self._block)
            (outputs, inputs), bits = weight.shape, 8
            numbers = (weight.short() + 128).to(torch.uint8)
        scales = scales.float().reshape(-1, scales.shape[-1] if scales.dim() == 2 else 1)
        scales = scales.expand(outputs, -1)
        if (zeros := parts.get("weight_zero_point")) is not None:
            if zeros.dtype == torch.int32:  # packed along the outputs
                zeros = unpack(zeros.T, bits).T[:outputs]
            else:
                zeros = zeros.reshape(-1, scales.shape[1]).short() + (1 << (bits - 1))
        return weight_of(numbers, scales, zeros, bits, inputs, parts.get("weight_g_idx"))

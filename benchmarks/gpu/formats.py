"""Builds the measured model with random weights of fewer bits, or with K and V of fewer bits."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import nn
from transformers import PreTrainedModel

from benchmarks.gpu import models
from benchmarks.gpu.cases import random_fp8_weight, random_weight
from benchmarks.gpu.models import SEED, Bench, Size
from promptq.worker.engine.attention.triton_kernels.paged import TritonPaged
from promptq.worker.engine.decoders.kernels.fused import FusedDecoder
from promptq.worker.engine.load_check.checked_model import CheckedModel
from promptq.worker.engine.load_check.formula import check_model
from promptq.worker.engine.quantization.modules import FewBits, quantize_model


@dataclass(frozen=True, slots=True)
class Format:
    """A number format of the model. The default values mean bf16."""

    bits: int | None = None
    """Bits of a weight: 8 or 4, as integers."""
    group: int | None = None
    """How many weights of an output share a scale; None: all."""
    has_fp8_weights: bool = False
    has_fp8_cache: bool = False

    @property
    def of_head(self) -> Format:
        """The format of the output layer: 8 bits if weights are integers, as in workers."""
        return self if self.bits is None else Format(bits=8)


WIDE = Format()
FORMATS = {
    "int8": Format(bits=8),
    "int4": Format(bits=4, group=32),
    "fp8": Format(has_fp8_weights=True),
    "K and V in fp8": Format(has_fp8_cache=True),
    "int4, K and V in fp8": Format(bits=4, group=32, has_fp8_cache=True),
}


def check(size: Size, device: torch.device) -> CheckedModel:
    """Build the model, and run the checks of a worker's start. Returns the result without the
    weights."""
    loaded = models.build(size, device)
    checked = check_model(loaded, [TritonPaged()], size.max_length)
    return replace(checked, modules=[], decoder=FusedDecoder)  # the model itself can go


def build(name: str, checked: CheckedModel, size: Size, device: torch.device) -> Bench:
    """Build the `checked` model again, in the format `name`."""
    wanted, loaded, specs = FORMATS[name], models.build(size, device), checked.specs
    quantize(loaded.model, wanted, device)
    if wanted.has_fp8_cache:
        specs = [spec.in_fp8() for spec in specs]
    return Bench(loaded, size, device, replace(checked, specs=specs))


def quantize(model: PreTrainedModel, wanted: Format, device: torch.device) -> None:
    """Replace the model's weights by random weights of this format."""
    head = model.get_output_embeddings()
    saved: dict[str, FewBits] = {}
    for place, module in model.named_modules():
        if isinstance(module, nn.Linear):
            weight = _random(wanted.of_head if module is head else wanted, module, device)
            if weight is not None and FusedDecoder.takes(weight):
                saved[place] = weight
    if saved:
        quantize_model(model, saved=saved)


def _random(wanted: Format, module: nn.Linear, device: torch.device) -> FewBits | None:
    shape = module.out_features, module.in_features
    if wanted.has_fp8_weights:
        return random_fp8_weight(*shape, SEED, device)
    if wanted.bits is None:
        return None
    return random_weight(wanted.bits, wanted.group, *shape, SEED, device, has_offsets=False)

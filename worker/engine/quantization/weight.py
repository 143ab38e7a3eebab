"""Integer weights of 8 or 4 bits. int4_packing.py describes how two integers share a byte."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import chain

import torch
from torch import nn

from promptq.worker.engine.native.library import load_native
from promptq.worker.engine.quantization.int4_packing import pack_int4, unpack_int4


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """A weight [outputs, inputs]: `scale * n + offset`. `group` successive inputs share a scale and
    an offset."""

    numbers: torch.Tensor
    """uint8 [outputs, inputs], or with 4 bits [outputs, ceil(inputs / 2)] (see int4_packing.py)."""
    scales: torch.Tensor
    """[outputs, ceil(inputs / group)] in fp32. On a GPU, scales of 4-bit weights are in fp16,
    without loss."""
    bits: int
    group: int
    inputs: int
    offsets: torch.Tensor | None = None
    """Has the shape and dtype of `scales`. None if all offsets are `-2 ** (bits - 1) * scale`."""

    @classmethod
    def of(cls, weight: torch.Tensor, bits: int, group: int | None = None) -> QuantizedWeight:
        """Rounds a weight [outputs, inputs] to `bits` in native code. Without `group`, each output
        has one scale. Raises NativeError if a number is not finite."""
        outputs, inputs = weight.shape
        group = group or inputs
        numbers = torch.empty(outputs, -(-inputs * bits // 8), dtype=torch.uint8)
        scales = torch.empty(outputs, -(-inputs // group))
        weight = weight.cpu().contiguous()
        if weight.dtype != torch.bfloat16:
            weight = weight.float()
        load_native().quantize(
            *(weight.dtype == torch.bfloat16, weight.data_ptr(), outputs, inputs, bits, group),
            *(torch.get_num_threads(), numbers.data_ptr(), scales.data_ptr()),
        )
        return cls(numbers, scales, bits, group, inputs)

    @classmethod
    def pack(
        cls,
        numbers: torch.Tensor,
        scales: torch.Tensor,
        bits: int,
        group: int,
        offsets: torch.Tensor | None = None,
    ) -> QuantizedWeight:
        """Packs unsigned `numbers` [outputs, inputs] into a weight.

        Scales and offsets are [outputs, ceil(inputs / group)], and are rounded to the dtype in
        which they are stored. Raises ValueError if they have another shape, or are not finite.
        """
        inputs, numbers = numbers.shape[1], numbers.to(torch.uint8)
        numbers = pack_int4(numbers) if bits == 4 else numbers
        scales = _as_stored(scales, bits)
        offsets = None if offsets is None else _as_stored(offsets, bits)
        wanted = (len(numbers), -(-inputs // group))
        for factors in (scales, scales if offsets is None else offsets):
            if factors.shape != wanted:
                raise ValueError(f"scales or offsets are {tuple(factors.shape)}, not {wanted}")
            if not factors.isfinite().all():
                raise ValueError("a scale or an offset is not finite, or too large for 16 bits")
        return cls(numbers.contiguous(), scales, bits, group, inputs, offsets)

    @property
    def shape(self) -> tuple[int, int]:
        """The numbers of outputs and inputs."""
        return len(self.numbers), self.inputs

    @property
    def kind(self) -> tuple[int, int, int, bool]:
        """A key for joining weights: weights with equal keys can be joined."""
        return self.bits, self.group, self.inputs, self.offsets is not None

    @property
    def tensors(self) -> list[torch.Tensor]:
        parts = (self.numbers, self.scales, self.offsets)
        return [part for part in parts if part is not None]

    @property
    def has_native_products(self) -> bool:
        """Whether native code has products for this size of groups (linear/quantized_weights.h)."""
        if self.group >= self.inputs:
            return True
        if self.bits == 4:
            return self.group % 32 == 0
        step = 64 if self.group <= 512 else 512
        return self.group in (16, 32) or self.group % step == 0

    def to(self, device: torch.device) -> QuantizedWeight:
        kept = torch.float16 if self.bits == 4 and device.type != "cpu" else torch.float32
        offsets = None if self.offsets is None else self.offsets.to(device, kept)
        numbers, scales = self.numbers.to(device), self.scales.to(device, kept)
        return replace(self, numbers=numbers, scales=scales, offsets=offsets)

    def rows(self, rows: torch.Tensor | slice) -> QuantizedWeight:
        """Returns the weight with only these outputs, in this order."""
        offsets = None if self.offsets is None else self.offsets[rows]
        return replace(self, numbers=self.numbers[rows], scales=self.scales[rows], offsets=offsets)

    def dequantized(self) -> torch.Tensor:
        """Returns the weight in fp32."""
        is_packed = self.bits == 4
        numbers = unpack_int4(self.numbers, self.inputs) if is_packed else self.numbers.float()
        if missing := -self.inputs % self.group:
            numbers = nn.functional.pad(numbers, (0, missing))
        # In place from here on, because the tensor is large.
        groups = numbers.reshape(*numbers.shape[:-1], -1, self.group)
        scales = self.scales.float().unsqueeze(-1)
        if self.offsets is None:
            groups.sub_(2 ** (self.bits - 1)).mul_(scales)
        else:
            groups.mul_(scales).add_(self.offsets.float().unsqueeze(-1))
        return groups.flatten(-2)[..., : self.inputs]

    def split(self, count: int) -> list[QuantizedWeight]:
        """Splits the weight into `count` weights with equal numbers of outputs."""
        size = len(self.numbers) // count
        return [self.rows(slice(size * part, size * (part + 1))) for part in range(count)]

    def released(self) -> QuantizedWeight:
        """Returns a copy with empty tensors, so that the memory of this weight can be freed."""
        nothing = self.scales.new_empty(0)
        return replace(self, numbers=self.numbers.new_empty(0), scales=nothing, offsets=None)


ExpertWeight = tuple[QuantizedWeight | None, QuantizedWeight, QuantizedWeight]
"""The weights of an expert: gate (None if it has no gate), up, and down."""


@dataclass(frozen=True, slots=True)
class ExpertsWeight:
    """The weights of all experts of a layer."""

    experts: list[ExpertWeight]

    @property
    def shapes(self) -> dict[str, tuple[int, int, int]]:
        """Maps the names of the parameters of transformers' module to their shapes."""
        gate, up, down = self.experts[0]
        count, (inner_size, size) = len(self.experts), up.shape
        inputs = (count, inner_size if gate is None else 2 * inner_size, size)
        return {self._inputs: inputs, "down_proj": (count, *down.shape)}

    @property
    def parts(self) -> list[QuantizedWeight]:
        return [part for part in chain(*self.experts) if part is not None]

    @property
    def tensors(self) -> list[torch.Tensor]:
        return [tensor for part in self.parts for tensor in part.tensors]

    def dequantized(self) -> dict[str, torch.Tensor]:
        """Maps the names of the parameters of transformers' module to their values in fp32."""
        inputs, downs = [], []
        for *of_inputs, down in self.experts:
            inputs.append(torch.cat([each.dequantized() for each in of_inputs if each is not None]))
            downs.append(down.dequantized())
        return {self._inputs: torch.stack(inputs), "down_proj": torch.stack(downs)}

    @property
    def _inputs(self) -> str:
        """The name of the parameter that has the gate and up weights, or only the up weights if
        there are no gates."""
        return "up_proj" if self.experts[0][0] is None else "gate_up_proj"


def _as_stored(factors: torch.Tensor, bits: int) -> torch.Tensor:
    return (factors.half() if bits == 4 else factors).float().contiguous()

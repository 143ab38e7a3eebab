"""Recurrent layers in fused kernels."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch

from promptq.worker.engine.decoders.kernels.convolution import convolve
from promptq.worker.engine.decoders.kernels.gated_norm import gated_norm
from promptq.worker.engine.decoders.kernels.linear import fused
from promptq.worker.engine.decoders.kernels.scan import Scan
from promptq.worker.engine.decoders.kernels.sequences import StepSequences
from promptq.worker.engine.recurrent.parts import (
    RecurrenceParts,
    RecurrentParts,
    ShortConvolutionParts,
)


class ShortConvolution:
    """A short convolution layer, from rows [T, hidden size] to rows of the same shape."""

    def __init__(self, parts: ShortConvolutionParts, windows: torch.Tensor) -> None:
        self._input, self._output = fused(parts.input), fused(parts.output)
        self._convolution, self._windows = parts.convolution, windows

    def __call__(self, x: torch.Tensor, sequences: StepSequences) -> torch.Tensor:
        projected = self._input(x)
        return self._output(
            convolve(projected, self._convolution, sequences, self._windows, is_gated=True)
        )


class Recurrence:
    """A gated linear recurrence, from rows [T, hidden size] to rows of the same shape."""

    def __init__(self, parts: RecurrenceParts, windows: torch.Tensor, states: torch.Tensor) -> None:
        self._inputs, self._output = fused(*parts.projections), fused(parts.output)
        self._convolution, self._windows, self._states = parts.convolution, windows, states
        self._scan, self._norm = Scan(parts), parts.norm
        places, device = places_of(parts), states.device
        num_channels = parts.convolution.weight.shape[0]
        self._gates_up, self._times_up = (
            None if linear is None else fused(linear) for linear in (parts.gates_up, parts.times_up)
        )
        self._num_rates = parts.num_value_heads
        num_gates = parts.num_value_heads * parts.value_size
        if parts.gates_up is not None:
            num_gates = parts.gates_up.in_features
        sizes = [num_channels, num_gates, len(places) - num_channels - num_gates]
        self._order: torch.Tensor | None = None
        """Indices that put the projections' columns into the order of `parts`; None if the columns
        already have this order."""
        if any((part.diff() != 1).any() for part in torch.split(places, sizes)):
            self._order, places = places.to(device), torch.arange(len(places), device="cpu")
        self._columns = [
            slice(int(part[0]), int(part[0]) + len(part)) for part in torch.split(places, sizes)
        ]
        """The columns of the convolution's inputs, of the gates, and of the rates."""
        self._scale: torch.Tensor | None = None
        if parts.input_scale is not None:
            self._scale = torch.empty_like(parts.input_scale)
            self._scale[places.to(device)] = parts.input_scale

    def __call__(self, x: torch.Tensor, sequences: StepSequences) -> torch.Tensor:
        projected = self._inputs(x)
        if self._order is not None:
            projected = projected.index_select(1, self._order)
        if self._scale is not None:
            projected.mul_(self._scale)
        inputs, gates, rates = (projected[:, columns] for columns in self._columns)
        if self._gates_up is not None:
            gates = self._gates_up(gates.contiguous())
        if self._times_up is not None:
            rates, times = rates[:, : self._num_rates], rates[:, self._num_rates :]
            rates = torch.cat([rates, self._times_up(times.contiguous())], dim=1)
        convolved = convolve(inputs, self._convolution, sequences, self._windows, is_gated=False)
        read = self._scan(convolved, rates, self._states, sequences)
        return self._output(gated_norm(read, gates, self._norm))


def recurrent_layer(
    parts: RecurrentParts, states: Sequence[torch.Tensor]
) -> ShortConvolution | Recurrence:
    """Returns the layer with these parts. `states` are the pool's tensors for this layer."""
    if isinstance(parts, ShortConvolutionParts):
        return ShortConvolution(parts, *states)
    return Recurrence(parts, *states)


def places_of(parts: RecurrenceParts) -> torch.Tensor:
    """Returns the indices of `parts.inputs` among the joined outputs of `parts.projections`."""
    sizes = [linear.out_features for linear in parts.projections]
    firsts = dict(zip(parts.projections, accumulate(sizes, initial=0), strict=False))
    begins = [firsts[rows.linear] + rows.first for rows in parts.inputs]
    return torch.cat(
        [
            torch.arange(begin, begin + rows.count, device="cpu")
            for begin, rows in zip(begins, parts.inputs, strict=True)
        ]
    )

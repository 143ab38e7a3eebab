"""Describes what a recurrent layer computes, for promptq's decoders."""

from __future__ import annotations

import math
from bisect import bisect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import nn


@dataclass(frozen=True, slots=True)
class RowsOfLinear:
    """`count` successive outputs of a linear layer, from output number `first` on."""

    linear: nn.Linear
    first: int
    count: int

    @classmethod
    def all_of(cls, linear: nn.Linear) -> RowsOfLinear:
        return cls(linear, 0, linear.out_features)

    @classmethod
    def arranged(
        cls,
        linears: Sequence[nn.Linear],
        arrange: Callable[[Sequence[torch.Tensor]], Iterable[torch.Tensor]],
    ) -> tuple[RowsOfLinear, ...]:
        """Returns the rows of the weights of `linears` in a new order, as runs of successive rows.

        `arrange` chooses the order. It gets a tensor for each layer, with a different index for
        each row, and returns tensors with the same indices in the new order.
        """
        sizes = [linear.out_features for linear in linears]
        firsts = [*accumulate((size + 1 for size in sizes[:-1]), initial=0)]
        numbers = [
            torch.arange(first, first + size, device="cpu")
            for first, size in zip(firsts, sizes, strict=True)
        ]
        order = torch.cat([*arrange(numbers)])
        begins = (order.diff() != 1).nonzero().flatten() + 1
        rows = []
        for begin, end in pairwise([0, *begins.tolist(), len(order)]):
            number = int(order[begin])
            index = bisect(firsts, number) - 1
            rows.append(cls(linears[index], number - firsts[index], end - begin))
        return tuple(rows)


@dataclass(frozen=True, slots=True)
class ShortConvolutionParts:
    """A layer that computes `output(c * convolution(b * x))`, where `input` computes b, c and x."""

    input: nn.Linear
    convolution: nn.Conv1d
    output: nn.Linear

    @property
    def projections(self) -> tuple[nn.Linear, ...]:
        return (self.input,)

    @property
    def linears(self) -> tuple[nn.Linear, ...]:
        return self.input, self.output


@dataclass(frozen=True, slots=True)
class GatedNorm:
    """An RMS norm of a recurrence's outputs, multiplied by the gate's SiLU or sigmoid."""

    weight: torch.Tensor  # [values], or of one head
    epsilon: float
    group: int
    """Number of values that are normalised together."""
    gates_first: bool
    """Whether the values are multiplied by the gate before they are normalised."""
    is_sigmoid: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RecurrenceParts:
    """A gated linear recurrence in which value heads share key heads (native/src/layers/scan.h)."""

    inputs: tuple[RowsOfLinear, ...]
    """Outputs of linear layers, in this order: the channels of the convolution; a gate for each
    value; an update rate for each value head (only in the delta rule); a time step for each value
    head (with `has_key_decays`, for each number of a head's key)."""
    input_scale: torch.Tensor | None = None  # of these outputs
    convolution: nn.Conv1d
    activation: Any
    is_delta: bool
    num_key_heads: int
    num_value_heads: int
    key_size: int
    value_size: int
    query_first: int
    """The convolution's channel at which the queries begin."""
    key_first: int
    value_first: int
    query_scale: float
    decay: torch.Tensor  # [value heads]; a token decays the state by exp(decay * time)
    time_bias: torch.Tensor  # a number for each time step, added to the time step before softplus
    time_limits: tuple[float, float] = (0.0, math.inf)
    most_rate: float = 1.0
    """The delta rule's update rate is this factor times a sigmoid."""
    skip: torch.Tensor | None = None  # [value heads], the factor of a value that skips the state
    norm: GatedNorm | None
    """The norm of the outputs. None: the outputs are only multiplied by the gate's SiLU."""
    output: nn.Linear
    gates_up: nn.Linear | None = None
    """Computes the gates from the numbers in `inputs`. None: `inputs` has the gates."""
    times_up: nn.Linear | None = None
    """Computes the time steps from the numbers in `inputs`. None: `inputs` has the time steps."""

    @property
    def has_key_decays(self) -> bool:
        """Whether each number of a head's key has a time step and a decay, not only each head."""
        return len(self.time_bias) > self.num_value_heads

    @property
    def gate_inputs(self) -> int:
        """The number of columns of `inputs` for the gates. If `gates_up` is set, these columns are
        what `gates_up` reads; otherwise they are the gates."""
        num_values = self.num_value_heads * self.value_size
        return num_values if self.gates_up is None else self.gates_up.in_features

    @property
    def time_inputs(self) -> int:
        """The number of columns of `inputs` for the step sizes (Mamba's dt). If `times_up` is set,
        `times_up` computes the step sizes from these columns; else the columns are step sizes."""
        return len(self.time_bias) if self.times_up is None else self.times_up.in_features

    @property
    def projections(self) -> tuple[nn.Linear, ...]:
        """The linear layers whose outputs are in `inputs`, without repetition."""
        return tuple(dict.fromkeys(rows.linear for rows in self.inputs))

    @property
    def linears(self) -> tuple[nn.Linear, ...]:
        further = (self.gates_up, self.times_up)
        return *self.projections, self.output, *(each for each in further if each is not None)


RecurrentParts = ShortConvolutionParts | RecurrenceParts

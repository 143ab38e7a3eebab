"""The interface of all kinds of recurrent layers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, ClassVar

import torch
from torch import nn

from promptq.worker.engine.recurrent.parts import RecurrentParts
from promptq.worker.engine.recurrent.rows import RecurrentRows


@dataclass(frozen=True, slots=True)
class StateSpec:
    """The shape and dtype of one tensor of a sequence's state."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


class Mixer(ABC):
    """Computes one recurrent transformers module for the rows of packed steps. The module's weights
    are read in each step, because other code may convert or replace the weights between steps."""

    name: ClassVar[str]

    def __init__(self, module: Any) -> None:
        self.module: Any = module  # transformers' classes have no types for their parts

    @classmethod
    @abstractmethod
    def knows(cls, module: Any) -> bool:
        """Whether the module has the parts of this kind. Does not test what the module computes."""

    @property
    @abstractmethod
    def state(self) -> tuple[StateSpec, ...]:
        """The tensors of one sequence's state. The tensors are zeros before the first token."""

    @abstractmethod
    def mix(
        self, hidden: torch.Tensor, rows: RecurrentRows, pool: Sequence[torch.Tensor]
    ) -> torch.Tensor:
        """Returns the module's output [T, size] for the rows `hidden` [T, size] of a step.

        `pool` has a tensor [num_entries, *shape] for each StateSpec of `state`. The method reads
        the entries `rows.read` and writes the entries `rows.written`.
        """

    @property
    def parts(self) -> RecurrentParts | None:
        """The parts for promptq's decoders; None if the decoders do not support this kind."""
        return None


def parts_of(module: nn.Module) -> set[str]:
    """Returns the names of the module's direct children and parameters."""
    children = {name for name, _ in module.named_children()}
    return children | {name for name, _ in module.named_parameters(recurse=False)}


def is_depthwise(convolution: Any) -> bool:
    """Whether a module convolves each channel separately, over neighbouring positions."""
    return (
        type(convolution) is nn.Conv1d
        and convolution.groups == convolution.in_channels == convolution.out_channels
        and convolution.stride == convolution.dilation == (1,)
    )

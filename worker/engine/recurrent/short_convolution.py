"""Gated short convolution (LFM2): `output(c * convolution(b * x))`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from promptq.worker.engine.recurrent.convolution import convolve, window_spec
from promptq.worker.engine.recurrent.mixer import Mixer, StateSpec, is_depthwise, parts_of
from promptq.worker.engine.recurrent.parts import RecurrentParts, ShortConvolutionParts
from promptq.worker.engine.recurrent.rows import RecurrentRows


class ShortConvolution(Mixer):
    name = "short convolution"

    @classmethod
    def knows(cls, module: Any) -> bool:
        return (
            parts_of(module) == {"conv", "in_proj", "out_proj"}
            and is_depthwise(module.conv)
            and module.in_proj.out_features == 3 * module.conv.in_channels
        )

    @property
    def state(self) -> tuple[StateSpec, ...]:
        return (window_spec(self.module.conv),)

    @property
    def parts(self) -> RecurrentParts:
        module = self.module
        return ShortConvolutionParts(module.in_proj, module.conv, module.out_proj)

    def mix(
        self, hidden: torch.Tensor, rows: RecurrentRows, pool: Sequence[torch.Tensor]
    ) -> torch.Tensor:
        module, (windows,) = self.module, pool
        b, c, x = module.in_proj(hidden).chunk(3, dim=-1)
        output: torch.Tensor = module.out_proj(c * convolve(b * x, module.conv, rows, windows))
        return output

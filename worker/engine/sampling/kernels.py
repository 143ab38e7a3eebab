"""The computations over the whole vocabulary: in torch for any device, or in native code on a CPU.

Both compute the same, except for the rounding of fp32: exponentials and their sums can differ in
the last bit. So a seed gives the same token in both, unless its number falls within about 1e-6 of
the border between two tokens. On the same kind of machine the token is always the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from promptq.worker.engine.device.scratch import Scratch
from promptq.worker.engine.sampling.draw import draw
from promptq.worker.engine.sampling.filters import Filters, thresholds, weights_above
from promptq.worker.engine.sampling.logprobs import ChosenLogprobs, report


@dataclass(frozen=True, slots=True)
class Distributions:
    """How the token of each row is drawn."""

    any_is_sampled: bool
    is_sampled: torch.Tensor
    """[R], bool: False if the likeliest token is taken."""
    temperature: torch.Tensor
    """[R, 1]"""
    filters: Filters


class Kernels(Protocol):
    """The logits [R, vocab_size] are not changed by any method."""

    def choose(
        self, logits: torch.Tensor, asked: Distributions, uniforms: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Token ids [R] for random numbers [R] (float64, in [0, 1)), and whether each is sound."""
        ...

    def report(
        self, logits: torch.Tensor, rows: list[int], chosen: torch.Tensor, num_top: int
    ) -> ChosenLogprobs:
        """Report these rows, for the token ids [R] that were chosen in all rows."""
        ...


class TorchKernels:
    """Computes in torch, on any device."""

    def __init__(self, device: torch.device) -> None:
        self._scratch = Scratch(device)

    def choose(
        self, logits: torch.Tensor, asked: Distributions, uniforms: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        best, likeliest = logits.max(dim=1)
        is_sound = best.isfinite()
        if not asked.any_is_sampled:
            return likeliest, is_sound
        scaled = self._scratch.take("scaled", *logits.shape).copy_(logits)
        scaled.sub_(best.unsqueeze(1)).div_(asked.temperature)
        weights = self._scratch.take("weights", *logits.shape)
        threshold = thresholds(scaled, asked.filters, weights)
        if threshold is None:
            weights = scaled.exp_()
        else:
            weights = weights_above(scaled, threshold, out=scaled)
        return torch.where(asked.is_sampled, draw(weights, uniforms), likeliest), is_sound

    def report(
        self, logits: torch.Tensor, rows: list[int], chosen: torch.Tensor, num_top: int
    ) -> ChosenLogprobs:
        return report(logits, rows, chosen, num_top, self._scratch)


class NativeKernels:
    """Computes in native code, on a CPU for which it is loaded (native/build.py)."""

    def choose(
        self, logits: torch.Tensor, asked: Distributions, uniforms: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        token_ids, is_sound = torch.ops.promptq.choose(
            _known(logits), asked.is_sampled, asked.temperature, asked.filters.table, uniforms
        )
        return token_ids, is_sound

    def report(
        self, logits: torch.Tensor, rows: list[int], chosen: torch.Tensor, num_top: int
    ) -> ChosenLogprobs:
        index = torch.tensor(rows)
        return ChosenLogprobs(
            *torch.ops.promptq.report_logprobs(_known(logits), index, chosen, num_top)
        )


def _known(logits: torch.Tensor) -> torch.Tensor:
    """The logits in a dtype and layout that the native code reads."""
    if logits.dtype not in (torch.float32, torch.bfloat16):
        logits = logits.float()
    return logits.contiguous()

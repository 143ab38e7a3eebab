"""Computations over the whole vocabulary, in three versions: native code, Triton, and torch.

All versions compute the same, except for the rounding of fp32: exponentials and their sums can
differ in the last bit. So a seed draws the same token in all versions, unless its random number is
within about 1e-6 of the border between two tokens. Machines of the same kind use one version.
"""

from __future__ import annotations

from functools import cached_property
from importlib.util import find_spec

import numpy as np
import torch

from promptq.shared.protocol.request import NEUTRAL, SamplingParams
from promptq.worker.engine.device.async_copies import to_device
from promptq.worker.engine.device.scratch import Scratch
from promptq.worker.engine.native.library import load_native
from promptq.worker.engine.sampling.draw import draw
from promptq.worker.engine.sampling.filters import (
    FILTERS,
    Filters,
    filter_values,
    thresholds,
    weights_above,
)
from promptq.worker.engine.sampling.logprobs import ChosenLogprobs, report

DRAWS = ("uniform", "temperature", *FILTERS)
"""The inputs besides logits that decide a row's token: a random number in [0, 1) and parameters.
With a temperature of 0, the likeliest token is chosen."""

_COLDEST = 1e-30
"""Lower temperatures are raised to this value, because their inverse overflows fp32."""


class Distributions:
    """The parameters for drawing the tokens of some rows. Tensors are built only if a kernel needs
    them: Triton reads all parameters from the step's draws instead."""

    def __init__(self, params: list[SamplingParams], vocab_size: int, device: torch.device) -> None:
        # Greedy rows are computed together with the others, which costs less than leaving them out,
        # but with parameters that need no further work.
        self._params = [each if each.temperature > 0.0 else NEUTRAL for each in params]
        self._vocab_size = vocab_size
        self._device = device
        self.any_is_sampled = any(each.temperature > 0.0 for each in params)
        self.draws = np.zeros((len(DRAWS), len(params)))
        """[len(DRAWS), R], in the order of DRAWS. Each step sets the random numbers in a copy."""
        self.draws[1] = [each.temperature and max(each.temperature, _COLDEST) for each in params]
        self.draws[2:] = np.array(filter_values(self._params, vocab_size)).T

    @cached_property
    def is_sampled(self) -> torch.Tensor:
        """Bool [R]: false for a row whose likeliest token is chosen."""
        return to_device(self.draws[1] > 0.0, self._device)

    @cached_property
    def temperature(self) -> torch.Tensor:
        """Temperatures [R, 1]; 1 for a row whose likeliest token is chosen."""
        values = np.where(self.draws[1] > 0.0, self.draws[1], 1.0).astype(np.float32)
        return to_device(values, self._device).unsqueeze(1)

    @cached_property
    def filters(self) -> Filters:
        return Filters(self._params, self._vocab_size, self._device)


Chosen = tuple[torch.Tensor, torch.Tensor]
"""Token ids [R], and [R]: whether the row's largest logit is finite. If not, ignore the token."""


class TorchKernels:
    """Chooses tokens and computes log-probabilities in torch, on any device. No method changes the
    logits."""

    def __init__(self, device: torch.device) -> None:
        self._scratch = Scratch(device)

    def choose(self, logits: torch.Tensor, wanted: Distributions, draws: torch.Tensor) -> Chosen:
        """Choose a token in each row of `logits` [R, vocab_size]. `draws` [len(DRAWS), R], float64,
        has the random numbers and the parameters. `wanted` has the same parameters."""
        best, likeliest = logits.max(dim=1)
        is_sound = best.isfinite()
        if not wanted.any_is_sampled:
            return likeliest, is_sound
        scaled = self._scratch.take("scaled", *logits.shape).copy_(logits)
        scaled.sub_(best.unsqueeze(1)).div_(wanted.temperature)
        weights = self._scratch.take("weights", *logits.shape)
        threshold = thresholds(scaled, wanted.filters, weights)
        if threshold is None:
            weights = scaled.exp_()
        else:
            weights = weights_above(scaled, threshold, out=scaled)
        return torch.where(wanted.is_sampled, draw(weights, draws[0]), likeliest), is_sound

    def report(
        self, logits: torch.Tensor, rows: list[int], chosen: torch.Tensor, num_top: int
    ) -> ChosenLogprobs:
        """Returns the log-probabilities of `rows`. `chosen` [R] are the tokens of all rows, and
        `num_top` is the number of likeliest tokens."""
        return report(logits, rows, chosen, num_top, self._scratch)


class NativeKernels:
    """Computes like TorchKernels, but in native code on a CPU."""

    def __init__(self) -> None:
        self._library = load_native()

    def choose(self, logits: torch.Tensor, wanted: Distributions, draws: torch.Tensor) -> Chosen:
        logits, filters = _readable(logits), wanted.filters.table
        count, vocab_size = logits.shape
        token_ids = torch.empty(count, dtype=torch.int64)
        is_sound = torch.empty(count, dtype=torch.bool)
        self._library.choose_tokens(
            logits.dtype == torch.bfloat16,
            *(logits.data_ptr(), count, vocab_size),
            *(wanted.is_sampled.data_ptr(), wanted.temperature.data_ptr()),
            *(filters.data_ptr(), filters.shape[1], draws[0].data_ptr()),
            *(torch.get_num_threads(), token_ids.data_ptr(), is_sound.data_ptr()),
        )
        return token_ids, is_sound

    def report(
        self, logits: torch.Tensor, rows: list[int], chosen: torch.Tensor, num_top: int
    ) -> ChosenLogprobs:
        logits, index = _readable(logits), torch.tensor(rows)
        logprobs = torch.empty(len(rows), dtype=torch.float32)
        ranks = torch.empty(len(rows), dtype=torch.int64)
        top_ids = torch.empty(len(rows), num_top, dtype=torch.int64)
        top_logprobs = torch.empty(len(rows), num_top, dtype=torch.float32)
        self._library.report_logprobs(
            logits.dtype == torch.bfloat16,
            *(logits.data_ptr(), logits.shape[1], index.data_ptr(), len(rows)),
            *(chosen.data_ptr(), num_top, torch.get_num_threads()),
            *(each.data_ptr() for each in (logprobs, ranks, top_ids, top_logprobs)),
        )
        return ChosenLogprobs(logprobs, ranks, top_ids, top_logprobs)


class TritonKernels(TorchKernels):
    """Chooses tokens in Triton, without waiting for the device. Computes log-probabilities in
    torch."""

    def choose(self, logits: torch.Tensor, wanted: Distributions, draws: torch.Tensor) -> Chosen:
        if not wanted.any_is_sampled:
            best, likeliest = logits.max(dim=1)
            return likeliest, best.isfinite()
        from promptq.worker.engine.sampling.triton_choice import choose_tokens

        return choose_tokens(logits, draws)


def kernels_on(device: torch.device, *, native: bool) -> TorchKernels | NativeKernels:
    """Returns the fastest kernels. `native` means that the device is a CPU and native code is
    loaded."""
    if native:
        return NativeKernels()
    # Triton is not installed everywhere.
    has_triton = device.type != "cpu" and find_spec("triton") is not None
    return TritonKernels(device) if has_triton else TorchKernels(device)


def _readable(logits: torch.Tensor) -> torch.Tensor:
    """Returns the logits, converted or copied if native code cannot read them directly."""
    if logits.dtype not in (torch.float32, torch.bfloat16):
        logits = logits.float()
    return logits.contiguous()

"""Causal convolution of each channel over the last positions of a sequence."""

from __future__ import annotations

from typing import Any

import torch

from promptq.worker.engine.recurrent.mixer import StateSpec
from promptq.worker.engine.recurrent.rows import RecurrentRows


def window_spec(convolution: Any) -> StateSpec:
    """Returns the spec of a convolution's state: the earlier rows that the next row needs."""
    channels, _, size = convolution.weight.shape
    return StateSpec((size - 1, channels), convolution.weight.dtype)


def convolve(
    inputs: torch.Tensor, convolution: Any, rows: RecurrentRows, windows: torch.Tensor
) -> torch.Tensor:
    """Returns the convolution [T, channels] of a step's `inputs` [T, channels], in their dtype.
    Updates the last inputs in `windows` [num_entries, size - 1, channels]. Sums are in fp32."""
    weight = convolution.weight.squeeze(1).t().float()  # [size, channels]
    before = windows.index_select(0, rows.read)
    after = torch.empty_like(before)
    output = torch.empty_like(inputs, dtype=torch.float32)
    num_decodes = rows.num_decodes
    if num_decodes:
        seen = torch.cat([before[:num_decodes], inputs[:num_decodes, None]], dim=1)
        output[:num_decodes] = (seen.float() * weight).sum(dim=1)
        after[:num_decodes] = seen[:, 1:]
    for index, chunk in rows.chunks():
        seen = torch.cat([before[index], inputs[chunk]])
        length, wide = chunk.stop - chunk.start, seen.float()
        result = torch.mul(wide[:length], weight[0], out=output[chunk])
        for offset in range(1, len(weight)):
            result.addcmul_(wide[offset : offset + length], weight[offset])
        after[index] = seen[length:]
    windows.index_copy_(0, rows.written, after)
    if convolution.bias is not None:
        output += convolution.bias.float()
    return output.to(inputs.dtype)

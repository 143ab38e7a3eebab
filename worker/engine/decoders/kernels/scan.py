"""Gated linear recurrences: Gated DeltaNet, Kimi Delta Attention and Mamba 2 (see scan.h).

A head has a state `S` [key size, value size]. A token has a query q, a key k, a value v, a decay a
and a rate b. The token changes the state to `S''`, and its result is `S''^T q`:

    S' = a S    S'' = S' + k c^T    c = b (v - S'^T k) in the delta rule, otherwise c = b v

In Kimi Delta Attention, each row of a state has its own decay.
"""

from __future__ import annotations

from typing import Any

import torch
import triton

from promptq.worker.engine.attention.triton_kernels.common import padded
from promptq.worker.engine.decoders.kernels.chunked_scan import chunked_scan_kernel
from promptq.worker.engine.decoders.kernels.decode_scan import decode_scan_kernel
from promptq.worker.engine.decoders.kernels.sequences import StepSequences
from promptq.worker.engine.recurrent.parts import RecurrenceParts

_VALUE_TILE = 32
"""The most columns of a state in one Triton program. Columns are independent."""
DTYPES_IN_PIECES = {torch.bfloat16, torch.float16}
"""The dtypes in which chunks are computed piece by piece. fp32 products would spill registers."""
_PIECE = 16
"""The most rows of a piece, a part of a chunk. More rows would spill registers."""


class Scan:
    """Computes a recurrence for the rows of a step, and updates the states of the step's
    sequences."""

    def __init__(self, parts: RecurrenceParts) -> None:
        self._parts = parts
        key_tile = padded(parts.key_size)
        self._value_tile = min(_VALUE_TILE, padded(parts.value_size))
        self._num_programs = parts.num_value_heads * triton.cdiv(parts.value_size, self._value_tile)
        self._num_warps = max(4, key_tile // 32)
        self._constants: dict[str, Any] = {
            "QUERY_FIRST": parts.query_first,
            "KEY_FIRST": parts.key_first,
            "VALUE_FIRST": parts.value_first,
            "NUM_CHANNELS": parts.convolution.weight.shape[0],
            "NUM_HEADS": parts.num_value_heads,
            "GROUP": parts.num_value_heads // parts.num_key_heads,
            "KEY_SIZE": parts.key_size,
            "VALUE_SIZE": parts.value_size,
            "KEY_TILE": key_tile,
            "VALUE_TILE": self._value_tile,
            "IS_DELTA": parts.is_delta,
            "HAS_SKIP": parts.skip is not None,
            "HAS_KEY_DECAYS": parts.has_key_decays,
        }

    def __call__(
        self,
        convolved: torch.Tensor,
        rates: torch.Tensor,
        states: torch.Tensor,
        sequences: StepSequences,
    ) -> torch.Tensor:
        """Returns the recurrence's outputs: fp32 [T, value heads * value size].

        `convolved` [T, channels] are queries, keys and values. `rates` are columns of a larger
        tensor. In the delta rule, they begin with an update rate for each value head. Then come the
        time steps: one for each value head, or one for each number of each head's keys. `states`
        [entries, value heads, key size, value size] are in fp32.
        """
        parts = self._parts
        output = torch.empty(
            len(convolved),
            parts.num_value_heads * parts.value_size,
            dtype=torch.float32,
            device=convolved.device,
        )
        arguments = (
            convolved,
            rates,
            parts.decay,
            parts.time_bias,
            parts.decay if parts.skip is None else parts.skip,
            states,
            sequences.table,
            output,
            len(sequences),
            rates.stride(0),
            *map(float, parts.time_limits),
            parts.most_rate,
            parts.query_scale,
        )
        in_pieces = convolved.dtype in DTYPES_IN_PIECES
        if most := sequences.most_decodes if in_pieces else len(sequences):
            decode_scan_kernel[(most, self._num_programs)](
                *arguments, **self._constants, IS_DECODE=in_pieces, num_warps=self._num_warps
            )
        if sequences.most_chunks and in_pieces:
            chunked_scan_kernel[(sequences.most_chunks, self._num_programs)](
                *arguments, **self._constants, PIECE=_PIECE, num_warps=8
            )
        return output

"""Kimi Delta Attention (Kimi Team 2025): Gated DeltaNet with a decay for each channel of a key."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers.activations import ACT2FN

from promptq.worker.engine.recurrent.convolution import convolve, window_spec
from promptq.worker.engine.recurrent.gated_delta_net import DeltaTokens, unit
from promptq.worker.engine.recurrent.mixer import Mixer, StateSpec, is_depthwise, parts_of
from promptq.worker.engine.recurrent.parts import (
    GatedNorm,
    RecurrenceParts,
    RecurrentParts,
    RowsOfLinear,
)
from promptq.worker.engine.recurrent.rows import Pieces, RecurrentRows

_PARTS = {"q_proj", "k_proj", "v_proj", "conv1d", "forget_gate", "b_proj", "o_norm", "o_proj"}
_GATES = ({"g_proj"}, {"g_a_proj", "g_b_proj"})
_LONGEST_PIECE = 16
"""The most rows of a piece. Each pair of its rows takes memory for a decay of each channel."""


class KimiDeltaAttention(Mixer):
    name = "Kimi Delta Attention"

    @classmethod
    def knows(cls, module: Any) -> bool:
        return parts_of(module) in [_PARTS | gate for gate in _GATES] and is_depthwise(
            module.conv1d
        )

    @property
    def state(self) -> tuple[StateSpec, ...]:
        module = self.module
        shape = (module.num_heads, module.head_dim, module.head_dim)
        return window_spec(module.conv1d), StateSpec(shape, torch.float32)

    @property
    def parts(self) -> RecurrentParts:
        module, gate = self.module, self.module.forget_gate
        size: int = module.num_heads * module.head_dim
        gates_up = getattr(module, "g_b_proj", None)
        gates = module.g_proj if gates_up is None else module.g_a_proj
        linears = module.q_proj, module.k_proj, module.v_proj, gates, module.b_proj, gate.f_a_proj
        return RecurrenceParts(
            inputs=tuple(RowsOfLinear.all_of(linear) for linear in linears),
            convolution=module.conv1d,
            activation=ACT2FN[module.activation],
            is_delta=True,
            num_key_heads=module.num_heads,
            num_value_heads=module.num_heads,
            key_size=module.head_dim,
            value_size=module.head_dim,
            query_first=0,
            key_first=size,
            value_first=2 * size,
            query_scale=module.head_dim**-0.5,
            decay=-gate.A_log.float().exp().flatten(),
            time_bias=gate.dt_bias.float(),
            norm=GatedNorm(
                *(module.o_norm.weight, module.o_norm.variance_epsilon, module.head_dim, False),
                is_sigmoid=True,
            ),
            output=module.o_proj,
            gates_up=gates_up,
            times_up=gate.f_b_proj,
        )

    def mix(
        self, hidden: torch.Tensor, rows: RecurrentRows, pool: Sequence[torch.Tensor]
    ) -> torch.Tensor:
        module, (windows, states) = self.module, pool
        heads = len(hidden), module.num_heads, module.head_dim
        qkv = torch.cat([each(hidden) for each in (module.q_proj, module.k_proj, module.v_proj)], 1)
        convolved = ACT2FN[module.activation](convolve(qkv, module.conv1d, rows, windows))
        query, key, value = (each.reshape(heads) for each in convolved.float().chunk(3, dim=-1))
        tokens = DeltaTokens(
            unit(query) * module.head_dim**-0.5,
            unit(key),
            value,
            module.forget_gate(hidden.unsqueeze(0))[0].float(),
            module.b_proj(hidden).sigmoid().float(),
        )
        read = rows.scan(tokens, states, _decode, _compute_chunks, _LONGEST_PIECE)
        has_one = hasattr(module, "g_proj")
        gate = module.g_proj(hidden) if has_one else module.g_b_proj(module.g_a_proj(hidden))
        normed = module.o_norm(read.to(hidden.dtype), gate.view(heads))
        mixed: torch.Tensor = module.o_proj(normed.flatten(1))
        return mixed


def _decode(tokens: DeltaTokens, states: torch.Tensor) -> torch.Tensor:
    """Returns the outputs of decodes. Updates `states` [rows, heads, key size, value size]."""
    query, key = tokens.query.unsqueeze(-2), tokens.key.unsqueeze(-2)
    states *= tokens.decay.exp().unsqueeze(-1)
    change = (tokens.value.unsqueeze(-2) - key @ states) * tokens.beta[..., None, None]
    states += key.transpose(-1, -2) @ change
    return (query @ states).squeeze(-2)


def _compute_chunks(tokens: DeltaTokens, states: torch.Tensor, pieces: Pieces) -> torch.Tensor:
    """Returns the outputs of chunks. Updates `states` [chunks, heads, key size, value size]."""
    read = torch.empty_like(pieces.cut(tokens.value))
    cut = [pieces.cut(each) for each in tokens]
    for now, chunks in pieces.rounds:
        query, key, value, decay, beta = (each[now] for each in cut)
        from_begin, between, to_end = pieces.decays(decay.transpose(-1, -2))
        # [pieces, heads, size, size, channels]
        decayed = between.permute(0, 1, 3, 4, 2) * key.unsqueeze(-3)
        seen = (decayed @ query.unsqueeze(-1)).squeeze(-1)
        system = (decayed @ key.unsqueeze(-1)).squeeze(-1) * beta.unsqueeze(-1)
        from_begin, to_end = from_begin.transpose(-1, -2), to_end.transpose(-1, -2)
        before = states[chunks]
        wanted = (value - (key * from_begin) @ before) * beta.unsqueeze(-1)
        new = torch.linalg.solve_triangular(system, wanted, upper=False, unitriangular=True)
        read[now] = (query * from_begin) @ before + seen @ new
        whole = from_begin[..., -1, :].unsqueeze(-1)
        states[chunks] = before * whole + (key * to_end).transpose(-1, -2) @ new
    return pieces.join(read)

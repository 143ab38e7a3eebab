"""Gated DeltaNet (Yang et al. 2025): Qwen3-Next, Qwen3.5, OLMo Hybrid.

The state of a head is a matrix `S` [key size, value size]. A token has a query `q`, a key `k`, a
value `v`, a decay `exp(g)` and a rate `beta`. The token changes the state to `S'`, and has a
result:

    S' = exp(g) S + k (beta (v - exp(g) S^T k))^T        result = S'^T q
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers.activations import ACT2FN

from promptq.worker.engine.recurrent.convolution import convolve, window_spec
from promptq.worker.engine.recurrent.mixer import Mixer, StateSpec, is_depthwise, parts_of
from promptq.worker.engine.recurrent.parts import (
    GatedNorm,
    RecurrenceParts,
    RecurrentParts,
    RowsOfLinear,
)
from promptq.worker.engine.recurrent.rows import Pieces, RecurrentRows

_EPSILON = 1e-6
_DECAY = {"A_log", "dt_bias", "conv1d"}
_OF_NEXT = _DECAY | {"in_proj_qkvz", "in_proj_ba", "norm", "out_proj"}
_OF_QWEN35 = _DECAY | {"in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "norm", "out_proj"}
_OF_OLMO = _DECAY | {"q_proj", "k_proj", "v_proj", "a_proj", "b_proj", "g_proj", "o_norm", "o_proj"}
_PROJECTIONS = (
    ("q_proj", "k_proj", "v_proj", "g_proj", "b_proj", "a_proj"),
    ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"),
    ("in_proj_qkvz", "in_proj_ba"),
)


class _Projected(NamedTuple):
    qkv: torch.Tensor  # [..., key heads x key size x 2 + value heads x value size]
    gate: torch.Tensor  # [..., value heads x value size]
    b: torch.Tensor  # [..., value heads]
    a: torch.Tensor  # [..., value heads]


class DeltaTokens(NamedTuple):
    """The inputs of the recurrence, in fp32. A key head serves several successive value heads."""

    query: torch.Tensor  # [rows, key heads, key size]
    key: torch.Tensor  # [rows, key heads, key size]
    value: torch.Tensor  # [rows, value heads, value size]
    decay: torch.Tensor  # [rows, value heads], log; also of each channel: [..., key size]
    beta: torch.Tensor  # [rows, value heads]


class GatedDeltaNet(Mixer):
    name = "Gated DeltaNet"

    @classmethod
    def knows(cls, module: Any) -> bool:
        return parts_of(module) in (_OF_NEXT, _OF_QWEN35, _OF_OLMO) and is_depthwise(module.conv1d)

    @property
    def state(self) -> tuple[StateSpec, ...]:
        module = self.module
        shape = (module.num_v_heads, module.head_k_dim, module.head_v_dim)
        return window_spec(module.conv1d), StateSpec(shape, torch.float32)

    @property
    def parts(self) -> RecurrentParts:
        module = self.module
        norm, output = self._norm_and_output
        of_keys: int = module.num_k_heads * module.head_k_dim
        return RecurrenceParts(
            inputs=RowsOfLinear.arranged(self._projections, self._arranged),
            convolution=module.conv1d,
            activation=ACT2FN[module.activation],
            is_delta=True,
            num_key_heads=module.num_k_heads,
            num_value_heads=module.num_v_heads,
            key_size=module.head_k_dim,
            value_size=module.head_v_dim,
            query_first=0,
            key_first=of_keys,
            value_first=2 * of_keys,
            query_scale=module.head_k_dim**-0.5,
            decay=-module.A_log.float().exp(),
            time_bias=module.dt_bias.float(),
            most_rate=self._most_rate,
            norm=GatedNorm(norm.weight, norm.variance_epsilon, module.head_v_dim, False),
            output=output,
        )

    @property
    def _projections(self) -> list[Any]:
        names = next(names for names in _PROJECTIONS if hasattr(self.module, names[0]))
        return [getattr(self.module, name) for name in names]

    def _arranged(self, outputs: Sequence[torch.Tensor]) -> _Projected:
        """Splits the outputs [..., width] of all projections by name."""
        module = self.module
        if len(outputs) == len(_PROJECTIONS[0]):
            query, key, value, gate, b, a = outputs
            return _Projected(torch.cat([query, key, value], dim=-1), gate, b, a)
        if len(outputs) == len(_PROJECTIONS[1]):
            return _Projected(*outputs)
        # Each key head's query, key, values and gates follow each other.
        heads = module.num_k_heads, -1
        qkvz, ba = (each.reshape(*each.shape[:-1], *heads) for each in outputs)
        served = module.num_v_heads // module.num_k_heads
        sizes = [*[module.head_k_dim] * 2, *[served * module.head_v_dim] * 2]
        *qkv, gate = (each.flatten(-2) for each in torch.split(qkvz, sizes, dim=-1))
        b, a = (each.flatten(-2) for each in torch.split(ba, served, dim=-1))
        return _Projected(torch.cat(qkv, dim=-1), gate, b, a)

    @property
    def _most_rate(self) -> float:
        return 2.0 if getattr(self.module, "allow_neg_eigval", False) else 1.0

    @property
    def _norm_and_output(self) -> tuple[Any, Any]:
        module = self.module
        if hasattr(module, "o_proj"):
            return module.o_norm, module.o_proj
        return module.norm, module.out_proj

    def mix(
        self, hidden: torch.Tensor, rows: RecurrentRows, pool: Sequence[torch.Tensor]
    ) -> torch.Tensor:
        module, (windows, states) = self.module, pool
        projected = self._arranged([linear(hidden) for linear in self._projections])
        convolved = convolve(projected.qkv, module.conv1d, rows, windows)
        tokens = self._tokens(ACT2FN[module.activation](convolved), projected)
        read = rows.scan(tokens, states, _decode, _compute_chunks)
        norm, output = self._norm_and_output
        size: int = module.head_v_dim
        normed = norm(read.to(hidden.dtype).view(-1, size), projected.gate.reshape(-1, size))
        mixed: torch.Tensor = output(normed.view(len(hidden), -1))
        return mixed

    def _tokens(self, convolved: torch.Tensor, projected: _Projected) -> DeltaTokens:
        module = self.module
        key_size: int = module.head_k_dim
        of_keys = module.num_k_heads * key_size
        widths = [of_keys, of_keys, module.num_v_heads * module.head_v_dim]
        query, key, value = torch.split(convolved.float(), widths, dim=-1)
        query, key = (each.view(len(each), -1, key_size) for each in (query, key))
        value = value.view(len(value), module.num_v_heads, -1)
        beta = projected.b.sigmoid() * self._most_rate
        rate = nn.functional.softplus(projected.a.float() + module.dt_bias)
        decay = -module.A_log.float().exp() * rate
        return DeltaTokens(unit(query) * key_size**-0.5, unit(key), value, decay, beta.float())


def unit(vectors: torch.Tensor) -> torch.Tensor:
    """Returns the vectors scaled to length 1."""
    return vectors * torch.rsqrt(vectors.square().sum(dim=-1, keepdim=True) + _EPSILON)


def _decode(tokens: DeltaTokens, states: torch.Tensor) -> torch.Tensor:
    """Returns outputs of decodes. Updates `states` [rows, value heads, key size, value size]."""
    served = tokens.value.shape[1] // tokens.key.shape[1]
    flat = states.flatten(0, 1)  # [rows x value heads, key size, value size]
    query, key = (
        each.repeat_interleave(served, dim=1).flatten(0, 1).unsqueeze(1)
        for each in (tokens.query, tokens.key)
    )
    flat *= tokens.decay.exp().view(-1, 1, 1)
    change = tokens.value.flatten(0, 1).unsqueeze(1) - key @ flat
    change *= tokens.beta.view(-1, 1, 1)
    flat.baddbmm_(key.transpose(1, 2), change)
    return (query @ flat).view_as(tokens.value)


def _compute_chunks(tokens: DeltaTokens, states: torch.Tensor, pieces: Pieces) -> torch.Tensor:
    """Returns the outputs of chunks. Updates `states` [chunks, value heads, key size, value size].
    Solves a triangular system to get the state changes of the rows of a piece."""
    served = tokens.value.shape[1] // tokens.key.shape[1]
    query, key, value, decay, beta = map(pieces.cut, tokens)
    from_begin, between, to_end = pieces.decays(decay)
    keys = key.transpose(-1, -2)
    seen = (query @ keys).repeat_interleave(served, dim=1).mul_(between)
    system = (key @ keys).repeat_interleave(served, dim=1).mul_(between).mul_(beta.unsqueeze(-1))
    query, key = (each.repeat_interleave(served, dim=1) for each in (query, key))
    wanted = torch.cat([value, key * from_begin.unsqueeze(-1)], dim=-1) * beta.unsqueeze(-1)
    solved = torch.linalg.solve_triangular(system, wanted, upper=False, unitriangular=True)
    change, of_states = solved.split([value.shape[-1], key.shape[-1]], dim=-1)
    query = query * from_begin.unsqueeze(-1)
    keys = (key * to_end.unsqueeze(-1)).transpose(-1, -2)
    whole = from_begin[..., -1:, None]
    read = torch.empty_like(value)
    for now, chunks in pieces.rounds:
        before = states[chunks]
        new = change[now] - of_states[now] @ before
        read[now] = query[now] @ before + seen[now] @ new
        states[chunks] = before * whole[now] + keys[now] @ new
    return pieces.join(read)

"""Mamba 2 (Dao and Gu 2024): Bamba, Granite 4, Falcon-H1, Nemotron-H.

The state of a head is a matrix `S` [head size, state size]. A token has an input `x`, a time step
`dt`, and the vectors `B` and `C` of its group. The token changes the state to `S'`, and has a
result:

    S' = exp(dt A) S + dt x B^T        result = S' C + D x
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from promptq.worker.engine.recurrent.convolution import convolve, window_spec
from promptq.worker.engine.recurrent.mixer import Mixer, StateSpec, is_depthwise, parts_of
from promptq.worker.engine.recurrent.parts import (
    GatedNorm,
    RecurrenceParts,
    RecurrentParts,
    RowsOfLinear,
)
from promptq.worker.engine.recurrent.rows import Pieces, RecurrentRows

_PARTS = {"A_log", "D", "act", "conv1d", "dt_bias", "in_proj", "norm", "out_proj"}


class _Tokens(NamedTuple):
    """The inputs of the recurrence, in fp32. Each group serves several successive heads."""

    inputs: torch.Tensor  # [rows, heads, head size]
    b: torch.Tensor  # [rows, groups, state size]
    c: torch.Tensor  # [rows, groups, state size]
    time: torch.Tensor  # [rows, heads]
    decay: torch.Tensor  # [rows, heads], log


class Mamba2(Mixer):
    name = "Mamba 2"

    @classmethod
    def knows(cls, module: Any) -> bool:
        return parts_of(module) == _PARTS and is_depthwise(module.conv1d)

    @property
    def state(self) -> tuple[StateSpec, ...]:
        module = self.module
        shape = (module.num_heads, module.head_dim, module.ssm_state_size)
        return window_spec(module.conv1d), StateSpec(shape, torch.float32)

    @property
    def parts(self) -> RecurrentParts | None:
        module = self.module
        of_groups = module.n_groups * module.ssm_state_size
        width = module.num_heads * module.head_dim
        if module.in_proj.bias is not None and getattr(module, "ssm_in_multiplier", 1.0) != 1.0:
            return None
        scale: torch.Tensor | None = None
        if hasattr(module, "mup_vector"):
            factors = module.ssm_in_multiplier * module.mup_vector.view(-1)
            scale = torch.cat(self._arranged([factors]))
        return RecurrenceParts(
            inputs=RowsOfLinear.arranged([module.in_proj], self._arranged),
            input_scale=scale,
            convolution=module.conv1d,
            activation=module.act,
            is_delta=False,
            num_key_heads=module.n_groups,
            num_value_heads=module.num_heads,
            key_size=module.ssm_state_size,
            value_size=module.head_dim,
            query_first=width + of_groups,
            key_first=width,
            value_first=0,
            query_scale=1.0,
            decay=-module.A_log.float().exp(),
            time_bias=module.dt_bias.float(),
            time_limits=module.time_step_limit,
            skip=module.D.float(),
            norm=self._norm,
            output=module.out_proj,
        )

    def _arranged(self, outputs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Splits outputs [..., width] of the projection into inputs, gates and time steps."""
        module, [projected] = self.module, outputs
        sizes = [module.num_heads * module.head_dim, module.conv1d.in_channels, module.num_heads]
        gate, x_b_c, time = torch.split(projected, sizes, dim=-1)
        return x_b_c, gate, time

    @property
    def _norm(self) -> GatedNorm | None:
        norm = self.module.norm
        if isinstance(norm, nn.Identity):
            return None
        size = getattr(norm, "group_size", None) or len(norm.weight) // norm.n_groups
        gates_first = not getattr(norm, "norm_before_gate", False)
        return GatedNorm(norm.weight, norm.variance_epsilon, size, gates_first)

    def mix(
        self, hidden: torch.Tensor, rows: RecurrentRows, pool: Sequence[torch.Tensor]
    ) -> torch.Tensor:
        module, (windows, states) = self.module, pool
        projected: torch.Tensor = module.in_proj(hidden * getattr(module, "ssm_in_multiplier", 1.0))
        if hasattr(module, "mup_vector"):
            projected = projected * module.mup_vector.view(-1)
        x_b_c, gate, time = self._arranged([projected])
        convolved = module.act(convolve(x_b_c, module.conv1d, rows, windows))
        tokens = self._tokens(convolved, time)
        read = rows.scan(tokens, states, _decode, _compute_chunks)
        read += tokens.inputs * module.D.float().unsqueeze(-1)
        scanned = read.flatten(1)
        if isinstance(module.norm, nn.Identity):
            scanned = scanned * nn.functional.silu(gate)
        else:
            scanned = module.norm(scanned.unsqueeze(0), gate.unsqueeze(0))[0]
        output: torch.Tensor = module.out_proj(scanned.to(hidden.dtype))
        return output

    def _tokens(self, convolved: torch.Tensor, time: torch.Tensor) -> _Tokens:
        module = self.module
        of_groups = module.n_groups * module.ssm_state_size
        width = module.num_heads * module.head_dim
        inputs, b, c = torch.split(convolved.float(), [width, of_groups, of_groups], dim=-1)
        time = nn.functional.softplus(time + module.dt_bias.to(time.dtype))
        # transformers limits time steps in prompts only, so a resumed text could differ.
        time = time.clamp(*module.time_step_limit).float()
        return _Tokens(
            inputs.view(len(inputs), module.num_heads, -1),
            b.view(len(b), module.n_groups, -1),
            c.view(len(c), module.n_groups, -1),
            time,
            time * -module.A_log.float().exp(),
        )


def _decode(tokens: _Tokens, states: torch.Tensor) -> torch.Tensor:
    """Returns the outputs of decodes. Updates `states` [rows, heads, head size, state size]."""
    served = tokens.inputs.shape[1] // tokens.b.shape[1]
    flat = states.flatten(0, 1)
    b, c = (
        each.repeat_interleave(served, dim=1).flatten(0, 1).unsqueeze(1)
        for each in (tokens.b, tokens.c)
    )
    flat *= tokens.decay.exp().view(-1, 1, 1)
    inputs = tokens.inputs * tokens.time.unsqueeze(-1)
    flat.baddbmm_(inputs.flatten(0, 1).unsqueeze(-1), b)
    return (flat @ c.transpose(1, 2)).view_as(inputs)


def _compute_chunks(tokens: _Tokens, states: torch.Tensor, pieces: Pieces) -> torch.Tensor:
    """Returns the outputs of chunks. Updates `states` [chunks, heads, head size, state size]. Rows
    of a piece read earlier rows of the piece as in attention."""
    served = tokens.inputs.shape[1] // tokens.b.shape[1]
    inputs, b, c, time, decay = map(pieces.cut, tokens)
    inputs = inputs * time.unsqueeze(-1)
    from_begin, between, to_end = pieces.decays(decay)
    seen = (c @ b.transpose(-1, -2)).repeat_interleave(served, dim=1).mul_(between)
    read = seen @ inputs
    b, c = (each.repeat_interleave(served, dim=1) for each in (b, c))
    added = (inputs * to_end.unsqueeze(-1)).transpose(-1, -2) @ b
    c = c * from_begin.unsqueeze(-1)
    whole = from_begin[..., -1:, None]
    for now, chunks in pieces.rounds:
        before = states[chunks]
        read[now] += c[now] @ before.transpose(-1, -2)
        states[chunks] = before * whole[now] + added[now]
    return pieces.join(read)

"""A mixture of experts: the choice of experts, their products, and the sum of their results."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import nn

from promptq.worker.engine.decoders.expert_parts import SCORES, ExpertParts, Routing
from promptq.worker.engine.decoders.kernels.activation import TILE, Activation
from promptq.worker.engine.decoders.kernels.grouped_product import GroupedProduct, Groups
from promptq.worker.engine.decoders.kernels.linear import Product, joined_weights
from promptq.worker.engine.decoders.norm_parts import require
from promptq.worker.engine.device.expert_weights import input_weights
from promptq.worker.engine.quantization.modules import QuantizedExperts
from promptq.worker.engine.quantization.weight import QuantizedWeight

_SOFTMAX, _SIGMOID, _SPARSEMIXER = map(tl.constexpr, range(len(SCORES)))


class Experts:
    """A mixture-of-experts layer, from rows [T, hidden size] to rows of the same shape. Never waits
    for the device."""

    def __init__(self, parts: ExpertParts, shared: Product | None) -> None:
        """`shared` computes the shared experts; None if the layer has no shared experts."""
        self._routing, self._shared = parts.routing, shared
        self._router, self._router_bias = parts.router, parts.router_bias
        self._has_shared_gate = parts.has_shared_gate
        fused: Any = parts.fused
        plain = fused.plain if isinstance(fused, QuantizedExperts) else fused
        biases = (plain.gate_up_proj_bias, plain.down_proj_bias) if plain.has_bias else (None, None)
        is_interleaved = plain.has_gate and not plain.is_concatenated
        weights: tuple[torch.Tensor | QuantizedWeight, torch.Tensor | QuantizedWeight]
        if isinstance(fused, QuantizedExperts):
            weights = joined_experts(fused)
            if is_interleaved and biases[0] is not None:
                biases = torch.cat([biases[0][:, ::2], biases[0][:, 1::2]], 1), biases[1]
            is_interleaved = False
        else:
            inputs, down = input_weights(plain), plain.down_proj
            if plain.is_transposed:
                inputs, down = inputs.transpose(1, 2), down.transpose(1, 2)
            weights = inputs, down
        self._inputs, self._down = (
            GroupedProduct(weight, self._routing.num_experts, bias)
            for weight, bias in zip(weights, biases, strict=True)
        )
        self._activation = Activation(
            parts.activation, parts.is_gated, is_interleaved, parts.limits
        )

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        # The router computes in fp32, because a choice is all or nothing.
        logits = nn.functional.linear(x.float(), self._router, self._router_bias)
        experts, shares = choose_experts(self._routing, logits)
        groups = Groups.of(experts, self._routing.num_experts)
        results = self._down(self._activation(self._inputs(x, groups)), groups)
        shared = None if self._shared is None else self._shared(x)
        return add_experts(results, shares, shared, logits if self._has_shared_gate else None)


def joined_experts(fused: QuantizedExperts) -> tuple[QuantizedWeight, QuantizedWeight]:
    """Returns two joined weights: the gate and up weights of all experts, expert by expert, and the
    down weights. The experts' weights become views of the joined weights."""
    inputs = [each for *both, _ in fused.quantized for each in both if each is not None]
    downs = [down for _, _, down in fused.quantized]
    for weights in (inputs, downs):
        require(len({weight.kind for weight in weights}) == 1, "experts of several formats")
    return joined_weights(inputs), joined_weights(downs)


def choose_experts(routing: Routing, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns each row's experts, int32 [T, top_k], and their shares (factors of results) in fp32.
    `logits` [T, outputs] are in fp32, and begin with the logits of the experts."""
    num_rows = len(logits)
    experts = logits.new_empty(num_rows, routing.top_k, dtype=torch.int32)
    shares = logits.new_empty(num_rows, routing.top_k)
    bias = routing.choice_bias
    _choice_kernel[(num_rows,)](
        logits,
        logits if bias is None else bias,
        experts,
        shares,
        routing.added_sum,
        routing.scale,
        routing.jitter,
        SCORES=SCORES.index(routing.scores),
        HAS_BIAS=bias is not None,
        NORMALIZES=routing.normalizes,
        NUM_GROUPS=routing.num_groups,
        TOP_GROUPS=routing.top_groups,
        TOP_K=routing.top_k,
        SLOT_TILE=triton.next_power_of_2(routing.top_k),
        NUM_EXPERTS=routing.num_experts,
        EXPERT_TILE=triton.next_power_of_2(routing.num_experts),
        STRIDE=logits.shape[1],
        num_warps=1,
    )
    return experts, shares


def add_experts(
    results: torch.Tensor,
    shares: torch.Tensor,
    shared: torch.Tensor | None,
    logits: torch.Tensor | None,
) -> torch.Tensor:
    """Returns the sum [T, size] of each row's `top_k` experts: `results` [T * top_k, size] times
    `shares` [T, top_k].

    Adds `shared` [T, size], the result of shared experts. With `logits` [T, outputs], first
    multiplies `shared` by the sigmoid of each row's last logit.
    """
    (num_rows, top_k), size = shares.shape, results.shape[1]
    output = results.new_empty(num_rows, size)
    _sum_kernel[(num_rows, triton.cdiv(size, TILE))](
        results,
        shares,
        results if shared is None else shared,
        shares if logits is None else logits,
        output,
        HAS_SHARED=shared is not None,
        HAS_GATE=logits is not None,
        OUTPUTS=0 if logits is None else logits.shape[1],
        TOP_K=top_k,
        SIZE=size,
        TILE=TILE,
        num_warps=4,
    )
    return output


@triton.jit
def _choice_kernel(
    logits: tl.tensor,
    bias: tl.tensor,
    experts: tl.tensor,
    shares: tl.tensor,
    added_sum: tl.tensor,
    scale: tl.tensor,
    jitter: tl.tensor,
    SCORES: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    NORMALIZES: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    TOP_K: tl.constexpr,
    SLOT_TILE: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    EXPERT_TILE: tl.constexpr,
    STRIDE: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, EXPERT_TILE)
    is_expert = expert < NUM_EXPERTS
    logit = tl.load(logits + row * STRIDE + expert, mask=is_expert, other=float("-inf"))
    scores = logit
    if SCORES == _SOFTMAX:
        scores = tl.exp(logit - tl.max(logit, 0))
        scores /= tl.sum(scores, 0)
    if SCORES == _SIGMOID:
        scores = tl.sigmoid(logit)
    left = scores
    if HAS_BIAS:
        left += tl.load(bias + expert, mask=is_expert, other=0.0)
    # Experts are chosen even if scores are not numbers.
    left = tl.where(is_expert & (left == left), left, float("-inf"))
    if TOP_GROUPS < NUM_GROUPS:
        left = _of_best_groups(left, expert, NUM_GROUPS, TOP_GROUPS, NUM_EXPERTS // NUM_GROUPS)
    slot = tl.arange(0, SLOT_TILE)
    chosen = tl.zeros((SLOT_TILE,), tl.int32)
    share = tl.zeros((SLOT_TILE,), tl.float32)
    for index in range(TOP_K):
        best = tl.max(left, 0)
        its = tl.argmax(left, 0)
        if SCORES == _SPARSEMIXER:
            known = tl.where(is_expert, logit, best)
            is_far = (best - known) / tl.maximum(tl.abs(known), best) > 2.0 * jitter
            near = tl.where(is_far, float("-inf"), left)
            score = 1.0 / tl.sum(tl.exp(near - best), 0)
        else:
            score = tl.sum(tl.where(expert == its, scores, 0.0), 0)
        chosen = tl.where(slot == index, its, chosen)
        share = tl.where(slot == index, score, share)
        left = tl.where(expert == its, float("-inf"), left)
    if NORMALIZES:
        share /= tl.sum(share, 0) + added_sum
    place = row * TOP_K + slot
    tl.store(experts + place, chosen, mask=slot < TOP_K)
    tl.store(shares + place, share * scale, mask=slot < TOP_K)


@triton.jit
def _of_best_groups(
    ranks: tl.tensor,
    expert: tl.tensor,
    NUM_GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    SIZE: tl.constexpr,
) -> tl.tensor:
    """Returns the ranks, with -inf for experts outside the TOP_GROUPS best groups. A group is
    better if the sum of its two best ranks is larger."""
    group = expert // SIZE
    sums = tl.full((ranks.shape[0],), float("-inf"), tl.float32)
    for index in range(NUM_GROUPS):
        its = tl.where(group == index, ranks, float("-inf"))
        best = tl.argmax(its, 0)
        others = tl.where(expert == best, float("-inf"), its)
        sums = tl.where(group == index, tl.max(its, 0) + tl.max(others, 0), sums)
    left = tl.full((ranks.shape[0],), float("-inf"), tl.float32)
    for _ in range(TOP_GROUPS):
        best = tl.argmax(sums, 0) // SIZE
        left = tl.where(group == best, ranks, left)
        sums = tl.where(group == best, float("-inf"), sums)
    return left


@triton.jit
def _sum_kernel(
    results: tl.tensor,
    shares: tl.tensor,
    shared: tl.tensor,
    logits: tl.tensor,
    output: tl.tensor,
    HAS_SHARED: tl.constexpr,
    HAS_GATE: tl.constexpr,
    OUTPUTS: tl.constexpr,
    TOP_K: tl.constexpr,
    SIZE: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    within = column < SIZE
    total = tl.zeros((TILE,), tl.float32)
    for slot in range(TOP_K):
        pair = row * TOP_K + slot
        result = tl.load(results + pair * SIZE + column, mask=within, other=0.0)
        total += tl.load(shares + pair) * result.to(tl.float32)
    if HAS_SHARED:
        result = tl.load(shared + row * SIZE + column, mask=within, other=0.0).to(tl.float32)
        if HAS_GATE:
            result *= tl.sigmoid(tl.load(logits + row * OUTPUTS + OUTPUTS - 1))
        total += result
    tl.store(output + row * SIZE + column, total, mask=within)

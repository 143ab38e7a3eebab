"""Splits a layer's mixture of experts into its parts.

A router's formula is not visible in its modules. So promptq tries all supported formulas on random
inputs, and chooses one with the same results as the router. No family needs special code.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import chain, product
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.func import functional_call

from promptq.worker.engine.decoders.mlp_parts import ACTIVATIONS, DenseMLP, activation_of
from promptq.worker.engine.decoders.norm_parts import Found, NotOfThisKindError, require
from promptq.worker.engine.device.expert_weights import (
    expert_weights,
    has_experts,
    join_gates,
    split_gates,
)
from promptq.worker.engine.quantization.modules import QuantizedExperts, QuantizedLinear
from promptq.worker.engine.quantization.weight import QuantizedWeight

SCORES = ("softmax", "sigmoid", "sparsemixer")
"""Names of the functions that turn logits into scores, in the order of native/src/interface.h."""
_SHARED = ("shared_expert", "shared_experts", "shared_mlp")
"""Names of shared experts."""
_PARTS = {"gate", "router", "experts", "shared_expert_gate", *_SHARED}
_LINEAR = "wg"
"""The name of a linear layer that computes a router's logits."""
_PARTS_OF_ROUTER = {"moe_statics", _LINEAR}
_BIASES = ("e_score_correction_bias", "expert_bias")
"""Names of a bias that only the choice of experts uses."""
_ADDED_SUMS = (1e-20, 1e-6)
"""Numbers that families add to the sum of shares."""
_NUM_PROBES = 32


@dataclass(frozen=True, slots=True)
class Routing:
    """How a router's logits determine a row's experts and their shares (factors of results)."""

    num_experts: int
    top_k: int
    scores: str = "softmax"
    choice_bias: torch.Tensor | None = None
    """fp32 [num_experts], added to the scores for the choice of experts, but not for the shares."""
    num_groups: int = 1
    top_groups: int = 1
    """The number of groups from which experts are chosen. A group is better if its two best scores
    have a larger sum."""
    normalizes: bool = False
    """Whether a row's shares are divided by their sum plus `added_sum`."""
    added_sum: float = _ADDED_SUMS[0]
    scale: float = 1.0
    expert_scales: torch.Tensor | None = None
    """fp32 [num_experts], factors of the shares."""
    jitter: float = 0.0
    """Only for sparsemixer: an expert is not chosen if `(best logit - logit) / max(|logit|, best
    logit)` is more than `2 * jitter`."""

    def shares(self, logits: torch.Tensor) -> torch.Tensor:
        """Returns the shares [rows, num_experts], which are 0 for experts that are not chosen."""
        if self.scores == "sparsemixer":
            return self._mixed(logits)
        scores = logits.softmax(-1) if self.scores == "softmax" else logits.sigmoid()
        ranks = scores if self.choice_bias is None else scores + self.choice_bias
        if self.top_groups < self.num_groups:
            groups = ranks.reshape(-1, self.num_groups, self.num_experts // self.num_groups)
            best = groups.topk(2).values.sum(-1).topk(self.top_groups).indices
            is_kept = torch.zeros_like(groups[..., 0], dtype=torch.bool).scatter(-1, best, True)
            ranks = groups.masked_fill(~is_kept.unsqueeze(-1), -torch.inf).flatten(-2)
        chosen = ranks.topk(self.top_k).indices
        shares = scores.gather(-1, chosen)
        if self.normalizes:
            shares = shares / (shares.sum(-1, keepdim=True) + self.added_sum)
        if self.expert_scales is not None:
            shares = shares * self.expert_scales[chosen]
        return torch.zeros_like(scores).scatter(-1, chosen, self.scale * shares)

    def _mixed(self, logits: torch.Tensor) -> torch.Tensor:
        left, shares = logits.clone(), torch.zeros_like(logits)
        for _ in range(self.top_k):
            best, index = left.max(-1, keepdim=True)
            is_far = (best - logits) / logits.abs().maximum(best) > 2 * self.jitter
            near = left.masked_fill(is_far, -torch.inf).softmax(-1)
            shares.scatter_(-1, index, near.gather(-1, index))
            left.scatter_(-1, index, -torch.inf)
        return shares


class Limits(NamedTuple):
    """The gated activation `g * sigmoid(alpha * g) * (u + 1)`. First, `g` is clamped to at most
    `limit`, and `u` to -limit up to limit. A limit of 0 means no limit."""

    alpha: float = 0.0
    limit: float = 0.0

    def gated(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        return gate * (self.alpha * gate).sigmoid() * (up + 1)


class Expert(NamedTuple):
    """The weights of one expert's MLP. Each weight is [outputs, inputs]."""

    gate: torch.Tensor | QuantizedWeight | None
    up: torch.Tensor | QuantizedWeight
    down: torch.Tensor | QuantizedWeight
    input_bias: torch.Tensor | None
    """The bias of the gate, followed by the bias of `up`."""
    down_bias: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class ExpertParts:
    """The parts of a mixture of experts. A row's result is the sum of `share * result` over the
    chosen experts, plus the result of the shared experts."""

    routing: Routing
    router: torch.Tensor
    """fp32 [num_experts, hidden size], with one more row if the shared experts have a gate."""
    router_bias: torch.Tensor | None
    """fp32, an entry for each row of `router`."""
    is_gated: bool
    activation: str
    """The activation's name in ACTIVATIONS."""
    limits: Limits
    fused: nn.Module
    """The transformers module with the weights of the experts."""
    shared: DenseMLP | None

    @classmethod
    def of(cls, mlp: Any, found: Found | None = None) -> ExpertParts:
        """Returns the parts of a layer's MLP. `found` is a cache of formulas. Raises
        NotOfThisKindError for an unknown part."""
        children = mlp.named_children()
        names = {name for name, each in children if type(each) is not nn.Identity}
        require(names <= _PARTS, f"an MLP of {sorted(names)}")
        router = mlp.gate if "gate" in names else mlp.router
        routing = _routing(mlp, router, {} if found is None else found)
        linear = getattr(router, _LINEAR, router)
        weight, bias = linear.weight.float(), getattr(linear, "bias", None)
        if gate := getattr(mlp, "shared_expert_gate", None):
            is_plain = isinstance(gate, nn.Linear) and gate.bias is None and gate.out_features == 1
            require(is_plain, "a gate of shared experts with a bias")
            is_quantized = isinstance(gate, QuantizedLinear)
            of_gate = gate.quantized.dequantized() if is_quantized else gate.weight.float()
            weight = torch.cat([weight, of_gate])
            bias = None if bias is None else torch.cat([bias, bias.new_zeros(1)])
        shared = next((getattr(mlp, name) for name in _SHARED if name in names), None)
        return replace(
            cls.routed(mlp.experts, routing, weight),
            router_bias=None if bias is None else bias.float(),
            shared=None if shared is None else DenseMLP.of(shared),
        )

    @classmethod
    def routed(cls, fused: Any, routing: Routing, router: torch.Tensor) -> ExpertParts:
        """Returns the parts of a mixture of experts. `fused` is the module with the weights of all
        experts, `router` [outputs, hidden size] the router's weight. Raises NotOfThisKindError for
        an unknown type of module."""
        plain = fused.plain if isinstance(fused, QuantizedExperts) else fused
        require(plain is not fused or has_experts(fused), f"experts of type {type(fused).__name__}")
        activation, limits = _activation(plain)
        return cls(
            routing=routing,
            router=router,
            router_bias=None,
            is_gated=plain.has_gate,
            activation=activation,
            limits=limits,
            fused=fused,
            shared=None,
        )

    @property
    def has_shared_gate(self) -> bool:
        return len(self.router) > self.routing.num_experts

    @property
    def modules(self) -> tuple[nn.Module, ...]:
        return (self.fused, *(self.shared.modules if self.shared else ()))

    def experts(self) -> Iterator[Expert]:
        """Yields all experts except the shared ones."""
        for index in range(self.routing.num_experts):
            if isinstance(self.fused, QuantizedExperts):
                gate, up, down = self.fused.quantized[index]
                yield Expert(gate, up, down, *_biases(self.fused.plain, index))
            else:
                weights = expert_weights(self.fused, index)
                yield Expert(*weights, *_biases(self.fused, index))


def _biases(fused: Any, index: int) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    if not fused.has_bias:
        return None, None
    of_inputs = torch.cat(split_gates(fused, fused.gate_up_proj_bias[index]))
    return of_inputs, fused.down_proj_bias[index]


def _routing(mlp: Any, router: Any, found: Found) -> Routing:
    """Returns the routing of a router. Raises NotOfThisKindError if no known formula fits."""
    names = {name for name, _ in router.named_children()}
    linear = getattr(router, _LINEAR, router)
    is_known = hasattr(router, "top_k") and hasattr(linear, "weight") and names <= _PARTS_OF_ROUTER
    require(is_known, f"a router of type {type(router).__name__}")
    num_experts = len(linear.weight)
    owners = [mlp, router, getattr(router, "moe_statics", router)]
    bias = next((each for each in map(_choice_bias, owners) if each is not None), None)
    routing = Routing(
        num_experts=num_experts,
        top_k=router.top_k,
        num_groups=getattr(router, "num_group", None) or 1,
        top_groups=getattr(router, "topk_group", None) or 1,
        jitter=getattr(router, "router_jitter_noise", 0.0),
    )
    in_group = num_experts // routing.num_groups
    require(
        1 <= routing.top_k <= routing.top_groups * in_group <= num_experts,
        f"{routing.top_k} active experts of {num_experts}",
    )
    fields = vars(router).items()
    settings = tuple((name, each) for name, each in fields if isinstance(each, int | float | str))
    key = type(router), linear.weight.shape, bias is None, settings
    if key not in found:
        found[key] = _formula(routing, mlp, router)
    if (formula := found[key]) is None:
        raise NotOfThisKindError("it has a router with an unknown formula")
    known: Routing = formula
    return known if bias is None else replace(known, choice_bias=bias.float().flatten())


def _choice_bias(module: Any) -> torch.Tensor | None:
    return next((getattr(module, name) for name in _BIASES if hasattr(module, name)), None)


def _formula(routing: Routing, mlp: Any, router: Any) -> Routing | None:
    """Returns the routing that reproduces the router's results on random inputs, but without the
    `choice_bias`. Returns None if no formula fits."""
    generator = torch.Generator("cpu").manual_seed(0)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device="cpu")

    given = {
        name: drawn(*each.shape) * (0.1 if each.numel() == routing.num_experts else 1.0)
        for name, each in chain(router.named_parameters(), router.named_buffers())
    }
    prefix = f"{_LINEAR}." if hasattr(router, _LINEAR) else ""
    weight, logit_bias = given[f"{prefix}weight"], given.get(f"{prefix}bias")
    probes = 3.0 * drawn(_NUM_PROBES, weight.shape[1]) / weight.shape[1] ** 0.5
    # All logits of a row are shifted alike, because a softcap shows only in large logits. Sigmoids
    # of large positive logits are all 1, so a choice among these would be arbitrary.
    weight[:, 0], probes[:, 0] = 1.0, torch.linspace(-30.0, 5.0, _NUM_PROBES, device="cpu")
    biases = [each for name, each in given.items() if name.endswith(_BIASES)]
    arguments = []
    if _choice_bias(mlp) is not None:
        biases = arguments = [0.1 * drawn(routing.num_experts)]
    try:
        _, shares, chosen = functional_call(router, given, (probes, *arguments))
    except Exception:  # the module may take and return anything
        return None
    logits = nn.functional.linear(probes, weight, logit_bias)
    wanted = torch.zeros_like(logits).scatter(-1, chosen, shares.float())
    for scores, normalizes, added in product(SCORES, (False, True), _ADDED_SUMS):
        tried = replace(routing, scores=scores, normalizes=normalizes, added_sum=added)
        bias = biases[0].flatten() if biases else None
        found = replace(tried, choice_bias=bias).shares(logits)
        scale = float((found * wanted).sum() / found.square().sum())
        if torch.allclose(scale * found, wanted, rtol=1e-3, atol=1e-5):
            return replace(tried, scale=1.0 if abs(scale - 1) < 1e-6 else scale)
    return None


def _activation(fused: Any) -> tuple[str, Limits]:
    """Returns the activation and limits that reproduce the results of transformers' experts."""
    if not fused.has_gate:
        return activation_of(fused.act_fn), Limits()
    generator = torch.Generator("cpu").manual_seed(0)
    gate, up = 10 * torch.randn(2, _NUM_PROBES, 8, generator=generator, device="cpu")
    expected = fused._apply_gate(join_gates(fused, gate, up))
    for name, activation in ACTIVATIONS.items():
        if torch.allclose(activation(gate) * up, expected, rtol=1e-4, atol=1e-5):
            return name, Limits()
    if hasattr(fused, "alpha") and hasattr(fused, "limit"):
        limits = Limits(fused.alpha, fused.limit)
        if torch.allclose(limits.gated(gate, up), expected, rtol=1e-4, atol=1e-5):
            return "silu", limits
    raise NotOfThisKindError("it has experts with an unknown activation")

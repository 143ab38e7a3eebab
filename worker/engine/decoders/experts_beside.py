"""Finds the parts of the experts in a layer that also has a dense MLP (the larger Gemma 4).

    results = after_mlp(mlp) + after(experts(before(hidden)))

A router chooses the experts by `before_router(hidden)`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from promptq.worker.engine.decoders.expert_parts import ExpertParts, Routing
from promptq.worker.engine.decoders.named_parts import linears_of, parts_of
from promptq.worker.engine.decoders.norm_parts import Found, Norm, require

_BEFORE, _AFTER = "pre_feedforward_layernorm_2", "post_feedforward_layernorm_2"
_AFTER_MLP = "post_feedforward_layernorm_1"
PARTS_BESIDE = frozenset({"router", "experts", _BEFORE, _AFTER, _AFTER_MLP})


@dataclass(frozen=True, slots=True)
class ExpertsBeside:
    """The experts of a layer that also has a dense MLP, and their norms."""

    experts: ExpertParts
    before_router: Norm
    before: Norm
    after: Norm
    after_mlp: Norm

    @classmethod
    def of(cls, parts: dict[str, Any], found: Found) -> ExpertsBeside:
        """Returns the experts among `parts`, a layer's parts by name. `found` is a cache of
        formulas. Raises NotOfThisKindError if a part is unknown."""
        router = parts["router"]
        of_router = parts_of(router)
        is_known = of_router.keys() == {"norm", "proj", "scale", "per_expert_scale"}
        require(is_known, f"a router of {sorted(of_router)}")
        linear = linears_of(of_router, ("proj",))[0]
        require(linear.bias is None, "a router with a bias")
        norm = Norm.of(router.norm, found, linear.in_features)
        routing = Routing(
            num_experts=linear.out_features,
            top_k=router.config.top_k_experts,
            normalizes=True,
            expert_scales=router.per_expert_scale.float(),
        )
        return cls(
            experts=ExpertParts.routed(parts["experts"], routing, linear.weight.float()),
            before_router=replace(norm, weight=router.scale.float() * router.scalar_root_size),
            before=Norm.of(parts[_BEFORE], found),
            after=Norm.of(parts[_AFTER], found),
            after_mlp=Norm.of(parts[_AFTER_MLP], found),
        )

"""Replaces classes that need pydantic, on a machine that has only PyTorch and transformers.

The engine expects checked requests and does not check them again, so plain classes suffice. The
plain classes have the fields that the engine reads, with values that request no feature.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from enum import StrEnum
from importlib.util import find_spec
from types import ModuleType
from typing import Any


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    EXPIRED = "expired"
    ERROR = "error"


@dataclass
class SamplingParams:
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Any = None
    bad_words: Any = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    response_format: Any = None
    speculative_tokens: int | None = None

    @property
    def has_penalties(self) -> bool:
        penalties = (self.repetition_penalty, self.presence_penalty, self.frequency_penalty)
        return penalties != (1.0, 0.0, 0.0)

    @classmethod
    def model_validate(cls, fields: dict[str, Any]) -> SamplingParams:
        return cls(**fields)


@dataclass
class TopLogprob:
    token_id: int
    logprob: float


@dataclass
class TokenLogprob:
    token_id: int
    logprob: float
    rank: int
    top: list[TopLogprob] | None


def stand_in() -> None:
    """Put this module's classes in place of the real classes, if the real ones cannot be
    imported."""
    if find_spec("pydantic") is not None:
        return
    stand_ins = {
        "promptq.shared.protocol.request": (FinishReason, SamplingParams),
        "promptq.shared.protocol.events": (TopLogprob, TokenLogprob),
    }
    for name, classes in stand_ins.items():
        module = sys.modules[name] = ModuleType(name)
        for each in classes:
            setattr(module, each.__name__, each)
    names = {"NEUTRAL": SamplingParams(), "Pooling": str}
    sys.modules["promptq.shared.protocol.request"].__dict__.update(names)

"""Makes the requests of a run: for each queue, from a seed."""

from __future__ import annotations

import random
from typing import Any

from promptq.shared.queue.request_queue import new_request_id
from tests.programs.chaos.audit.records import Kind, Queue, Sent
from tests.programs.chaos.processes.chaotic_worker import POISON

_KINDS = {
    Kind.PLAIN: 70,
    Kind.CANCEL: 10,
    Kind.DEADLINE: 10,
    Kind.DELAY: 5,
    Kind.TWICE: 5,
}
MOST_UPSTREAM_TOKENS = 300
_MOST_TOKENS = {Queue.VOLUME: 120, Queue.POISON: 40, Queue.FIRST: 6000, Queue.SECOND: 6000}
_LETTERS = "abcdefghijklmnopqrstuvwxyz "
_SESSIONS = "abcdef"
"""Names of conversations. Claims prefer the worker that ran an earlier request of one."""

_TEXT = {"type": "string", "minLength": 20, "maxLength": 60}
HERO = {
    "type": "object",
    "properties": {
        "name": {"enum": ["fox", "hare", "owl"]},
        "story": _TEXT,
        "friends": {"type": "array", "items": _TEXT, "minItems": 2, "maxItems": 2},
        "age": {"type": "integer", "minimum": 1, "maximum": 99},
    },
    "required": ["name", "story", "friends", "age"],
    "additionalProperties": False,
}
_TOOLS = [{"type": "function", "function": {"name": "add_hero", "parameters": HERO}}]


def _in_each_form(prompt: str) -> dict[str, dict[str, Any]]:
    form = {"type": "json_schema", "json_schema": {"name": "hero", "schema": HERO}}
    messages = [{"role": "user", "content": prompt}]
    return {
        prompt: {"prompt": prompt},
        f"{prompt}, by a schema": {"prompt": prompt, "response_format": form},
        f"{prompt}, as a call": {"messages": messages, "tools": _TOOLS, "tool_choice": "required"},
    }


UPSTREAM_REQUESTS = {
    name: fields
    for number in range(50)
    for name, fields in _in_each_form(f"Once upon a time, there were {number} foxes").items()
}
"""Requests to inference servers by name, without their number of tokens."""

TEMPLATES: dict[str, dict[str, Any]] = {
    "greedy": {"prompt": "Once upon a time", "temperature": 0.0, "max_tokens": 400},
    "long": {"prompt": "The old man", "temperature": 0.0, "max_tokens": 900, "ignore_eos": True},
    "seeded": {
        "prompt": "A little girl",
        "seed": 11,
        "max_tokens": 600,
        "ignore_eos": True,
        "logprobs": 0,
    },
    "narrow": {
        "prompt": "In the garden",
        "seed": 12,
        "max_tokens": 500,
        "ignore_eos": True,
        "temperature": 0.8,
        "top_p": 0.9,
        "top_k": 20,
        "min_p": 0.02,
    },
    "penalties": {
        "prompt": "The dog and the cat",
        "seed": 13,
        "max_tokens": 500,
        "ignore_eos": True,
        "repetition_penalty": 1.2,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.3,
    },
    "logprobs": {
        "prompt": "One day",
        "seed": 14,
        "max_tokens": 300,
        "ignore_eos": True,
        "logprobs": 2,
    },
    "least": {"prompt": "Once", "seed": 15, "max_tokens": 600, "min_tokens": 300},
    "stop": {"prompt": "Tom", "seed": 16, "max_tokens": 600, "stop": ["the sun", " blue"]},
    "words": {
        "prompt": "She said",
        "seed": 17,
        "max_tokens": 500,
        "ignore_eos": True,
        "bad_words": ["the"],
        "logit_bias": {"300": 2.0, "301": -5.0},
    },
}
"""Requests to the shipped model. Equal requests get equal answers."""


def make_request(queue: Queue, rng: random.Random, poison_share: float = 0.04) -> Sent:
    """Returns the next request for a queue. The caller still has to send it."""
    kinds = list(_KINDS)
    kind = rng.choices(kinds, [_KINDS[it] for it in kinds])[0]
    if queue is Queue.POISON:
        kind = Kind.POISON if rng.random() < poison_share else Kind.PLAIN
    if queue is Queue.REAL:
        template = rng.choice(list(TEMPLATES))
        fields = dict(TEMPLATES[template])
    elif queue is Queue.UPSTREAM:
        name, count = rng.choice(list(UPSTREAM_REQUESTS)), rng.randint(1, MOST_UPSTREAM_TOKENS)
        template = f"{name}, {count} tokens"
        fields = {**UPSTREAM_REQUESTS[name], "max_tokens": count, "temperature": 0.0}
        fields["resume"] = "exact_only"
    else:
        template = ""
        fields = _model_free_fields(queue, kind, rng)
    request = Sent(new_request_id(), queue, kind, fields, template)
    if kind is Kind.DEADLINE:
        fields["deadline_ms"] = rng.randint(50, 3000)
    if kind is Kind.DELAY:
        request.delay_ms = rng.randint(50, 2000)
    if kind is Kind.TWICE:
        fields["idempotency_key"] = f"key-{request.request_id}"
    return request


def _model_free_fields(queue: Queue, kind: Kind, rng: random.Random) -> dict[str, Any]:
    prompt = "".join(rng.choices(_LETTERS, k=rng.randint(1, 60)))
    fields: dict[str, Any] = {
        "prompt": prompt,
        "seed": rng.randrange(2**40),
        "max_tokens": rng.randint(1, _MOST_TOKENS[queue]),
    }
    if kind is Kind.POISON:
        return {**fields, "prompt": chr(POISON) + prompt, "max_tokens": 700}
    if rng.random() < 0.2:
        fields["stop"] = "".join(rng.choices(_LETTERS, k=2))
    if rng.random() < 0.2:
        fields["priority"] = rng.randint(-2, 2)
    if rng.random() < 0.2:
        fields["logprobs"] = rng.randint(0, 3)
    if rng.random() < 0.4:
        fields["session"] = rng.choice(_SESSIONS)
    if rng.random() < 0.4:
        fields["expected_tokens"] = rng.randint(0, _MOST_TOKENS[queue])
    return fields

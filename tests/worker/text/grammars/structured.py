"""Schemas, engines and claims for tests of structured output."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from promptq.shared.protocol.claims import Claim, ModelIdentity
from promptq.shared.protocol.events import TokenEvent
from promptq.shared.protocol.request import FinishReason
from promptq.worker.engine.api.messages import SequenceOutput
from promptq.worker.engine.core.llm_engine import LLMEngine
from promptq.worker.engine.model.loading import LoadOptions
from promptq.worker.engine.runner.load_runner import load_runner
from promptq.worker.leases.prepare_or_resume import Preparation
from promptq.worker.leases.rows import PreparedRequest
from promptq.worker.serve.build import Served
from promptq.worker.shipped import MODEL_DIR
from promptq.worker.text.grammars.schema_masks import Grammars, LLMasker
from promptq.worker.text.tokenizer import HuggingFaceTokenizer
from tests.worker.engine.tiny_models import save_model


def closed(**properties: Any) -> dict[str, Any]:
    """An object with just these, all required."""
    return {
        "type": "object",
        "properties": properties,
        "required": [*properties],
        "additionalProperties": False,
    }


def assert_valid(value: Any, schema: Any) -> None:
    """Asserts that the value matches the JSON schema."""
    assert [*jsonschema.Draft202012Validator(schema).iter_errors(value)] == []


# Bounded, since a model with random weights never ends a string by itself.
TEXT = {"type": "string", "maxLength": 8}
SCHEMAS: dict[str, dict[str, Any]] = {
    "enum": closed(kind={"enum": ["cat", "dog", "ca", 7, None, 'a\nb "ü"']}),
    "nested": closed(a=closed(b=closed(c=TEXT), d={"type": "boolean"}), e={"const": {"f": []}}),
    "array": {
        "type": "array",
        "items": {"type": "integer", "minimum": -20, "maximum": 1200},
        "minItems": 2,
        "maxItems": 5,
    },
    "number": closed(
        x={"type": "number", "minimum": 0, "maximum": 1},
        y={"type": "integer", "minimum": 990, "maximum": 1e9},
    ),
    "pattern": closed(id={"type": "string", "pattern": "^[a-z]{2,4}-[0-9]{3}$"}),
    "anyOf": {"anyOf": [closed(a=TEXT), {"type": "null"}, {"type": "array", "maxItems": 0}]},
    "ref": {
        "$defs": {
            "node": closed(
                v={"type": "boolean"}, next={"anyOf": [{"type": "null"}, {"$ref": "#/$defs/node"}]}
            )
        },
        "$ref": "#/$defs/node",
    },
    "optional": {
        "type": "object",
        "properties": {"a": TEXT, "b": {"type": "boolean"}},
        "additionalProperties": False,
    },
}
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "parameters": {
                **closed(city={"$ref": "#/$defs/city"}, days={"enum": [1, 2, 3]}),
                "$defs": {"city": {"enum": ["Paris", "São Paulo"]}},
            },
        },
    },
    {"type": "function", "function": {"name": "stop_all"}},
]


def json_schema(schema: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "test", "schema": schema, **more}}


def served_with_random_weights(directory: Path, **engine: Any) -> Served:
    """A random model under the shipped tokenizer, with a few more tokens than that has."""
    save_model(
        directory, "llama", 3, vocab_size=2055, max_position_embeddings=512, initializer_range=0.02
    )
    return served(str(directory), **engine)


def served(directory: str = str(MODEL_DIR), kv_cache_memory: int = 2**26, **engine: Any) -> Served:
    runner = load_runner(
        directory, LoadOptions(device="cpu", dtype="float32", kv_cache_memory=kv_cache_memory)
    )
    tokenizer = HuggingFaceTokenizer.load(str(MODEL_DIR))
    ends = frozenset({0, 2})
    options = {"max_num_seqs": 64, "max_num_batched_tokens": 256, **engine}
    return Served(
        engine=LLMEngine(runner, **options),
        tokenizer=tokenizer,
        identity=ModelIdentity("structured", "structured"),
        end_token_ids=ends,
        device="cpu",
        dtype="float32",
        grammars=Grammars(tokenizer, runner.vocab_size, ends),
    )


def prepare(
    served: Served, *, seed: int = 0, emitted: list[int] | None = None, **fields: Any
) -> PreparedRequest:
    """Prepares a claimed request as a worker does. `emitted` has an earlier attempt's tokens."""
    if "messages" not in fields:
        fields.setdefault("prompt", "Once upon a time")
    claim = Claim(
        request_id="r",
        payload=json.dumps(fields | {"seed": seed}).encode(),
        fence="1-x",
        attempt=1,
        score=0.0,
        seed=seed,
        enqueued_at_ms=0,
        claimed_at_ms=0,
        prompt_tokens=None,
        cost=0,
        events=[TokenEvent(index=0, token_ids=emitted, text="")] if emitted else [],
    )
    return Preparation(
        served.tokenizer,
        served.engine,
        served.identity,
        served.end_token_ids,
        served.grammars,
    ).prepare(claim)


def run(served: Served, *held: PreparedRequest) -> list[SequenceOutput]:
    """All that each sequence gave, in one output, once all have ended."""
    whole: dict[int, SequenceOutput] = {}
    for each in held:
        served.engine.add(each.engine_request)
        whole[each.sequence_id] = SequenceOutput(each.sequence_id, [], logprobs=[])
    while served.engine.has_work:
        for output in served.engine.step().outputs:
            so_far = whole[output.sequence_id]
            so_far.token_ids += output.token_ids
            so_far.logprobs = (so_far.logprobs or []) + (output.logprobs or [])
            so_far.finish_reason, so_far.error = output.finish_reason, output.error
    served.engine.check_integrity()
    return [whole[each.sequence_id] for each in held]


def text_of(served: Served, output: SequenceOutput) -> str:
    """The text of an output that ended by itself."""
    assert (output.finish_reason, output.error) == (FinishReason.STOP, None)
    return served.tokenizer.decode(output.token_ids)


def compilations(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The text of each grammar that is compiled from now on."""
    compiled: list[str] = []
    compile_one = LLMasker.compile

    def noting(masker: LLMasker, text: str) -> Any:
        compiled.append(text)
        return compile_one(masker, text)

    monkeypatch.setattr(LLMasker, "compile", noting)
    return compiled

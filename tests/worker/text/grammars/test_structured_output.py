"""Outputs match what requests ask for, whatever the model would rather say."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
import torch

from promptq.shared.protocol.request import FinishReason
from promptq.worker.engine.core.sequence import Sequence
from promptq.worker.engine.sampling.mask_thread import Masks
from promptq.worker.serve.build import Served
from tests.worker.text.grammars.structured import (
    SCHEMAS,
    TOOLS,
    closed,
    json_schema,
    prepare,
    run,
    served,
    served_with_random_weights,
    text_of,
)

SEEDS = range(6)


@pytest.fixture(scope="module", params=["random weights", "shipped"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Served:
    if request.param == "shipped":
        return served()
    return served_with_random_weights(tmp_path_factory.mktemp("random"))


@pytest.fixture(scope="module")
def random_model(tmp_path_factory: pytest.TempPathFactory) -> Served:
    return served_with_random_weights(tmp_path_factory.mktemp("random"))


@pytest.mark.parametrize("temperature", [0.0, 1.0, 2.0])
def test_all_outputs_match_their_schemas(model: Served, temperature: float) -> None:
    wanted = [(seed, name) for seed in SEEDS for name in SCHEMAS]
    outputs = run(
        model,
        *(
            prepare(
                model,
                seed=seed,
                prompt=f"{name} {seed}",
                temperature=temperature,
                top_p=0.9 if seed % 2 else 1.0,
                response_format=json_schema(SCHEMAS[name]),
            )
            for seed, name in wanted
        ),
    )
    texts: dict[str, set[str]] = {}
    for (_, name), output in zip(wanted, outputs, strict=True):
        text = text_of(model, output)
        jsonschema.validate(json.loads(text), SCHEMAS[name])
        texts.setdefault(name, set()).add(text)
    if temperature > 1.0:
        assert all(len(different) > 1 for different in texts.values())


@pytest.mark.parametrize("seed", SEEDS)
def test_json_object_is_an_object(model: Served, seed: int) -> None:
    held = prepare(
        model,
        seed=seed,
        response_format={"type": "json_object"},
        logit_bias={str(token): 12.0 for token in model.tokenizer.encode_words(['"}'])[0]},
    )
    (output,) = run(model, held)
    assert isinstance(json.loads(text_of(model, output)), dict)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_required_tool_is_called_with_arguments_that_match(model: Served, seed: int) -> None:
    chat = [{"role": "user", "content": "What will the weather be?"}]
    named = {"type": "function", "function": {"name": "stop_all"}}
    some, other = run(
        model,
        prepare(model, seed=seed, messages=chat, tools=TOOLS, tool_choice="required"),
        prepare(model, seed=seed, messages=chat, tools=TOOLS, tool_choice=named),
    )
    call = json.loads(text_of(model, some))
    assert list(call) == ["name", "arguments"]
    functions = {tool["function"]["name"]: tool["function"] for tool in TOOLS}
    schema = functions[call["name"]].get("parameters", closed())
    jsonschema.validate(call["arguments"], schema)
    assert json.loads(text_of(model, other)) == {"name": "stop_all", "arguments": {}}


def test_rows_without_a_grammar_get_the_tokens_they_get_alone(model: Served) -> None:
    def plain(n: int) -> Any:
        more = {"logprobs": 2} if n == 1 else {"repetition_penalty": 1.2} if n == 2 else {}
        return prepare(model, seed=n, temperature=float(n % 2), max_tokens=20 + n, **more)

    alone = [run(model, plain(n))[0].token_ids for n in range(4)]
    grammars = [
        prepare(model, seed=n, response_format=json_schema(schema))
        for n, schema in enumerate(SCHEMAS.values())
    ]
    mixed = [each for n in range(4) for each in (*grammars[2 * n : 2 * n + 2], plain(n))]
    outputs = run(model, *mixed)
    assert [outputs[3 * n + 2].token_ids for n in range(4)] == alone


@pytest.mark.matrix(2)
@pytest.mark.parametrize("name", ["nested", "ref", "pattern", "array"])
def test_a_resumed_output_goes_on_as_it_would_have(model: Served, name: str) -> None:
    fields: dict[str, Any] = {"seed": 4, "response_format": json_schema(SCHEMAS[name])}
    (whole,) = run(model, prepare(model, **fields))
    assert len(whole.token_ids) > 4
    for cut in range(1, len(whole.token_ids)):
        resumed = prepare(model, emitted=whole.token_ids[:cut], **fields)
        assert not resumed.is_at_end
        (rest,) = run(model, resumed)
        assert rest.token_ids == whole.token_ids[cut:]
    if whole.token_ids[-1] not in model.end_token_ids:
        complete = prepare(model, emitted=whole.token_ids, **fields)
        assert complete.is_at_end
        assert complete.is_stopped


def test_what_may_go_on_ends_with_an_end_token(model: Served) -> None:
    bias = {str(end): 30.0 for end in model.end_token_ids}
    schema = json_schema({"type": "integer", "minimum": 0})
    (output,) = run(model, prepare(model, response_format=schema, logit_bias=bias))
    *digits, end = output.token_ids
    assert int(model.tokenizer.decode(digits)) >= 0
    assert end in model.end_token_ids


def test_min_tokens_holds_back_the_end_but_not_what_is_complete(random_model: Served) -> None:
    bias = {str(end): 30.0 for end in random_model.end_token_ids}
    integer = {"type": "integer", "minimum": 0}
    fields = {"min_tokens": 5, "logit_bias": bias}
    going_on, complete = run(
        random_model,
        prepare(random_model, response_format=json_schema(integer), **fields),
        prepare(random_model, response_format=json_schema({"const": 1}), **fields),
    )
    assert len(going_on.token_ids) == 6
    assert going_on.token_ids[-1] in random_model.end_token_ids
    assert text_of(random_model, complete) == "1"


def test_without_end_tokens_only_completion_ends(random_model: Served) -> None:
    bias = {str(end): 30.0 for end in random_model.end_token_ids}
    fields = {"ignore_eos": True, "logit_bias": bias, "max_tokens": 12}
    going_on, complete = run(
        random_model,
        prepare(random_model, response_format=json_schema({"type": "integer"}), **fields),
        prepare(random_model, response_format=json_schema({"enum": ["yes", "no"]}), **fields),
    )
    assert going_on.finish_reason is FinishReason.LENGTH
    assert not set(going_on.token_ids) & random_model.end_token_ids
    assert json.loads(text_of(random_model, complete)) in ("yes", "no")


def test_own_stop_tokens_end_only_what_may_end(random_model: Served) -> None:
    (stop,) = random_model.tokenizer.encode_words(["s"])[0]
    fields = {"stop_token_ids": [stop], "ignore_eos": True, "logit_bias": {str(stop): 50.0}}
    schemas: list[dict[str, Any]] = [{"type": "integer", "minimum": 10}, {"const": "sss"}]
    number, text = run(
        random_model,
        *(prepare(random_model, response_format=json_schema(each), **fields) for each in schemas),
    )
    assert number.token_ids[-1] == stop
    assert int(random_model.tokenizer.decode(number.token_ids[:-1])) >= 10
    # Its letters can be had as no other token, and as an end it comes too early.
    assert text.finish_reason is FinishReason.ERROR
    assert "no token can be chosen" in (text.error or "")


def test_what_is_banned_stays_banned(model: Served) -> None:
    held = prepare(
        model,
        temperature=2.0,
        response_format=json_schema({"enum": ["cat", "dog"]}),
        bad_words=["c", "ca", "cat", '"c', '"ca', '"cat'],
    )
    assert json.loads(text_of(model, run(model, held)[0])) == "dog"


def test_logprobs_are_the_models_own(model: Served) -> None:
    reports = {"logprobs": 3, "temperature": 0.0, "max_tokens": 4}
    schema = json_schema({"type": "array", "minItems": 3, "items": {"type": "null"}})
    free, bound = run(
        model, prepare(model, **reports), prepare(model, response_format=schema, **reports)
    )
    assert free.logprobs is not None
    assert bound.logprobs is not None
    assert bound.token_ids[0] != free.token_ids[0]
    first, other = bound.logprobs[0], free.logprobs[0]
    assert first.top is not None
    assert other.top is not None
    assert [top.token_id for top in first.top] == [top.token_id for top in other.top]
    assert all(
        math.isclose(one.logprob, two.logprob, abs_tol=1e-4)
        for one, two in zip(first.top, other.top, strict=True)
    )
    assert first.rank > 1


def test_max_tokens_may_cut_it_short(model: Served) -> None:
    schema = json_schema(SCHEMAS["nested"])
    (output,) = run(model, prepare(model, response_format=schema, max_tokens=3))
    assert (output.finish_reason, len(output.token_ids)) == (FinishReason.LENGTH, 3)


def test_one_grammar_that_fails_fails_alone(random_model: Served) -> None:
    held = [
        prepare(random_model, seed=n, response_format=json_schema(SCHEMAS["array"]))
        for n in range(3)
    ]
    grammar: Any = held[1].engine_request.grammar
    grammar.matcher.consume_token(5)  # what no sampler that heeds the masks would give
    outputs = run(random_model, *held)
    assert outputs[1].finish_reason is FinishReason.ERROR
    assert "doesn't satisfy the grammar" in (outputs[1].error or "")
    for output in (outputs[0], outputs[2]):
        jsonschema.validate(json.loads(text_of(random_model, output)), SCHEMAS["array"])


def test_masks_that_found_no_memory_are_there_the_next_time(
    random_model: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = [prepare(random_model, response_format=json_schema(SCHEMAS[n])) for n in SCHEMAS]
    sequences = [Sequence.of(each.engine_request) for each in held]
    cpu, make = torch.device("cpu"), np.empty

    def computed(masks: Masks, sequences: list[Sequence]) -> torch.Tensor:
        pending = masks.start(sequences)
        assert pending is not None
        return pending.words.result()[0].clone()

    def short(shape: tuple[int, ...], **options: Any) -> Any:
        if len(shape) == 3:
            raise MemoryError("so short")
        return make(shape, **options)

    masks = Masks(cpu)
    computed(masks, sequences[:1])
    with monkeypatch.context() as scarce:
        scarce.setattr(np, "empty", short)
        with pytest.raises(MemoryError):
            computed(masks, sequences)
    assert torch.equal(computed(masks, sequences), computed(Masks(cpu), sequences))


def test_preemption_keeps_the_grammar(tmp_path: Path) -> None:
    bytes_per_token = served_with_random_weights(tmp_path).engine.limits.bytes_per_token
    # Two blocks for each of eight sequences, which need more of them.
    tight = served(str(tmp_path), kv_cache_memory=8 * 32 * bytes_per_token)
    schema = {"type": "array", "items": SCHEMAS["pattern"], "minItems": 5, "maxItems": 5}
    outputs = run(
        tight,
        *(prepare(tight, seed=n, response_format=json_schema(schema)) for n in range(8)),
    )
    assert tight.engine.stats.num_preemptions > 0
    for output in outputs:
        jsonschema.validate(json.loads(text_of(tight, output)), schema)

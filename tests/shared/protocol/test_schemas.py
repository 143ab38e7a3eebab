"""Payloads are refused by the field that is wrong; events keep their public form."""

from __future__ import annotations

import gc
import json
import math
import re
import sys

import pytest
from pydantic.fields import FieldInfo

from promptq.shared.errors import InvalidRequestError
from promptq.shared.protocol.events import (
    ErrorInfo,
    Result,
    Stats,
    TokenEvent,
    TokenLogprob,
    TopLogprob,
    Usage,
)
from promptq.shared.protocol.request import MAX_PAYLOAD_BYTES, FinishReason, Request, RequestState
from tests.support.paths import ROOT


@pytest.mark.parametrize(
    ("payload", "field"),
    [
        ("{", "payload"),
        ("[]", "payload"),
        ("null", "payload"),
        ("{}", "prompt"),
        ('{"prompt": "a", "messages": [{"role": "user"}]}', "prompt"),
        ('{"prompt": []}', "prompt"),
        ('{"prompt": "", "embed": {}}', "prompt"),
        ('{"prompt": [-1]}', "prompt"),
        ('{"prompt": [1.5]}', "prompt"),
        ('{"prompt": 5}', "prompt"),
        ('{"messages": []}', "messages"),
        ('{"prompt": "a", "tools": [{}]}', "tools"),
        ('{"prompt": "a", "unknown_field": 1}', "unknown_field"),
        ('{"prompt": "a", "max_tokens": "5"}', "max_tokens"),
        ('{"prompt": "a", "max_tokens": true}', "max_tokens"),
        ('{"prompt": "a", "max_tokens": 0}', "max_tokens"),
        ('{"prompt": "a", "min_tokens": 3, "max_tokens": 2}', "min_tokens"),
        ('{"prompt": "a", "temperature": -0.1}', "temperature"),
        ('{"prompt": "a", "temperature": NaN}', "temperature"),
        ('{"prompt": "a", "top_p": 0}', "top_p"),
        ('{"prompt": "a", "top_k": -2}', "top_k"),
        ('{"prompt": "a", "logprobs": 21}', "logprobs"),
        ('{"prompt": "a", "priority": 1001}', "priority"),
        ('{"prompt": "a", "stop": ""}', "stop"),
        ('{"prompt": "a", "stop": ["x", ""]}', "stop"),
        ('{"prompt": "a", "logit_bias": {"one": 1}}', "logit_bias"),
        ('{"prompt": "a", "logit_bias": {"1": 101}}', "logit_bias"),
        ('{"prompt": "a", "seed": -1}', "seed"),
        ('{"prompt": "a", "webhook_url": "ftp://x"}', "webhook_url"),
        ('{"prompt": "a", "tenant": "a b"}', "tenant"),
        ('{"prompt": "' + "x" * MAX_PAYLOAD_BYTES + '"}', "payload"),
    ],
)
def test_a_wrong_payload_is_refused_by_the_name_of_its_field(payload: str, field: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        Request.parse(payload)
    assert caught.value.field == field
    assert str(caught.value).startswith(f"{field}: ")
    assert len(str(caught.value)) < 300
    assert "\n" not in str(caught.value)
    assert "pattern" not in str(caught.value)


def documented() -> dict[str, tuple[str, str]]:
    """Of each payload field: type and range, and the default, as docs/protocol.md has them."""
    page = (ROOT / "docs" / "protocol.md").read_text()
    section = page.split("\n## Payload\n")[1].split("\n## ")[0]
    rows = [line.strip("|").split("|") for line in section.splitlines() if line.startswith("| `")]
    return {
        name: (kind.strip(), default.strip())
        for names, kind, default, _ in rows
        for name in re.findall("`(.*?)`", names)
    }


def test_the_page_of_the_protocol_has_every_field_with_its_default_and_range() -> None:
    page = documented()
    assert page.keys() == Request.model_fields.keys()
    for name, field in Request.model_fields.items():
        kind, default = page[name]
        is_input = name in ("prompt", "messages")
        value = field.default
        words = f"{value:g}" if isinstance(value, float) else json.dumps(value)
        assert default == ("" if is_input else words), name
        whole = rf"(?<![-\d]){re.escape(in_words(field))}(?![-\d^])"
        assert re.search(whole, kind), name


def in_words(field: FieldInfo) -> str:
    """The range of a field as the page says it; empty where the schema has none."""
    bounds: dict[str, int | float] = {
        name: getattr(each, name)
        for each in field.metadata
        for name in ("ge", "gt", "le", "lt", "max_length")
        if hasattr(each, name)
    }
    match {name: short(value) for name, value in bounds.items()}:
        case {"max_length": _}:
            return f"≤ {bounds['max_length']:,}"
        case {"gt": above, "le": most}:
            return f"above {above}, up to {most}"
        case {"ge": least, "le": most}:
            return f"{least} to {most}"
        case {"ge": least, "lt": most}:
            return f"{least} to {most}-1"
        case {"ge": least}:
            return f"≥ {least}"
        case _:
            return ""


def short(number: float) -> str:
    power = round(math.log2(number)) if number > 2**40 else 0
    return f"2^{power}" if power else f"{number:g}"


def test_the_error_for_a_misspelt_field_suggests_the_right_one() -> None:
    with pytest.raises(InvalidRequestError, match=r"^max_token: .*; do you mean max_tokens\?$"):
        Request.parse('{"prompt": "a", "max_token": 1}')
    with pytest.raises(InvalidRequestError, match=r"^x+: is not a field of a request$") as caught:
        Request.build({"prompt": "a", "x" * 1_000_000: 1})
    assert len(str(caught.value)) < 300


def test_a_payload_keeps_what_was_set_and_leaves_out_defaults() -> None:
    fields = {"prompt": [1, 2], "temperature": 0, "stop": ["a"], "metadata": {"n": [1, None]}}
    payload = Request.build(fields).to_payload()
    assert json.loads(payload) == fields
    assert Request.parse(payload) == Request.build(fields)


def test_nothing_is_kept_of_a_payload_that_was_read() -> None:
    Request.parse('{"prompt": "the first"}')
    gc.collect()
    before = sys.getallocatedblocks()
    for number in range(5_000):
        Request.parse(f'{{"prompt": "number {number}", "stop": "stop {number}"}}')
    gc.collect()
    assert sys.getallocatedblocks() - before < 1_000


def test_stop_may_be_one_text_or_several() -> None:
    assert Request.build({"prompt": "a", "stop": "x"}).stop_strings == ["x"]
    assert Request.build({"prompt": "a", "stop": ["x", "y"]}).stop_strings == ["x", "y"]
    assert Request.build({"prompt": "a"}).stop_strings == []


def test_an_event_has_the_public_form() -> None:
    event = TokenEvent(index=5, token_ids=[318], text=" ís 🦊", attempt=1)
    assert event.to_json() == (
        '{"index":5,"token_ids":[318],"text":" ís 🦊","logprobs":null,'
        '"finish_reason":null,"attempt":1}'
    )
    assert event.end == 6


def test_a_last_event_survives_the_way_there_and_back() -> None:
    event = TokenEvent(
        index=0,
        token_ids=[1],
        text="a",
        logprobs=[
            TokenLogprob(
                token_id=1, logprob=-0.5, rank=1, top=[TopLogprob(token_id=1, logprob=-0.5)]
            )
        ],
        finish_reason=FinishReason.ERROR,
        attempt=2,
        usage=Usage(prompt_tokens=3, completion_tokens=1),
        stats=Stats(queue_ms=1.5),
        error=ErrorInfo(type="internal_error", message="x"),
        prompt_logprobs=[None, TokenLogprob(token_id=1, logprob=-0.5, rank=1)],
        prompt_texts=['"', "\u00ed"],
    )
    assert TokenEvent.model_validate_json(event.to_json()) == event
    assert event.is_last


def test_a_reader_does_not_mind_members_it_does_not_know() -> None:
    event = TokenEvent.model_validate_json('{"index":0,"token_ids":[],"text":"","later":1}')
    assert event.index == 0


def test_events_fold_into_a_result() -> None:
    events = [
        TokenEvent(index=0, token_ids=[1, 2], text="ab"),
        TokenEvent(
            index=2, token_ids=[3], text="c", finish_reason=FinishReason.STOP, usage=Usage()
        ),
    ]
    result = Result.fold(events)
    assert (result.text, result.token_ids) == ("abc", [1, 2, 3])
    assert result.finish_reason is FinishReason.STOP
    with pytest.raises(ValueError, match="no last event"):
        Result.fold(events[:1])


def test_samples_of_one_prompt_count_it_once() -> None:
    usage = Usage.of_samples([Usage(prompt_tokens=7, completion_tokens=n) for n in (1, 2, 3)])
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (7, 6, 13)


def test_a_request_that_waits_or_runs_has_no_final_state() -> None:
    going_on = {state for state in RequestState if not state.is_final}
    assert going_on == {RequestState.WAITING, RequestState.ACTIVE}

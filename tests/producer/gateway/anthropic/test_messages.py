"""Answers of /v1/messages through Anthropic's own client, whole and streamed."""

from __future__ import annotations

import json
import re
from typing import Any

import anthropic
import httpx2
import pytest

from promptq.shared.protocol.request import FinishReason
from tests.producer.gateway.living import LiveGateway
from tests.producer.gateway.played import (
    FIELDS,
    TOOL,
    TURNS,
    anthropic_of,
    begun,
    is_cancelled,
    message_of,
    opened,
    streamed,
    tell_style,
    worked,
)
from tests.producer.playing import HandWorker
from tests.support.model_free import text_of
from tests.support.waiting import until

THOUGHT = "<think>Hm, hm.</think>Look: "
CALL = '<call>{"name": "paint", "arguments": {"colour": "red"}}</call>'


def test_a_message(letters_gateway: LiveGateway) -> None:
    turns: Any = [{"role": "user", "content": "Go on. " * 50}]
    with anthropic_of(letters_gateway) as client:
        got = client.messages.create(
            model="model-free", max_tokens=7, messages=turns, extra_body={"seed": 3}
        )
        assert re.fullmatch("msg_[0-9a-f]{32}", got.id)
        assert got._request_id == got.id
        assert (got.type, got.role, got.model) == ("message", "assistant", "model-free")
        [block] = got.content
        assert block.type == "text"
        assert block.text == text_of(3, 7)
        assert (got.stop_reason, got.stop_sequence) == ("max_tokens", None)
        again = client.messages.create(
            model="", max_tokens=7, messages=turns, extra_body={"seed": 3}
        )
    first, second = got.usage, again.usage
    assert (first.output_tokens, second.output_tokens) == (7, 7)
    assert first.input_tokens > 0
    assert second.cache_read_input_tokens
    told = [(it.input_tokens + (it.cache_read_input_tokens or 0)) for it in (first, second)]
    assert told[0] == told[1]


def test_the_events_of_a_stream(gateway: LiveGateway, own_worker: HandWorker) -> None:
    """In Anthropic's order, with one block after the other."""
    tell_style(own_worker)
    with anthropic_of(gateway) as client:
        texts = [THOUGHT[:9], THOUGHT[9:], CALL[:45], CALL[45:]]
        events, message = streamed(client, own_worker, texts, tools=[TOOL])
    block = ["content_block_start", "content_block_delta", "content_block_stop"]
    kinds = [event.type for event in events]
    squeezed = [it for at, it in enumerate(kinds) if it != kinds[at - 1]]
    assert squeezed == ["message_start", *block * 3, "message_delta", "message_stop"]
    assert [event.index for event in events if event.type == "content_block_start"] == [0, 1, 2]
    started = [event.content_block for event in events if event.type == "content_block_start"]
    assert [it.type for it in started] == ["thinking", "text", "tool_use"]
    first = events[0].message
    assert (first.content, first.stop_reason) == ([], None) or first is message
    assert (message.stop_reason, message.usage.input_tokens) == ("tool_use", 3)
    assert message.usage.output_tokens == len(THOUGHT + CALL)


def test_members_that_have_no_meaning_here(gateway: LiveGateway, own_worker: HandWorker) -> None:
    """They are there, as in Anthropic's API: in whole answers and in the events of a stream."""
    tell_style(own_worker)
    with httpx2.Client(base_url=gateway.url, timeout=30) as http:

        def post(stream: bool) -> str:
            body = {**FIELDS, "tools": [TOOL], "stream": stream}
            found, _ = worked(
                own_worker,
                lambda: http.post("/v1/messages", json=body),
                lambda claim: own_worker.finish(claim, THOUGHT + CALL),
            )
            text: str = found.text
            return text

        whole = json.loads(post(stream=False))
        lines = post(stream=True).splitlines()
    frames = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    events = [json.loads(frame) for frame in frames]
    blocks = [each["content_block"] for each in events if each["type"] == "content_block_start"]
    [start] = [each["message"] for each in events if each["type"] == "message_start"]
    [last] = [each for each in events if each["type"] == "message_delta"]
    for _, text, call in (whole["content"], blocks):
        assert (text["citations"], call["caller"]) == (None, {"type": "direct"})
    for message in (whole, start, last["delta"]):
        assert (message["stop_details"], message["container"]) == (None, None)
    absent = {"cache_creation", "inference_geo", "server_tool_use"}
    for each in (whole["usage"], start["usage"], last["usage"]):
        nulls = {name for name, value in each.items() if value is None}
        assert nulls == {*absent, "output_tokens_details"}


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_a_whole_message_says_the_same_as_its_stream(
    gateway: LiveGateway, own_worker: HandWorker, size: int
) -> None:
    """However the text is cut into events. Anthropic's client puts the blocks together."""
    tell_style(own_worker)
    text = THOUGHT + CALL + "and " + CALL.replace('"colour": "red"', "")
    with anthropic_of(gateway) as client:
        whole, _ = message_of(client, own_worker, text, tools=[TOOL])
        texts = [text[at : at + size] for at in range(0, len(text), size)]
        _, put_together = streamed(client, own_worker, texts, tools=[TOOL])
    assert whole.stop_reason == put_together.stop_reason == "tool_use"
    calls = [it for it in whole.content if it.type == "tool_use"]
    assert len({it.id for it in calls}) == 2
    assert all(it.id.startswith("toolu_") for it in calls)
    blocks = [it.model_dump(exclude={"id", "caller"}, exclude_none=True) for it in whole.content]
    assert blocks == [
        {"type": "thinking", "thinking": "Hm, hm.", "signature": ""},
        {"type": "text", "text": "Look: "},
        {"type": "tool_use", "name": "paint", "input": {"colour": "red"}},
        {"type": "text", "text": "and"},
        {"type": "tool_use", "name": "paint", "input": {}},
    ]
    exclude: Any = {"id", "parsed_output", "caller"}
    assert blocks == [it.model_dump(exclude=exclude, exclude_none=True) for it in
                      put_together.content]  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "read"),
    [
        ('{"colour": "red", "note": "ab', {"colour": "red"}),
        ('{"colour": nothing}', {"INVALID_JSON": '{"colour": nothing}'}),
    ],
)
def test_a_call_that_is_not_whole(
    gateway: LiveGateway, own_worker: HandWorker, arguments: str, read: dict[str, Any]
) -> None:
    """An input is an object, also if the model was cut or wrote none."""
    tell_style(own_worker)
    text = '<call>{"name": "paint", "arguments": ' + arguments
    with anthropic_of(gateway) as client:
        got, _ = worked(
            own_worker,
            lambda: client.messages.create(**FIELDS, tools=[TOOL]),
            lambda claim: own_worker.send(claim, text, FinishReason.LENGTH),
        )
    [call] = got.content
    assert got.stop_reason == "max_tokens"
    assert call.input == read


def test_a_stop_sequence_of_any_characters(gateway: LiveGateway, own_worker: HandWorker) -> None:
    """A stream names it, and its frames stay lines for every reader."""
    stop = "é\u2028"
    with anthropic_of(gateway) as client:
        events, _ = worked(
            own_worker,
            lambda: list(client.messages.create(**FIELDS, stream=True, stop_sequences=[stop])),
            lambda claim: own_worker.send(claim, "Hi", FinishReason.STOP, stop_reason=stop),
        )
    *_, last, _ = events
    assert last.delta.stop_sequence == stop


def test_the_stop_sequence_that_ended_it(letters_gateway: LiveGateway) -> None:
    """The worker says which one it was."""
    text = text_of(3, 9)
    later, never = text[4:6], "#"
    fields: Any = {**FIELDS, "max_tokens": 9, "extra_body": {"seed": 3}}
    with anthropic_of(letters_gateway) as client:
        got = client.messages.create(**fields, stop_sequences=[never, later])
        assert (got.stop_reason, got.stop_sequence) == ("stop_sequence", later)
        assert got.content[0].model_dump()["text"] == text[: text.index(later)]
        with client.messages.stream(**fields, stop_sequences=[never, later]) as stream:
            last = stream.get_final_message()
        assert (last.stop_reason, last.stop_sequence) == ("stop_sequence", later)


@pytest.mark.parametrize("prefill", ["Once upon", "<think>Well, ", "Now <", CALL[:30], CALL[:48]])
def test_a_prefill_is_given_and_not_shown(
    gateway: LiveGateway, own_worker: HandWorker, prefill: str
) -> None:
    """However much of a mark it is. A call that it begins belongs to the answer as a whole."""
    tell_style(own_worker)
    turns = [*TURNS, {"role": "assistant", "content": prefill}]
    own = {"<think>Well, ": "no.</think> Yes.", "Now <": "a> and <b"}.get(prefill, " a time")
    if CALL.startswith(prefill):
        own = CALL[len(prefill) :]
    with anthropic_of(gateway) as client:

        def work(claim: Any) -> None:
            own_worker.send(claim, prefill)
            for letter in own:
                own_worker.send(claim, letter)
            own_worker.finish(claim)

        def ask() -> Any:
            return client.messages.create(**{**FIELDS, "messages": turns}, tools=[TOOL])

        whole, payload = worked(own_worker, ask, work)
        assert payload["messages"] == TURNS
        assert payload["output_prefix"] == {"text": prefill}
        _, put_together = streamed(
            client, own_worker, [prefill, *own, ""], messages=turns, tools=[TOOL]
        )
    told: Any = {
        "Once upon": [{"type": "text", "text": own}],
        "Now <": [{"type": "text", "text": own}],
        "<think>Well, ": [
            {"type": "thinking", "thinking": "no.", "signature": ""},
            {"type": "text", "text": "Yes."},
        ],
    }.get(prefill, [{"type": "tool_use", "name": "paint", "input": {"colour": "red"}}])
    for message in (whole, put_together):
        exclude: Any = {"id", "parsed_output", "caller"}
        blocks = [it.model_dump(exclude=exclude, exclude_none=True) for it in message.content]
        assert blocks == told
        assert message.usage.output_tokens == len(own)
        assert message.usage.input_tokens == 3 + len(prefill)


def test_an_answer_to_a_prefill_that_is_read_late(
    gateway: LiveGateway, own_worker: HandWorker
) -> None:
    """When the log is gone, the text has what was given in front."""
    turns = [*TURNS, {"role": "assistant", "content": "Once"}]
    key = {"Idempotency-Key": "mine"}
    with anthropic_of(gateway) as client:
        fields = {"messages": turns, "extra_headers": key}
        first, _ = message_of(client, own_worker, "Once upon", **fields)
        own_worker.fold_now(first.id)
        again = client.messages.create(**{**FIELDS, **fields})
    assert first.id == again.id
    assert again.content[0].model_dump()["text"] == " upon"


def test_a_client_that_leaves(gateway: LiveGateway, own_worker: HandWorker) -> None:
    with anthropic_of(gateway) as client:
        with begun(client, own_worker) as (stream, claim):
            assert next(stream).type == "message_start"
        until(lambda: is_cancelled(own_worker, claim.request_id))


def test_a_client_that_comes_back(gateway: LiveGateway, own_worker: HandWorker) -> None:
    """To the same events, at the address of the stream."""
    tell_style(own_worker)
    turns = [*TURNS, {"role": "assistant", "content": "So "}]
    body = {**FIELDS, "messages": turns, "stream": True, "tools": [TOOL], "detach": True}
    with httpx2.Client(base_url=gateway.url, timeout=30) as http:
        path = "/v1/messages"
        with opened(http, own_worker, body, "So ", path=path) as (reading, claim):
            own_worker.send(claim, "look:")
            assert reading.next()[1]["type"] == "message_start"
            url = reading.response.headers["X-Stream-Url"]
        with begun(anthropic_of(gateway), own_worker) as (_, other):
            pass
        until(lambda: is_cancelled(own_worker, other.request_id))  # which left later
        own_worker.send(claim, CALL)
        assert not is_cancelled(own_worker, claim.request_id)
        own_worker.finish(claim)
        again = http.get(url)
    frames = again.text.removeprefix(": waiting\n").strip().split("\n\n")
    kinds = [it.split("\n")[0].removeprefix("event: ") for it in frames]
    assert (kinds[0], kinds[-1]) == ("message_start", "message_stop")
    told = [json.loads(it.split("data: ")[1]) for it in frames]
    assert [it["type"] for it in told] == kinds
    assert told[0]["message"]["id"] == claim.request_id
    texts = [it["delta"]["text"] for it in told if it.get("delta", {}).get("type") == "text_delta"]
    assert "".join(texts) == "look:"


def test_a_stream_without_news_sends_pings(start_gateway: Any, own_worker: HandWorker) -> None:
    """Before the first event a comment, as that event is the first in Anthropic's API."""
    gateway = start_gateway(http_header_seconds=0.1, http_keepalive_seconds=0.1)
    with (
        httpx2.Client(base_url=gateway.url, timeout=30) as http,
        http.stream("POST", "/v1/messages", json={**FIELDS, "stream": True}) as reading,
    ):
        lines = reading.iter_lines()
        assert next(lines).startswith(": waiting: next; ")
        claim = own_worker.take()
        own_worker.send(claim, "Hi")
        while not (line := next(lines)).startswith("event: "):
            assert line.startswith(": waiting")
        assert line == "event: message_start"
        while next(lines) != "event: ping":
            pass
        assert next(lines) == 'data: {"type": "ping"}'
        own_worker.finish(claim)
        assert 'data: {"type":"message_stop"}' in [*lines]


def test_a_failure_after_the_first_token(gateway: LiveGateway, own_worker: HandWorker) -> None:
    """Anthropic's client raises what the last event says."""
    error = {"type": "internal_error", "message": "the worker broke"}
    with anthropic_of(gateway) as client, begun(client, own_worker) as (stream, claim):
        own_worker.send(claim, "", FinishReason.ERROR, error=error)
        with pytest.raises(anthropic.APIStatusError) as raised:
            list(stream)
    assert (raised.value.type, raised.value.error_code) == ("api_error", "internal_error")
    assert raised.value.api_message == "the worker broke"


def test_a_call_that_is_required(stories_gateway: LiveGateway) -> None:
    """Of the shipped model. The conversation goes on with what the tool said."""
    turns: Any = [{"role": "user", "content": "Paint it."}]
    fields: Any = {"model": "", "max_tokens": 60, "tools": [TOOL], "extra_body": {"seed": 3}}
    with anthropic_of(stories_gateway) as client:
        for choice in ({"type": "any"}, {"type": "tool", "name": "paint"}):
            got = client.messages.create(**fields, messages=turns, tool_choice=choice)
            [call] = got.content
            assert (got.stop_reason, call.type) == ("tool_use", "tool_use")
            assert call.model_dump()["input"]["colour"] in ("red", "blue")
        result = {"type": "tool_result", "tool_use_id": call.model_dump()["id"], "content": "ok"}
        turns += [got.to_param(), {"role": "user", "content": [result]}]
        with client.messages.stream(**fields, messages=turns, tool_choice={"type": "none"}) as it:
            assert it.get_final_text()


def test_a_prefill_of_the_shipped_model(stories_gateway: LiveGateway) -> None:
    """The model continues the prefill as it would have continued by itself."""
    turns: Any = [{"role": "user", "content": "Tell me a story about a fox."}]
    fields: Any = {"model": "", "max_tokens": 30, "extra_body": {"temperature": 0}}
    with anthropic_of(stories_gateway) as client:
        whole = client.messages.create(**fields, messages=turns).content[0].model_dump()["text"]
        half = whole[: whole.index(" ", 20)]
        turns.append({"role": "assistant", "content": half})
        got = client.messages.create(**fields, messages=turns)
    rest = got.content[0].model_dump()["text"]
    assert (half + rest).startswith(whole)
    assert got.usage.output_tokens == 30

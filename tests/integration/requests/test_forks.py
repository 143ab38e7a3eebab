"""Requests that go on from the first tokens of another one: the shipped model in fp32, and its
worker, which is killed once."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import redis

from promptq import Client
from promptq.shared.errors import InvalidRequestError, RequestNotFoundError
from promptq.shared.protocol.events import Result, TokenEvent
from promptq.shared.protocol.keys import Keys
from promptq.shared.settings.worker import WorkerSettings
from promptq.worker.serve.build import build
from tests.producer.gateway.living import live_worker
from tests.support.processes import started
from tests.support.roles import as_role
from tests.support.servers import embedded_server
from tests.support.waiting import until

LEASE_MS = 1500
OPTIONS = ("--dtype", "float32", "--lease-ms", str(LEASE_MS))
PROMPT = "Once upon a time there was a fox who"
NUM_TOKENS = 100
RUNNING_AT = 12
"""Where a source is forked while it runs."""


@dataclass(frozen=True)
class Story:
    """A client, and what came of a worker that was killed while it ran a source and its fork."""

    client: Client
    source: str
    fork: str

    @property
    def told(self) -> Result:
        """The source's result."""
        return self.client.result(self.source)


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Story]:
    with embedded_server() as default, Client(as_role("producer", default)) as client:
        url = as_role("producer", default)
        log_of = Keys("default").tokens
        with (
            redis.Redis.from_url(default) as server,
            started(tmp_path_factory.mktemp("killed"), url, *OPTIONS) as killed,
        ):
            # Without drafts, an event has one token.
            fields: dict[str, Any] = {"temperature": 0.0, "logprobs": 1, "speculative_tokens": 0}
            source = client.enqueue(PROMPT, max_tokens=NUM_TOKENS, **fields)
            until(lambda: server.xlen(log_of(source)) > RUNNING_AT)
            fork = client.fork(source, at=RUNNING_AT)
            until(lambda: server.xlen(log_of(fork)) > 2)
            assert server.xlen(log_of(source)) < NUM_TOKENS, "the fork came too late"
            killed.process.kill()
        with live_worker(url, build(WorkerSettings(dtype="float32")), lease_ms=LEASE_MS):
            yield Story(client, source, fork)


def read(client: Client, request_id: str) -> list[TokenEvent]:
    """The events of a stream, in which each begins where the one before ends."""
    events = list(client.stream(request_id))
    assert [event.index for event in events] == [0, *(event.end for event in events[:-1])]
    return events


def tokens_of(events: list[TokenEvent]) -> list[int]:
    return [token_id for event in events for token_id in event.token_ids]


def text_of(events: list[TokenEvent]) -> str:
    return "".join(event.text for event in events)


def test_a_fork_of_a_running_request_survives_its_worker(story: Story) -> None:
    """The fork has the tokens of the source, also those from another worker."""
    events, source = read(story.client, story.fork), story.told
    assert events[0].attempt == 1 < events[-1].attempt
    assert len(events[0].token_ids) == RUNNING_AT
    tokens = tokens_of(events)
    assert len(tokens) == RUNNING_AT + NUM_TOKENS
    assert tokens[:NUM_TOKENS] == source.token_ids
    assert text_of(events).startswith(source.text)


def test_a_greedy_fork_has_the_tokens_of_its_source(
    story: Story, capsys: pytest.CaptureFixture[str]
) -> None:
    """Wherever it begins. Log-probabilities are those of the tokens behind that place.

    What is given comes with the first token, and not when the server misses it.
    """
    client, source = story.client, story.told
    places = [0, 1, 33, NUM_TOKENS - 20]
    forks = {at: client.fork(story.source, at=at, max_tokens=20) for at in places}
    for at, fork in forks.items():
        events = read(client, fork)
        assert tokens_of(events) == source.token_ids[: at + 20]
        assert source.text.startswith(text_of(events))
        result = client.result(fork)
        assert source.logprobs is not None
        assert result.logprobs == source.logprobs[at : at + 20]
        assert (events[0].logprobs is None) == (at > 0)
        assert events[-1].usage is not None
        assert events[-1].usage.completion_tokens == at + 20
        timeline = client.timeline(fork)
        assert (timeline.forked_from, timeline.forked_at) == (story.source, at)
    told = capsys.readouterr().out
    assert forks[33] in told
    assert "the log lost events" not in told
    at_its_end = client.fork(story.source, max_tokens=5)
    assert client.timeline(at_its_end).forked_at == NUM_TOKENS
    assert client.result(at_its_end).token_ids[:NUM_TOKENS] == source.token_ids


def test_a_sampled_fork_goes_its_own_way(story: Story) -> None:
    """A fork has another seed than its source. With the same seed it repeats the source."""
    client, at = story.client, 10
    source = client.enqueue(
        PROMPT, max_tokens=40, temperature=1.0, seed=4, idempotency_key="of the source"
    )
    told = client.result(source).token_ids
    own, other, same = (
        client.result(client.fork(source, at=at, max_tokens=30, **seed)).token_ids
        for seed in ({}, {"seed": 5}, {"seed": 4})
    )
    assert same == told
    assert own[:at] == other[:at] == told[:at]
    assert len({tuple(it[at:]) for it in (own, other, told)}) == 3


def test_a_text_is_added(story: Story) -> None:
    """A stop string may begin in it, but not end in it."""
    client, source = story.client, story.told
    added = ' Then "zebra'
    fields: dict[str, Any] = {"append": added, "max_tokens": 12}
    fork = client.fork(story.source, at=8, **fields)
    events = read(client, fork)
    begin = text_of(read(client, client.fork(story.source, at=8, max_tokens=1))[:1])
    assert source.text.startswith(begin)
    assert events[0].text == begin + added
    behind = text_of(events)[len(events[0].text) :]
    stopped = client.result(client.fork(story.source, at=8, **fields, stop=["zebra", behind[2:5]]))
    assert stopped.text == events[0].text + behind[: behind.index(behind[2:5])]
    across = added[-4:] + behind[:2]
    stopped = client.result(client.fork(story.source, at=8, **fields, stop=across))
    assert (stopped.text, stopped.finish_reason) == (events[0].text, "stop")


def test_penalties_count_what_is_given(story: Story) -> None:
    """The prefix counts as output."""
    client, given = story.client, {"text": " zebra" * 20}
    before = story.told.token_ids
    [often] = client.result(
        client.enqueue(PROMPT, output_prefix=given, max_tokens=1, temperature=0.0)
    ).token_ids[3:4]
    other = next(it for it in before if it != often)
    for penalty, chosen in ((0.0, often), (2.0, other)):
        request = client.enqueue(
            PROMPT,
            output_prefix=given,
            max_tokens=1,
            temperature=0.0,
            frequency_penalty=penalty,
            logit_bias={str(often): 80.0, str(other): 60.0},
        )
        assert client.result(request).token_ids[-1] == chosen


SCHEMA = {"enum": ["Füchse 🦊 und 🦉 im Wald"]}


def test_a_fork_in_the_middle_of_a_character(story: Story) -> None:
    """The text is the source's, at whichever byte it was cut; a grammar goes on from there."""
    client = story.client
    form = {"type": "json_schema", "json_schema": {"name": "text", "schema": SCHEMA}}
    source = client.enqueue(PROMPT, temperature=0.0, response_format=form)
    told = client.result(source)
    assert json.loads(told.text) == SCHEMA["enum"][0]
    forks = [client.fork(source, at=at) for at in range(len(told.token_ids) + 1)]
    streams = [read(client, fork) for fork in forks]
    for events in streams:
        assert (tokens_of(events), text_of(events)) == (told.token_ids, told.text)
        assert events[-1].finish_reason == "stop"
        assert "\ufffd" not in events[0].text
    begins = {events[0].text for events in streams}
    assert len(begins) < len(streams), "no character has several tokens"


def test_a_fork_of_a_chat_with_tools(story: Story) -> None:
    client = story.client
    colours = {"type": "object", "properties": {"colour": {"enum": ["red", "blue", "green"]}}}
    tool: dict[str, Any] = {"name": "paint", "parameters": {**colours, "required": ["colour"]}}
    tool["parameters"]["additionalProperties"] = False
    source = client.enqueue(
        messages=[{"role": "user", "content": "Paint it."}],
        tools=[{"type": "function", "function": tool}],
        tool_choice="required",
        temperature=0.0,
        max_tokens=60,
    )
    told = client.result(source)
    name, prefix, at = told.text.index('"colour"'), "", 0
    for event in read(client, source):
        if len(prefix + event.text) > name:
            break
        prefix, at = prefix + event.text, event.end
    assert 0 < at < len(told.token_ids)
    append = told.text[len(prefix) : name] + '"colour": "'
    fork = client.result(client.fork(source, at=at, append=f"{append}green"))
    assert fork.text.startswith(f'{prefix}{append}green"')
    assert fork.finish_reason == "stop"
    refused = client.result(client.fork(source, at=at, append=f"{append}yellow"), check=False)
    assert refused.error is not None
    assert refused.error.type == "invalid_request"
    assert refused.error.message.startswith("output_prefix: does not fit tools: ")
    assert refused.token_ids == []


def test_an_end_token_is_left_out(story: Story) -> None:
    """The fork goes on in its place, so that a text can be added."""
    client, end = story.client, story.told.token_ids[15]
    first = story.told.token_ids.index(end)
    source = client.enqueue(PROMPT, temperature=0.0, max_tokens=50, stop_token_ids=[end])
    told = client.result(source)
    assert (told.token_ids[-1], told.finish_reason) == (end, "stop")
    assert client.result(client.fork(source)).token_ids == told.token_ids
    longer = client.result(client.fork(source, append=" Oh", stop_token_ids=[end], max_tokens=1))
    assert longer.text.startswith(f"{told.text} Oh")
    assert longer.token_ids[:first] == told.token_ids[:first]


def test_an_output_that_is_given_is_no_fork(story: Story) -> None:
    """A program gives the beginning of the answer. `max_tokens` and `min_tokens` count only the
    model's tokens, and an answer that is already complete ends at once.
    """
    client = story.client
    chat = [{"role": "user", "content": "Tell me a story."}]
    given = {"text": "Certainly! It was"}
    added = client.enqueue(messages=chat, output_prefix=given, max_tokens=3, min_tokens=3, seed=1)
    events = read(client, added)
    assert events[0].text == given["text"]
    assert len(tokens_of(events)) - len(events[0].token_ids) == 3
    whole = {"text": json.dumps(SCHEMA["enum"][0], ensure_ascii=False)}
    form = {"type": "json_schema", "json_schema": {"name": "text", "schema": SCHEMA}}
    events = read(client, client.enqueue(PROMPT, output_prefix=whole, response_format=form))
    assert (text_of(events), events[-1].finish_reason) == (whole["text"], "stop")


def test_what_cannot_be_forked(story: Story) -> None:
    client = story.client
    assert len(story.told.token_ids) == NUM_TOKENS
    for at in (NUM_TOKENS + 1, -1, True, "3"):
        with pytest.raises(InvalidRequestError, match=f"at: .* has {NUM_TOKENS} tokens so far"):
            client.fork(story.source, at=at)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequestError, match="messages: cannot be changed"):
        client.fork(story.source, at=1, messages=[])
    with pytest.raises(InvalidRequestError, match="append: must be text"):
        client.fork(story.source, append=3)  # type: ignore[arg-type]
    with pytest.raises(RequestNotFoundError, match="or its record has expired"):
        client.fork("unknown", at=1)
    with pytest.raises(InvalidRequestError, match="temperature: "):
        client.fork(story.source, at=1, temperature=3.0)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "output_prefix: has neither token_ids nor text"),
        ({"tokens": [1]}, "output_prefix: has no field 'tokens'"),
        ({"token_ids": [-1]}, "output_prefix: "),
        ("text", "output_prefix: "),
    ],
)
def test_a_malformed_prefix(story: Story, given: Any, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        story.client.enqueue(PROMPT, output_prefix=given)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"token_ids": [10**6]}, "output_prefix: token id 1000000 is outside"),
        ({"token_ids": [5] * 3000}, "output_prefix: this model's maximum context length is 2048"),
        ({"text": "a fox " * 9000}, "output_prefix: it is too long: this model's maximum"),
    ],
)
def test_a_prefix_that_does_not_fit_the_model(story: Story, given: Any, message: str) -> None:
    result = story.client.result(story.client.enqueue(PROMPT, output_prefix=given), check=False)
    assert result.error is not None
    assert result.error.message.startswith(message)
    assert (result.error.type, result.token_ids) == ("invalid_request", [])

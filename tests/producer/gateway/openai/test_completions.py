"""Completions and chats through OpenAI's own client, unmodified."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx2
import openai
import pytest
from openai import AsyncOpenAI, OpenAI

from promptq.shared.protocol.request import Request
from tests.producer.gateway.living import LiveGateway
from tests.producer.playing import KEYS, HandWorker
from tests.support.model_free import text_of

MESSAGES: list[Any] = [{"role": "user", "content": "Once"}]


def test_a_completion(letters: OpenAI) -> None:
    got = letters.completions.create(model="model-free", prompt="Once", max_tokens=7, seed=3)
    [choice] = got.choices
    assert choice.text == text_of(3, 7)
    assert (choice.index, choice.finish_reason, choice.logprobs) == (0, "length", None)
    assert (got.object, got.model) == ("text_completion", "model-free")
    assert got.usage is not None
    assert (got.usage.prompt_tokens, got.usage.completion_tokens) == (4, 7)
    assert got.usage.total_tokens == 11


def test_a_whole_answer_says_where_it_can_be_read_again(
    letters: OpenAI, letters_gateway: LiveGateway
) -> None:
    """In its headers, as a stream does."""
    raw = letters.completions.with_raw_response.create(
        model="", prompt="Once", max_tokens=7, seed=3, n=2
    )
    answer = raw.parse()
    assert raw.headers["X-Request-Id"] == answer.id
    again = httpx2.get(letters_gateway.url + raw.headers["X-Stream-Url"], timeout=None)
    chunks = [json.loads(it[6:]) for it in again.text.splitlines() if it.startswith("data: {")]
    for choice in answer.choices:
        pieces = [it["choices"][0] for it in chunks if it["choices"][0]["index"] == choice.index]
        assert "".join(it["text"] for it in pieces) == choice.text
    assert {chunk["created"] for chunk in chunks} == {answer.created}


def test_a_completion_has_16_tokens_by_default(letters: OpenAI) -> None:
    """This is OpenAI's default; a chat goes on to the model's length."""
    assert len(letters.completions.create(model="", prompt="Hi").choices[0].text) == 16


def test_a_chat(letters: OpenAI) -> None:
    got = letters.chat.completions.create(
        model="model-free", messages=MESSAGES, max_completion_tokens=7, seed=3
    )
    [choice] = got.choices
    assert (choice.message.role, choice.message.content) == ("assistant", text_of(3, 7))
    assert (choice.message.tool_calls, choice.message.annotations) == (None, [])
    assert choice.finish_reason == "length"
    assert got.object == "chat.completion"


def test_a_streamed_completion(letters: OpenAI) -> None:
    """A chunk a token; the last has the reason, and usage comes only when it is asked for."""
    chunks = list(
        letters.completions.create(model="", prompt="Once", max_tokens=7, seed=3, stream=True)
    )
    assert [chunk.choices[0].text for chunk in chunks] == list(text_of(3, 7))
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * 6 + ["length"]
    assert len({chunk.id for chunk in chunks}) == 1
    assert all(chunk.usage is None for chunk in chunks)


def test_a_streamed_chat_with_usage(letters: OpenAI) -> None:
    """The chunk with the usage comes last and has no choice."""
    stream = letters.chat.completions.create(
        model="",
        messages=MESSAGES,
        max_tokens=3,
        seed=3,
        stream=True,
        stream_options={"include_usage": True},
    )
    *chunks, last = list(stream)
    assert [chunk.choices[0].delta.content for chunk in chunks] == list(text_of(3, 3))
    assert [chunk.choices[0].delta.role for chunk in chunks] == ["assistant", None, None]
    assert chunks[0].usage is None
    assert last.choices == []
    assert last.usage is not None
    assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (4, 3)


async def test_the_async_client(letters_gateway: LiveGateway) -> None:
    async with AsyncOpenAI(
        base_url=letters_gateway.base_url, api_key="none", max_retries=0
    ) as client:
        whole = await client.completions.create(model="", prompt="Once", max_tokens=5, seed=3)
        assert whole.choices[0].text == text_of(3, 5)
        stream = await client.chat.completions.create(
            model="", messages=MESSAGES, max_tokens=5, seed=3, stream=True
        )
        texts = [chunk.choices[0].delta.content or "" async for chunk in stream]
        assert "".join(texts) == text_of(3, 5)
        with pytest.raises(openai.BadRequestError):
            await client.completions.create(model="", prompt="Once", temperature=9.0)


@pytest.mark.parametrize("stream", [False, True])
def test_several_answers(letters: OpenAI, stream: bool) -> None:
    """Each with a seed of its own; the prompt counts once."""
    texts = ["", "", ""]
    usage: Any
    if stream:
        for chunk in letters.completions.create(
            model="", prompt="Once", n=3, max_tokens=5, seed=3, stream=True,
            stream_options={"include_usage": True},
        ):  # fmt: skip
            for choice in chunk.choices:
                texts[choice.index] += choice.text
            usage = chunk.usage
    else:
        got = letters.completions.create(model="", prompt="Once", n=3, max_tokens=5, seed=3)
        texts, usage = [choice.text for choice in got.choices], got.usage
    assert texts == [text_of(3, 5), text_of(4, 5), text_of(5, 5)]
    assert (usage.prompt_tokens, usage.completion_tokens) == (4, 15)


def test_several_prompts(letters: OpenAI) -> None:
    """Choices of one prompt stand together, and each prompt counts."""
    got = letters.completions.create(
        model="", prompt=["one", "three"], n=2, max_tokens=2, seed=3, echo=True
    )
    a, b = text_of(3, 2), text_of(4, 2)
    assert [it.text for it in got.choices] == ["one" + a, "one" + b, "three" + a, "three" + b]
    assert [it.index for it in got.choices] == [0, 1, 2, 3]
    assert got.usage is not None
    assert got.usage.prompt_tokens == 8


def test_prompts_of_token_ids(letters: OpenAI) -> None:
    one = letters.completions.create(model="", prompt=[72, 105], max_tokens=2)
    two = letters.completions.create(model="", prompt=[[72, 105], [72]], max_tokens=2)
    assert one.usage is not None
    assert two.usage is not None
    assert (one.usage.prompt_tokens, two.usage.prompt_tokens) == (2, 3)


def test_echo_in_a_stream(letters: OpenAI) -> None:
    stream = letters.completions.create(
        model="", prompt="Once", echo=True, max_tokens=2, seed=3, stream=True
    )
    assert "".join(chunk.choices[0].text for chunk in stream) == "Once" + text_of(3, 2)


def test_cached_tokens_are_reported(letters: OpenAI) -> None:
    for _ in range(2):
        got = letters.completions.create(model="", prompt="a" * 64, max_tokens=2)
    assert got.usage is not None
    assert got.usage.prompt_tokens_details is not None
    assert got.usage.prompt_tokens_details.cached_tokens == 48


def test_logprobs_of_a_chat(letters: OpenAI) -> None:
    """Of each token its text and bytes, and the likeliest that were asked for; streamed too."""
    fields: dict[str, Any] = {
        "model": "", "messages": MESSAGES, "max_tokens": 2, "seed": 3, "logprobs": True,
    }  # fmt: skip
    letter = text_of(3, 2)[0]
    whole = letters.chat.completions.create(**fields, top_logprobs=1).choices[0].logprobs
    assert whole is not None
    assert whole.content is not None
    first = whole.content[0]
    assert (first.token, first.logprob, first.bytes) == (letter, 0.0, [ord(letter)])
    assert [it.token for it in first.top_logprobs] == [letter]
    [chunk, _] = list(letters.chat.completions.create(**fields, stream=True))
    assert chunk.choices[0].logprobs.content[0].token == letter
    assert chunk.choices[0].logprobs.content[0].top_logprobs == []


def test_logprobs_of_a_completion(letters: OpenAI) -> None:
    """In the older shape, with the places of tokens in the text, also across chunks."""
    fields: dict[str, Any] = {
        "model": "", "prompt": "Once", "max_tokens": 3, "seed": 3, "logprobs": 1,
    }  # fmt: skip
    text = text_of(3, 3)
    whole = letters.completions.create(**fields).choices[0].logprobs
    assert whole is not None
    assert whole.tokens == list(text)
    assert whole.text_offset == [0, 1, 2]
    assert whole.token_logprobs == [0.0, 0.0, 0.0]
    assert whole.top_logprobs == [{letter: 0.0} for letter in text]
    chunks = list(letters.completions.create(**fields, stream=True))
    assert [chunk.choices[0].logprobs.text_offset for chunk in chunks] == [[0], [1], [2]]


def sent(own_worker: HandWorker) -> dict[str, Any]:
    """The payload of the request that waits, which is then answered."""
    claim = own_worker.take_next()
    own_worker.finish(claim, "x")
    payload: dict[str, Any] = json.loads(claim.payload)
    return payload


def sent_by(gateway: LiveGateway, own_worker: HandWorker, **call: Any) -> dict[str, Any]:
    """The payload that a chat with these extra fields and headers becomes."""
    call = {"model": "", "messages": MESSAGES, **call}
    with (
        OpenAI(base_url=gateway.base_url, api_key="none", max_retries=0) as client,
        ThreadPoolExecutor() as beside,
    ):
        asking = beside.submit(lambda: client.chat.completions.create(**call))
        payload = sent(own_worker)
        asking.result()
    return payload


def test_every_field_of_a_payload_goes_through(
    gateway: LiveGateway, own_worker: HandWorker
) -> None:
    """Whether OpenAI's client knows it or not; what is null is left out."""
    known: dict[str, Any] = {
        "temperature": 0.5, "top_p": 0.9, "presence_penalty": 0.5, "frequency_penalty": -0.5,
        "seed": 7, "stop": ["a", "b"], "logit_bias": {"65": 3}, "metadata": {"a": "b"},
        "response_format": {"type": "json_object"}, "tool_choice": "none",
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}],
    }  # fmt: skip
    extra: dict[str, Any] = {
        "top_k": 5, "min_p": 0.1, "repetition_penalty": 1.1, "min_tokens": 1, "bad_words": ["c"],
        "stop_token_ids": [3], "ignore_eos": True, "speculative_tokens": 0, "priority": -3,
        "deadline_ms": 60000, "cache_salt": "s", "tenant": "them", "max_tokens": 9,
        "chat_template_kwargs": {"x": 1}, "webhook_url": "http://127.0.0.1:9/",
        "resume": "exact_only", "output_prefix": {"token_ids": [7], "text": "It"},
        "completion_window": "2h", "deadline_policy": "refuse",
    }  # fmt: skip
    payload = sent_by(
        gateway, own_worker, **known, logprobs=True, top_logprobs=2, user="me", max_tokens=None,
        extra_body=extra,
    )  # fmt: skip
    expected = {**known, **extra, "messages": MESSAGES, "logprobs": 2}
    assert payload == expected
    other_ways = {"prompt", "model", "version", "idempotency_key", "trace_context", "embed"}
    other_ways |= {"service_tier", "session", "tokenize", "expected_tokens"}
    other_ways |= {"prompt_logprobs"}  # not with an output_prefix
    assert expected.keys() | other_ways == Request.model_fields.keys()


def test_the_queue_learns_the_expected_length_and_workers_do_not(
    gateway: LiveGateway, own_worker: HandWorker
) -> None:
    own_worker.redis.hset(KEYS.config, "shortest_first_ms", 1000)
    payload = sent_by(gateway, own_worker, extra_body={"expected_tokens": 7})
    assert "expected_tokens" not in payload
    [key] = own_worker.redis.keys(KEYS.request("*"))
    assert own_worker.redis.hget(key, "expected_tokens") == b"7"


def test_fields_that_mean_nothing_here_are_taken(
    gateway: LiveGateway, own_worker: HandWorker
) -> None:
    payload = sent_by(
        gateway, own_worker, user="me", store=False, safety_identifier="me",
        parallel_tool_calls=False,
    )  # fmt: skip
    assert payload == {"messages": MESSAGES}


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"reasoning_effort": "high"}, {"reasoning_effort": "high"}),
        ({"reasoning_effort": "none"}, {"reasoning_effort": "none", "enable_thinking": False}),
        (
            {
                "reasoning_effort": "none",
                "chat_template_kwargs": {"enable_thinking": True, "reasoning_effort": 3, "x": 1},
            },
            {"reasoning_effort": 3, "enable_thinking": True, "x": 1},
        ),
        ({"reasoning_effort": None, "chat_template_kwargs": {"x": 1}}, {"x": 1}),
        ({"reasoning_effort": None}, None),
    ],
)
def test_reasoning_effort_is_a_variable_of_the_template(
    gateway: LiveGateway, own_worker: HandWorker, fields: dict[str, Any], expected: Any
) -> None:
    """One that the call sets itself has precedence; null counts as absent."""
    payload = sent_by(gateway, own_worker, extra_body=fields)
    assert payload.get("chat_template_kwargs") == expected
    assert "reasoning_effort" not in payload


def test_priority_and_deadline_as_headers(gateway: LiveGateway, own_worker: HandWorker) -> None:
    """A field of the body counts before the header."""
    headers = {"X-Priority": "-7", "X-Deadline-Ms": "5000"}
    payload = sent_by(gateway, own_worker, extra_headers=headers)
    assert (payload["priority"], payload["deadline_ms"]) == (-7, 5000)
    payload = sent_by(gateway, own_worker, extra_headers=headers, extra_body={"priority": 2})
    assert payload["priority"] == 2


def test_messages_become_what_templates_expect(
    gateway: LiveGateway, own_worker: HandWorker
) -> None:
    """Parts become one text, arguments of calls objects, a developer the system."""
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "5"},
    ]
    payload = sent_by(gateway, own_worker, messages=messages)
    read = {**call, "function": {"name": "f", "arguments": {"a": 1}}}
    assert payload["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "ab"},
        {"role": "assistant", "content": "", "tool_calls": [read]},
        {"role": "tool", "tool_call_id": "c", "content": "5"},
    ]


def test_an_idempotency_key_gives_the_same_answer(letters: OpenAI) -> None:
    """For each shape of answer, so that one of several choices is not taken for one of one."""
    ids, keys = [], {"Idempotency-Key": "mine"}
    for n in (1, 1, 2, 2):
        got = letters.completions.create(
            model="", prompt="Once", max_tokens=2, n=n, extra_headers=keys
        )
        ids.append(got.id)
    assert ids[0] == ids[1]
    assert ids[2] == ids[3]
    assert len(set(ids)) == 2
    chat = letters.chat.completions.create(
        model="", messages=MESSAGES, max_tokens=2, extra_headers=keys
    )
    assert chat.id.startswith("chatcmpl-")


def test_models(letters: OpenAI) -> None:
    [model] = letters.models.list().data
    assert model.id == "model-free"
    assert letters.models.retrieve("model-free").id == "model-free"
    with pytest.raises(openai.NotFoundError) as raised:
        letters.models.retrieve("gpt/9")
    assert raised.value.code == "model_not_found"


def test_no_model_before_a_worker_came(openai_client: OpenAI) -> None:
    assert openai_client.models.list().data == []

"""Log-probabilities of prompts over HTTP, with the shipped model: `echo` and `prompt_logprobs`."""

from __future__ import annotations

from typing import Any

import httpx2
import openai
import pytest
from openai import OpenAI

from tests.producer.gateway.living import LiveGateway

PROMPT = "Once upon a time, there was a fox 🦊 who"
IDS = [5, 800, 3, 1200, 77, 400]
ASKED: dict[str, Any] = {"model": "", "temperature": 0, "echo": True, "logprobs": 2}


def columns(choice: Any) -> tuple[list[str], list[float | None], list[Any], list[int]]:
    told = choice.logprobs
    return told.tokens, told.token_logprobs, told.top_logprobs, told.text_offset


def check_shape(choice: Any, num_prompt_tokens: int, num_output_tokens: int) -> None:
    tokens, logprobs, top, offsets = columns(choice)
    total = num_prompt_tokens + num_output_tokens
    assert len(tokens) == len(logprobs) == len(top) == len(offsets) == total
    assert logprobs[0] is top[0] is None
    assert all(it is not None and it <= 0 for it in logprobs[1:])
    assert all(1 <= len(it) <= 3 for it in top[1:]), "two, and the chosen one, by their texts"
    assert offsets == [sum(map(len, tokens[:at])) for at in range(total)]


def test_the_prompt_comes_first(stories: OpenAI) -> None:
    """Its tokens are those that the answer's `prompt_logprobs` has, and the output follows."""
    got = stories.completions.create(
        prompt=PROMPT, max_tokens=5, extra_body={"prompt_logprobs": 2}, **ASKED
    )
    plain = stories.completions.create(
        model="", prompt=PROMPT, temperature=0, max_tokens=5, logprobs=2
    )
    [choice], [without] = got.choices, plain.choices
    assert got.usage is not None
    assert choice.text == PROMPT + without.text
    check_shape(choice, got.usage.prompt_tokens, 5)
    ours, output = columns(choice), columns(without)
    assert [it[-5:] for it in ours[:3]] == [*output[:3]]
    told = choice.model_extra["prompt_logprobs"]
    assert told[0] is None
    for token, logprob, top, place in zip(*(it[1:-5] for it in ours[:3]), told[1:], strict=True):
        first = next(iter(place.values()))
        assert (first["decoded_token"], first["logprob"]) == (token, logprob)
        by_text = {it["decoded_token"]: it["logprob"] for it in place.values()}
        assert "\ufffd" in token or by_text == top
        by_rank = sorted(place.values(), key=lambda it: it["rank"])
        assert sorted(by_rank, key=lambda it: -it["logprob"]) == by_rank
        assert [it["rank"] for it in by_rank[:2]] == [1, 2]


def test_what_was_generated_is_scored_the_same(stories: OpenAI) -> None:
    """The generated tokens are sent again as a prompt of token ids, without further output."""
    ids, generated = list(IDS), []
    for _ in range(3):
        likeliest = stories.completions.create(
            model="", prompt=[*ids, 9], max_tokens=1, extra_body={"prompt_logprobs": 1}
        )
        place = likeliest.choices[0].model_extra["prompt_logprobs"][-1]  # type: ignore[index]
        [best] = [token_id for token_id, it in place.items() if it["rank"] == 1]
        got = stories.completions.create(
            model="", prompt=ids, temperature=0, max_tokens=1, logprobs=0
        )
        generated += columns(got.choices[0])[1]
        assert generated[-1] == place[best]["logprob"]
        ids.append(int(best))
    got = stories.completions.create(prompt=ids, max_tokens=0, **ASKED)
    [choice] = got.choices
    check_shape(choice, len(ids), 0)
    assert columns(choice)[1][-3:] == generated
    assert [max(it.values()) for it in columns(choice)[2][-3:]] == generated
    assert choice.text == "".join(columns(choice)[0])
    assert choice.finish_reason == "length"
    assert got.usage is not None
    assert (got.usage.prompt_tokens, got.usage.completion_tokens) == (len(ids), 0)


@pytest.mark.parametrize("max_tokens", [0, 4])
@pytest.mark.parametrize("prompt", [PROMPT, IDS], ids=["text", "ids"])
def test_a_stream_says_the_same(stories: OpenAI, prompt: Any, max_tokens: int) -> None:
    fields: dict[str, Any] = {"prompt": [prompt, prompt], "max_tokens": max_tokens, **ASKED}
    whole = stories.completions.create(**fields)
    text = ["", ""]
    found: list[list[list[Any]]] = [[[], [], [], []], [[], [], [], []]]
    for chunk in stories.completions.create(**fields, stream=True):
        for choice in chunk.choices:
            if not text[choice.index]:
                assert choice.logprobs.token_logprobs[0] is None, "the prompt comes first"
            text[choice.index] += choice.text
            if choice.logprobs is not None:
                for column, more in zip(found[choice.index], columns(choice), strict=True):
                    column += more
    assert text == [choice.text for choice in whole.choices]
    assert found == [[*columns(choice)] for choice in whole.choices]
    assert found[0] == found[1]


def events_of(stream: str) -> list[str]:
    """Without comments, and without the end."""
    events = [it.removeprefix(": waiting\n") for it in stream.split("\n\n")]
    return [it for it in events if it.startswith("id: ")]


def test_a_client_that_comes_back(stories_gateway: LiveGateway) -> None:
    """From any position, the rest is that of the whole stream."""
    # Nothing is drafted before `min_tokens`, so an event has one token.
    counts = {"max_tokens": 4, "min_tokens": 4}
    body = {**ASKED, "prompt": IDS, **counts, "stream": True, "detach": True}
    with httpx2.Client(base_url=stories_gateway.base_url.removesuffix("/v1"), timeout=None) as http:
        answer = http.post("/v1/completions", json=body)
        url, events = answer.headers["X-Stream-Url"], events_of(answer.text)
        assert len(events) == 4
        assert events_of(http.get(url).text) == events
        for at, event in enumerate(events):
            number = event.partition("\n")[0].removeprefix("id: ")
            rest = http.get(url, headers={"Last-Event-ID": number}).text
            assert events_of(rest) == events[at + 1 :]


def test_echo_of_token_ids(stories: OpenAI) -> None:
    """Whole characters, though a token may have a part of one."""
    fields: dict[str, Any] = {"model": "", "echo": True, "max_tokens": 3, "temperature": 0}
    scored = stories.completions.create(
        model="", prompt=PROMPT, max_tokens=1, extra_body={"prompt_logprobs": 0}
    )
    _, *places = scored.choices[0].model_extra["prompt_logprobs"]  # type: ignore[index]
    ids = [int(token_id) for place in places for token_id in place]
    assert any("\ufffd" in it["decoded_token"] for place in places for it in place.values())
    got = stories.completions.create(prompt=ids, **fields).choices[0]
    assert got.text.startswith(" upon a time, there was a fox 🦊 who")
    assert got.logprobs is None


def test_a_chat(stories: OpenAI) -> None:
    got = stories.chat.completions.create(
        model="",
        messages=[{"role": "user", "content": "Tell me a story."}],
        max_tokens=2,
        n=2,
        extra_body={"prompt_logprobs": 1},
    )
    assert got.usage is not None
    assert got.model_extra is not None
    told = got.model_extra["prompt_logprobs"]
    assert len(told) == got.usage.prompt_tokens
    assert told[0] is None
    assert all(1 <= len(it) <= 2 for it in told[1:])


def test_an_engine_that_cannot(letters: OpenAI) -> None:
    for fields in ({"extra_body": {"prompt_logprobs": 0}}, {"echo": True, "logprobs": 1}):
        with pytest.raises(openai.BadRequestError) as raised:
            letters.completions.create(model="", prompt="Hi", max_tokens=1, **fields)
        assert (raised.value.code, raised.value.param) == ("unsupported", "prompt_logprobs")
    got = letters.completions.create(model="", prompt="Hi", echo=True, max_tokens=0)
    assert got.choices[0].text == "Hi"

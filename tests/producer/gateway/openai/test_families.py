"""From a worker's tokens to what clients get, for models that write each in their own way.

The tokens are those that a request names in its `metadata`; all else is as in production.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx2
import pytest
from openai import BadRequestError, OpenAI

from promptq import Client
from promptq.producer.batches.local_batch import run_batch
from promptq.shared.errors import InvalidRequestError, RequestFailedError
from promptq.shared.protocol.claims import ModelIdentity
from promptq.worker.engine.api.messages import EngineAbilities
from promptq.worker.engine.core.llm_engine import LLMEngine
from promptq.worker.engine.core.model_free import ModelFreeStep
from promptq.worker.engine.core.runner import SampledToken
from promptq.worker.engine.core.sequence import Batch
from promptq.worker.serve.build import Served
from promptq.worker.text.grammars.schema_masks import Grammars
from promptq.worker.text.output_styles import style_of
from promptq.worker.text.tokenizer import HuggingFaceTokenizer
from tests.producer.batches.conftest import read_lines, write_lines
from tests.producer.gateway.living import LiveGateway, live_gateway, live_worker
from tests.producer.gateway.played import continued, read_frames
from tests.support.model_free import ModelFreeRunner
from tests.support.roles import as_role
from tests.support.servers import embedded_server
from tests.worker.text import formats
from tests.worker.text.families import ARGUMENTS, FAMILIES, NAMES, TOOLS
from tests.worker.text.formats import FORMATS

MESSAGES: list[Any] = [{"role": "user", "content": "Hi"}]
END = 2
NAMED = FAMILIES["Mistral, named"]
MODELS = {
    # The special tokens are marks, and so are those of reasoning.
    "Mistral, named": ("", "[THINK]I think.\n[/THINK]"),
    # The prompt begins the reasoning.
    "Qwen3-Coder": ("<think>\n", "I think.\n</think>\n\n"),
    "DeepSeek V3.1": ("", "<think>I think.</think>"),
}
"""How a model's prompt ends, and how it reasons."""
RENDERED = ("gpt-oss", "minimax-m2", "deepseek-v4", "gemma-4")
"""Formats whose outputs are what their templates render."""


class ScriptedRunner(ModelFreeRunner):
    """A runner that returns to each request the tokens of the text in its `metadata`."""

    abilities = EngineAbilities(grammars=True)
    vocab_size = 2176

    def __init__(self, tokenizer: HuggingFaceTokenizer) -> None:
        super().__init__(num_blocks=1024)
        self._tokenizer = tokenizer

    def launch(self, batch: Batch, after: ModelFreeStep | None = None) -> ModelFreeStep:
        sampled = []
        for share in batch.sampling:
            request = share.sequence.request
            text = (getattr(request.params, "metadata", None) or {})["says"]
            script = [*self._tokenizer.encode_text(text), END]
            first = share.sequence.num_output_tokens + share.num_ahead
            sampled.append([SampledToken(script[first + row]) for row in range(share.num_samples)])
        super().launch(batch, after)
        return ModelFreeStep(batch, sampled)


def served(name: str) -> Served:
    if name in FORMATS:
        tokenizer = FORMATS[name].tokenizer()
    else:
        tokenizer = FAMILIES[name].tokenizer(MODELS[name][0])
    ends = frozenset({END})
    runner = ScriptedRunner(tokenizer)
    return Served(
        engine=LLMEngine(runner, max_num_seqs=16, max_num_batched_tokens=512, speculative_tokens=0),
        tokenizer=tokenizer,
        identity=ModelIdentity(name, name, style_of(tokenizer)),
        end_token_ids=ends,
        device="none",
        dtype="none",
        grammars=Grammars(tokenizer, runner.vocab_size, ends),
    )


@pytest.fixture(scope="module")
def families_url() -> Iterator[str]:
    """A server with a queue and a worker for each model."""
    with embedded_server() as default, ExitStack() as stack:
        url = as_role("producer", default)
        for name in (*MODELS, *RENDERED):
            queue = name if name in FORMATS else name[:4].lower()
            stack.enter_context(
                live_worker(url, served(name), queue=queue, max_events_per_second=math.inf)
            )
        yield url


@pytest.fixture(scope="module")
def families_gateway(families_url: str) -> Iterator[LiveGateway]:
    with live_gateway(families_url) as gateway:
        yield gateway


@pytest.fixture(scope="module")
def families_client(families_gateway: LiveGateway) -> Iterator[OpenAI]:
    with OpenAI(base_url=families_gateway.base_url, api_key="none", max_retries=0) as client:
        yield client


def asking(name: str, says: str, **fields: Any) -> dict[str, Any]:
    return {"model": name, "messages": MESSAGES, "metadata": {"says": says}, **fields}


def all_parts(name: str) -> str:
    """Reasoning, content and two calls."""
    return MODELS[name][1] + FAMILIES[name].content + FAMILIES[name].calls


def put_together(chunks: list[Any]) -> dict[str, Any]:
    """The message of a stream."""
    message: dict[str, Any] = {"role": "", "content": "", "reasoning": "", "reasoning_content": ""}
    calls: list[dict[str, Any]] = []
    for chunk in chunks:
        for choice in chunk["choices"]:
            delta = choice["delta"]
            for field in message:
                message[field] += delta.get(field) or ""
            for call in delta.get("tool_calls", ()):
                if "id" in call:
                    assert call["index"] == len(calls)
                    calls.append({"id": "", "type": "function", "function": {"arguments": ""}})
                    calls[-1]["id"] = call["id"]
                    calls[-1]["function"]["name"] = call["function"]["name"]
                calls[call["index"]]["function"]["arguments"] += call["function"]["arguments"]
    message["tool_calls"] = calls
    return {name: value for name, value in message.items() if value}


def without_ids(message: dict[str, Any]) -> dict[str, Any]:
    """Only what is there, and no ids of calls."""
    calls = [{**call, "id": ""} for call in message.get("tool_calls", ())]
    return {name: value for name, value in {**message, "tool_calls": calls}.items() if value}


@pytest.mark.parametrize("name", MODELS)
def test_reasoning_content_and_calls(families_client: OpenAI, name: str) -> None:
    got = families_client.chat.completions.create(**asking(name, all_parts(name), tools=TOOLS))
    [choice] = got.choices
    message = choice.message.model_dump()
    assert message["reasoning_content"] == message["reasoning"] == "I think."
    assert choice.message.content == FAMILIES[name].content
    assert choice.finish_reason == "tool_calls"
    calls: list[Any] = choice.message.tool_calls or []
    assert [call.function.name for call in calls] == [*NAMES]
    for call, arguments in zip(calls, ARGUMENTS, strict=True):
        assert json.loads(call.function.arguments) == json.loads(arguments)
    assert len({call.id for call in calls}) == 2
    [reasoning] = re.findall(r"I think\.\n?", MODELS[name][1])
    assert got.usage is not None
    assert got.usage.completion_tokens_details is not None
    count = got.usage.completion_tokens_details.reasoning_tokens
    assert count == len(FAMILIES[name].tokenizer().encode_text(reasoning))


@pytest.mark.parametrize("name", MODELS)
def test_a_stream_read_again_from_anywhere_is_the_same(
    families_gateway: LiveGateway, name: str
) -> None:
    body = asking(name, all_parts(name), tools=TOOLS, detach=True)
    with httpx2.Client(base_url=families_gateway.url, timeout=30) as http:
        whole = http.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]
        with http.stream("POST", "/v1/chat/completions", json={**body, "stream": True}) as response:
            url = response.headers["X-Stream-Url"]
            frames = list(read_frames(response))
        chunks = [chunk for _, chunk in frames if chunk != "[DONE]"]
        assert without_ids(put_together(chunks)) == without_ids(whole)
        deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
        assert sum("reasoning_content" in delta for delta in deltas) > 1
        assert sum("tool_calls" in delta for delta in deltas) > 4, "arguments come as they are made"
        assert not any({"content", "reasoning"} <= delta.keys() for delta in deltas)
        for at, (event_id, chunk) in enumerate(frames):
            if chunk != "[DONE]" and (at < 4 or at % 19 == 0):
                with continued(http, url, event_id) as again:
                    assert again.rest() == frames[at + 1 :]
        with continued(http, url) as again:
            assert again.rest() == frames


@pytest.mark.matrix(1)
@pytest.mark.parametrize("name", RENDERED)
def test_all_apis_read_what_a_template_renders(families_gateway: LiveGateway, name: str) -> None:
    """The chat, Anthropic's messages and the responses, whole and streamed."""
    function = {"name": "get_weather", "arguments": formats.ARGUMENTS}
    message = {
        "content": "",
        "reasoning_content": "I think.",
        "tool_calls": [{"id": "c", "type": "function", "function": function}],
    }
    expected = ("I think.", "", "get_weather", formats.ARGUMENTS)
    body = asking(name, FORMATS[name].written(message), tools=formats.TOOLS[:1])
    of_anthropic = {
        **body,
        "max_tokens": 2000,
        "tools": [{"name": "get_weather", "input_schema": formats.SCHEMA}],
    }
    of_responses = {
        "model": name,
        "input": "Hi",
        "metadata": body["metadata"],
        "tools": [{"type": "function", **formats.TOOLS[0]["function"], "strict": False}],
    }
    with httpx2.Client(base_url=families_gateway.url, timeout=30) as http:
        whole = http.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]
        assert read_chat(whole) == expected
        streamed = http.post("/v1/chat/completions", json={**body, "stream": True})
        chunks = [chunk for _, chunk in read_frames(streamed) if chunk != "[DONE]"]
        assert read_chat(put_together(chunks)) == expected

        blocks = http.post("/v1/messages", json=of_anthropic).json()["content"]
        by_type = {block["type"]: block for block in blocks}
        call = by_type["tool_use"]
        assert [by_type["thinking"]["thinking"], call["name"]] == ["I think.", "get_weather"]
        assert call["input"] == formats.ARGUMENTS
        assert not by_type.get("text", {}).get("text", "").strip()
        streamed = http.post("/v1/messages", json={**of_anthropic, "stream": True})
        deltas = [event["delta"] for _, event in read_frames(streamed) if "delta" in event]
        texts = {
            field: "".join(delta.get(field, "") for delta in deltas)
            for field in ("thinking", "partial_json")
        }
        assert texts["thinking"] == "I think."
        assert json.loads(texts["partial_json"]) == formats.ARGUMENTS

        response = http.post("/v1/responses", json=of_responses).json()
        items = {item["type"]: item for item in response["output"]}
        assert items["reasoning"]["content"][0]["text"] == "I think."
        assert items["function_call"]["name"] == "get_weather"
        assert json.loads(items["function_call"]["arguments"]) == formats.ARGUMENTS
        streamed = http.post("/v1/responses", json={**of_responses, "stream": True})
        events = [event for _, event in read_frames(streamed)]
        arguments = "".join(
            event["delta"]
            for event in events
            if event["type"] == "response.function_call_arguments.delta"
        )
        assert json.loads(arguments) == formats.ARGUMENTS


def read_chat(message: dict[str, Any]) -> tuple[Any, ...]:
    """Reasoning, content, and name and arguments of the one call."""
    [call] = message["tool_calls"]
    function = call["function"]
    content = (message.get("content") or "").strip()
    return message["reasoning"], content, function["name"], json.loads(function["arguments"])


def test_a_batch_gives_the_same_messages(
    families_client: OpenAI, families_url: str, tmp_path: Path
) -> None:
    name = "Mistral, named"
    bodies = [
        asking(name, all_parts(name), tools=TOOLS),
        asking(name, all_parts(name)),
        asking(name, FAMILIES[name].forced, tools=TOOLS, tool_choice="required", max_tokens=5),
    ]
    lines = [
        {"custom_id": str(n), "method": "POST", "url": "/v1/chat/completions", "body": body}
        for n, body in enumerate(bodies)
    ]
    source = write_lines(tmp_path / "in.jsonl", [*lines])
    run_batch(source, tmp_path / "out.jsonl", server=as_role("gateway", families_url))
    written = read_lines(tmp_path / "out.jsonl")
    for n, body in enumerate(bodies):
        raw = families_client.chat.completions.with_raw_response.create(**body)
        ours = json.loads(raw.text)
        theirs = written[str(n)]["response"]["body"]
        [our_choice], [their_choice] = ours["choices"], theirs["choices"]
        assert without_ids(their_choice["message"]) == without_ids(our_choice["message"])
        assert their_choice["finish_reason"] == our_choice["finish_reason"]
        del ours["usage"]["prompt_tokens_details"], theirs["usage"]["prompt_tokens_details"]
        assert theirs["usage"] == ours["usage"]


@pytest.mark.parametrize("name", ["Mistral, named", "DeepSeek V3.1"])
def test_a_forced_call_that_is_cut(families_gateway: LiveGateway, name: str) -> None:
    """A stream and a whole answer say the same: no call yet, or one with some arguments."""
    text, seen = FAMILIES[name].forced, set[str]()
    num_tokens = len(FAMILIES[name].tokenizer().encode_text(text))
    body = asking(name, text, tools=TOOLS[1:], tool_choice="required")
    with httpx2.Client(base_url=families_gateway.url, timeout=30) as http:
        for max_tokens in (1, 2, 3, num_tokens - 1, num_tokens, num_tokens + 1):
            cut = {**body, "max_tokens": max_tokens}
            [whole] = http.post("/v1/chat/completions", json=cut).json()["choices"]
            streamed = http.post("/v1/chat/completions", json={**cut, "stream": True})
            chunks = [chunk for _, chunk in read_frames(streamed) if chunk != "[DONE]"]
            assert without_ids(put_together(chunks)) == without_ids(whole["message"])
            assert whole["message"]["content"] is None
            reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
            assert reasons[-1] == whole["finish_reason"]
            calls = whole["message"].get("tool_calls")
            seen.add(calls[0]["function"]["arguments"] if calls else "no call")
            is_cut = max_tokens < num_tokens
            assert whole["finish_reason"] == ("length" if is_cut else "tool_calls")
    assert seen >= {"no call", "{}"}


def test_a_text_without_tools_or_reasoning_is_content(families_client: OpenAI) -> None:
    """Also where it ends before it can be told."""
    for says, max_tokens in (("Yes.", 9), ("<thi", 9), ("<think>", 1)):
        got = families_client.chat.completions.create(
            **asking("DeepSeek V3.1", says, max_tokens=max_tokens)
        )
        message = got.choices[0].message.model_dump()
        assert message["content"] == says.removesuffix("<think>")
        assert "reasoning" not in message


@pytest.mark.parametrize("stop", ["<|im_start|>", ["zebra", "<|im_start|>", "never"]])
def test_a_stop_string_that_is_a_special_token_ends_the_output_there(
    families_url: str, families_client: OpenAI, stop: Any
) -> None:
    """Such a token is no text, so a search in the text would not find it."""
    says = "Hello<|im_start|> there"
    with Client(families_url, queue="mist") as client:
        fields: Any = {"messages": MESSAGES, "metadata": {"says": says}, "stop": stop}
        result = client.generate(**fields)
        assert (result.text, result.finish_reason) == ("Hello", "stop")
        assert result.stop_reason == "<|im_start|>"
        num_tokens = len(NAMED.tokenizer().encode_text(says))
        later = client.generate(**fields, min_tokens=num_tokens + 1)
        assert (later.text, later.stop_reason) == ("Hello there", None)
    got = families_client.chat.completions.create(**asking("Mistral, named", says, stop=stop))
    assert got.choices[0].message.content == "Hello"


def test_a_stop_string_that_is_the_models_end_token_is_the_reason(families_url: str) -> None:
    with Client(families_url, queue="mist") as client:
        fields: Any = {"messages": MESSAGES, "metadata": {"says": "Hello"}, "stop": "<|im_end|>"}
        for ignore_eos in (False, True):
            result = client.generate(**fields, ignore_eos=ignore_eos)
            assert (result.text, result.stop_reason) == ("Hello", "<|im_end|>")


def test_a_stop_string_with_a_special_token_and_more_is_refused(
    families_url: str, families_client: OpenAI
) -> None:
    """Unless the token is a mark, which is text in this chat."""
    says = '[TOOL_CALLS]stop-all[ARGS]{"a": 1}'
    stop = ["zebra", "[ARGS]{"]
    with Client(families_url, queue="mist") as client:
        fields: Any = {"messages": MESSAGES, "metadata": {"says": says}, "stop": stop}
        result = client.generate(**fields, tools=TOOLS)
        assert (result.text, result.stop_reason) == ("[TOOL_CALLS]stop-all", "[ARGS]{")
        with pytest.raises(RequestFailedError) as caught:
            client.generate(**fields)
    said = (
        "stop: '[ARGS]{' holds '[ARGS]', a special token, which is never in a text; '[ARGS]' alone"
        " ends the output at that token"
    )
    assert said in str(caught.value)
    with pytest.raises(
        BadRequestError, match=re.escape("stop: '\\n<|im_start|>' holds '<|im_start")
    ):
        families_client.chat.completions.create(
            **asking("Mistral, named", says, stop="\n<|im_start|>")
        )


def test_messages_of_any_client_are_rendered_alike(
    families_gateway: LiveGateway, families_client: OpenAI, families_url: str
) -> None:
    """Over Redis as over HTTP, streamed or not."""
    name = "Mistral, named"
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "null"}}
    messages: list[Any] = [
        {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
    ]
    spelt = [
        {"role": "user", "content": "Hi"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{**call, "function": {"name": "f", "arguments": {}}}],
        },
    ]
    call["function"] = {"name": "f", "arguments": "[]"}
    broken = "messages[1].tool_calls[0].function.arguments: must be a JSON object, got '[]'"
    with Client(families_url, queue="mist") as client:
        told = client.generate(messages=spelt, tokenize=True).prompt_token_ids
        with pytest.raises(InvalidRequestError, match=re.escape(broken)):
            client.enqueue(messages=messages)
    for stream in (False, True):
        with pytest.raises(BadRequestError, match=re.escape(broken)) as caught:
            families_client.chat.completions.create(
                **{**asking(name, "Yes"), "messages": messages}, stream=stream
            )
        assert caught.value.param == "messages"
    call["function"] = {"name": "f", "arguments": "null"}
    with Client(families_url, queue="mist") as client:
        assert client.generate(messages=messages, tokenize=True).prompt_token_ids == told
    body = {"model": name, "messages": messages}
    answer = httpx2.post(families_gateway.url + "/tokenize", json=body, timeout=None)
    assert answer.json()["tokens"] == told


def test_an_empty_prompt_is_refused_where_no_token_goes_before_a_text(
    families_client: OpenAI,
) -> None:
    with pytest.raises(BadRequestError, match="prompt: is empty, and this model's tokenizer puts"):
        families_client.completions.create(model="Mistral, named", prompt="")

"""OpenAI's client for Python: all but tools and responses."""

from __future__ import annotations

import json
import re
import time
from typing import Any

import openai
import trying
from trying import attempt, same, same_chat

client = openai.OpenAI(max_retries=0)
CHAT: Any = {
    "model": trying.MODEL,
    "messages": trying.MESSAGES,
    "temperature": 0,
    "max_tokens": trying.MAX_TOKENS,
}


@attempt("models")
def _() -> Any:
    same("models", {it.id for it in client.models.list()}, {trying.ALIAS, trying.MODEL})
    return client.models.retrieve(trying.MODEL).id


@attempt("chat")
def _() -> str:
    return same_chat(client.chat.completions.create(**CHAT))


FIELDS: dict[str, Any] = {
    "max_completion_tokens": trying.MAX_TOKENS,
    "metadata": {"purpose": "test"},
    "modalities": ["text"],
    "n": 1,
    "prediction": {"type": "content", "content": "Once"},
    "prompt_cache_key": "key",
    "prompt_cache_retention": "24h",
    "reasoning_effort": "low",
    "safety_identifier": "somebody",
    "service_tier": "flex",
    "store": False,
    "user": "somebody",
    "verbosity": "medium",
}
"""Fields that programs send, and that do not change the answer of this model."""
for name, value in FIELDS.items():

    @attempt(f"chat by an alias, with {name}")
    def _(name: str = name, value: Any = value) -> str:
        most = {} if name == "max_completion_tokens" else {"max_tokens": trying.MAX_TOKENS}
        fields: Any = {"model": trying.ALIAS, "messages": trying.MESSAGES, "temperature": 0}
        answer = client.chat.completions.create(**fields, **most, **{name: value})
        if name == "service_tier":
            same("tier", answer.service_tier, value)
        return same_chat(answer)


@attempt("streamed chat with usage")
def _() -> str:
    wanted = trying.chat()
    stream = client.chat.completions.create(
        **CHAT, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    choices = [chunk.choices[0] for chunk in chunks if chunk.choices]
    assert len(choices) > 2, f"only {len(choices)} chunks"
    same("text", "".join(it.delta.content or "" for it in choices), wanted.text)
    same("finish_reason", choices[-1].finish_reason, wanted.finish_reason)
    usage = chunks[-1].usage
    same("usage", usage and (usage.prompt_tokens, usage.completion_tokens), wanted.usage)
    return f"{len(chunks)} chunks"


@attempt("chat.completions.stream")
def _() -> str:
    """An answer that is cut is an error there, so a stop string ends it."""
    wanted, fields = trying.chat(stop=["."]), {"stream_options": {"include_usage": True}}
    with client.chat.completions.stream(**CHAT, **fields, stop=["."]) as stream:
        deltas = [event.delta for event in stream if event.type == "content.delta"]
        got = stream.get_final_completion()
    same("deltas", "".join(deltas), wanted.text)
    same("text", got.choices[0].message.content, wanted.text)
    same("finish_reason", got.choices[0].finish_reason, "stop")
    assert got.usage
    same("usage", (got.usage.prompt_tokens, got.usage.completion_tokens), wanted.usage)
    return wanted.text


@attempt("logprobs of a chat")
def _() -> str:
    [choice] = client.chat.completions.create(**CHAT, logprobs=True, top_logprobs=2).choices
    content = (choice.logprobs and choice.logprobs.content) or []
    same("tokens", "".join(it.token for it in content), trying.chat().text)
    same("top", {len(it.top_logprobs) for it in content}, {2})
    return f"{len(content)} tokens"


@attempt("a choice and a regular expression, by vLLM's names")
def _() -> str:
    got = []
    for asked in ({"choice": ["fox", "hare"]}, {"regex": "[a-c]{3}"}):
        answer = client.chat.completions.create(**CHAT, extra_body={"structured_outputs": asked})
        got.append(answer.choices[0].message.content or "")
        same("finish_reason", answer.choices[0].finish_reason, "stop")
    assert got[0] in ("fox", "hare"), got
    assert re.fullmatch("[a-c]{3}", got[1]), got
    return ", ".join(got)


@attempt("completion")
def _() -> str:
    fields: Any = {"prompt": trying.PROMPT, "temperature": 0, "max_tokens": trying.MAX_TOKENS}
    got, wanted = client.completions.create(model=trying.MODEL, **fields), trying.completion()
    same("text", got.choices[0].text, wanted.text)
    same("finish_reason", got.choices[0].finish_reason, wanted.finish_reason)
    assert got.usage
    same("usage", (got.usage.prompt_tokens, got.usage.completion_tokens), wanted.usage)
    chunks = list(client.completions.create(model=trying.MODEL, **fields, stream=True))
    same("streamed text", "".join(it.choices[0].text for it in chunks), wanted.text)
    return got.choices[0].text


@attempt("completion with best_of 1, an empty suffix, and a seed below 0")
def _() -> str:
    fields: Any = {"prompt": trying.PROMPT, "temperature": 0, "max_tokens": trying.MAX_TOKENS}
    for more in ({"best_of": 1}, {"suffix": ""}, {"seed": -1}):
        got = client.completions.create(model=trying.MODEL, **fields, **more)
        same("text", got.choices[0].text, trying.completion().text)
    return got.choices[0].text


@attempt("completion with echo and logprobs")
def _() -> str:
    got = client.completions.create(
        model=trying.MODEL,
        prompt=trying.PROMPT,
        temperature=0,
        max_tokens=4,
        echo=True,
        logprobs=1,
    )
    logprobs = got.choices[0].logprobs
    assert logprobs, "no logprobs"
    same("text", got.choices[0].text.startswith(trying.PROMPT), True)
    same("tokens", "".join(logprobs.tokens or []), got.choices[0].text)
    same("first logprob", (logprobs.token_logprobs or [0])[0], None)
    return f"{len(logprobs.tokens or [])} tokens"


@attempt("embeddings")
def _() -> str:
    got = client.embeddings.create(model=trying.MODEL, input=trying.TEXTS)  # asks for base64
    plain = client.embeddings.create(
        model=trying.MODEL, input=trying.TEXTS, encoding_format="float"
    )
    for one, other in zip(got.data, plain.data, strict=True):
        near = [abs(a - b) < 1e-5 for a, b in zip(one.embedding, other.embedding, strict=True)]
        assert all(near), "base64 and float differ"
    assert got.usage.prompt_tokens > 0
    return trying.are_vectors([it.embedding for it in got.data])


@attempt("batch")
def _() -> str:
    body = {**CHAT, "model": trying.MODEL}
    line = {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": body}
    file = client.files.create(file=("in.jsonl", json.dumps(line).encode()), purpose="batch")
    batch = client.batches.create(
        input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
    )
    while batch.status not in ("completed", "failed", "expired", "cancelled"):
        time.sleep(0.2)
        batch = client.batches.retrieve(batch.id)
    same("status", batch.status, "completed")
    answer = json.loads(client.files.content(batch.output_file_id or "").text)["response"]["body"]
    same("text", answer["choices"][0]["message"]["content"], trying.chat().text)
    return answer["choices"][0]["message"]["content"]


@attempt("error: unknown model")
def _() -> str:
    fields = {**CHAT, "model": trying.UNKNOWN}
    return trying.fails(
        lambda: client.chat.completions.create(**fields), "NotFoundError", *trying.UNKNOWN_SAYS
    )


@attempt("error: prompt too long")
def _() -> str:
    fields = {**CHAT, "messages": [{"role": "user", "content": trying.LONG}]}
    words = ("BadRequestError", "context_length_exceeded", *trying.LONG_SAYS)
    return trying.fails(lambda: client.chat.completions.create(**fields), *words)


@attempt("error: wrong API key")
def _() -> str:
    wrong = client.with_options(api_key="wrong")
    return trying.fails(lambda: wrong.models.list(), "AuthenticationError", "invalid_api_key")

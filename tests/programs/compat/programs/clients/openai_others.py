"""OpenAI's client for Python: completions, embeddings, batches."""

from __future__ import annotations

import json
import time
from typing import Any

import openai
import trying
from trying import attempt, same

client = openai.OpenAI(max_retries=0)
CHAT: Any = {
    "model": trying.MODEL,
    "messages": trying.MESSAGES,
    "temperature": 0,
    "max_tokens": trying.MAX_TOKENS,
}


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

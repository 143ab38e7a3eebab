"""aisuite with its provider for OpenAI."""

from __future__ import annotations

from typing import Any

import aisuite
import trying
from trying import attempt, is_tale, same

client = aisuite.Client({"openai": {"api_key": trying.KEY, "base_url": trying.URL}})
FIELDS: Any = {"messages": trying.MESSAGES, "temperature": 0, "max_tokens": trying.MAX_TOKENS}
MODEL = f"openai:{trying.MODEL}"


@attempt("chat")
def _() -> str:
    got, wanted = client.chat.completions.create(MODEL, **FIELDS), trying.chat()
    same("text", got.choices[0].message.content, wanted.text)
    same("finish_reason", got.choices[0].finish_reason, wanted.finish_reason)
    usage = got.usage
    same("usage", (usage.prompt_tokens, usage.completion_tokens), wanted.usage)
    return got.choices[0].message.content


@attempt("streamed chat")
def _() -> str:
    chunks = list(client.chat.completions.create(MODEL, **FIELDS, stream=True))
    text = "".join(it.choices[0].delta.content or "" for it in chunks if it.choices)
    same("text", text, trying.chat().text)
    return f"{len(chunks)} chunks"


@attempt("forced tool call")
def _() -> str:
    fields = {**FIELDS, "max_tokens": 200, "tools": [trying.TOOL]}
    got = client.chat.completions.create(MODEL, **fields, tool_choice=trying.TOOL_CHOICE)
    [call] = got.choices[0].message.tool_calls
    is_tale(call.function.arguments)
    return call.function.arguments


@attempt("structured output")
def _() -> str:
    schema = {"name": "tale", "schema": trying.SCHEMA, "strict": True}
    form = {"type": "json_schema", "json_schema": schema}
    fields = {**FIELDS, "max_tokens": 200, "response_format": form}
    got = client.chat.completions.create(MODEL, **fields)
    is_tale(got.choices[0].message.content)
    return got.choices[0].message.content


@attempt("error: unknown model")
def _() -> str:
    def call() -> Any:
        return client.chat.completions.create(f"openai:{trying.UNKNOWN}", **FIELDS)

    return trying.fails(call, *trying.UNKNOWN_SAYS)


@attempt("error: prompt too long")
def _() -> str:
    fields = {**FIELDS, "messages": [{"role": "user", "content": trying.LONG}]}
    return trying.fails(lambda: client.chat.completions.create(MODEL, **fields), *trying.LONG_SAYS)

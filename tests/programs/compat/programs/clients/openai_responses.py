"""OpenAI's client for Python: the Responses API."""

from __future__ import annotations

from typing import Any

import openai
import trying
from tales import Tale
from trying import attempt, is_tale, same

client = openai.OpenAI(max_retries=0)
RESPONSE: Any = {
    "model": trying.MODEL,
    "instructions": trying.SYSTEM,
    "input": trying.QUESTION,
    "temperature": 0,
    "max_output_tokens": trying.MAX_TOKENS,
}


def same_response(got: Any) -> str:
    wanted = trying.chat()
    same("text", got.output_text, wanted.text)
    same("usage", (got.usage.input_tokens, got.usage.output_tokens), wanted.usage)
    same("status", got.status, "incomplete")
    same("reason", got.incomplete_details.reason, "max_output_tokens")
    return got.output_text


@attempt("response")
def _() -> str:
    return same_response(client.responses.create(**RESPONSE, store=False))


@attempt("streamed response")
def _() -> str:
    """The client takes an answer that is cut for an error."""
    wanted = trying.greeting()
    limits = {"input": trying.GREETING, "max_output_tokens": trying.ENOUGH_TOKENS}
    with client.responses.stream(**{**RESPONSE, **limits}, store=False) as stream:
        deltas = [it.delta for it in stream if it.type == "response.output_text.delta"]
        got = stream.get_final_response()
    assert len(deltas) > 2, f"only {len(deltas)} deltas"
    same("deltas", "".join(deltas), wanted.text)
    same("text", got.output_text, wanted.text)
    assert got.usage
    same("usage", (got.usage.input_tokens, got.usage.output_tokens), wanted.usage)
    same("status", got.status, "completed")
    return wanted.text


@attempt("response: forced tool call")
def _() -> str:
    tool: Any = {"type": "function", **trying.FUNCTION, "strict": True}
    got = client.responses.create(
        **{**RESPONSE, "max_output_tokens": 200},
        tools=[tool],
        tool_choice={"type": "function", "name": "paint"},
        store=False,
    )
    [call] = [it for it in got.output if it.type == "function_call"]
    same("name", call.name, "paint")
    is_tale(call.arguments)
    turns: Any = [{"role": "user", "content": trying.QUESTION}, call]
    turns.append({"type": "function_call_output", "call_id": call.call_id, "output": "painted"})
    second = client.responses.create(**{**RESPONSE, "input": turns}, tools=[tool], store=False)
    assert second.output_text
    return call.arguments


@attempt("response: structured output of a class")
def _() -> str:
    got = client.responses.parse(
        **{**RESPONSE, "max_output_tokens": 200}, text_format=Tale, store=False
    )
    is_tale(got.output_parsed)
    return got.output_text


@attempt("count of a response's input tokens")
def _() -> str:
    fields = {name: RESPONSE[name] for name in ("model", "instructions", "input")}
    count = client.responses.input_tokens.count(**fields).input_tokens
    same("tokens", count, trying.chat().usage[0])
    return str(count)

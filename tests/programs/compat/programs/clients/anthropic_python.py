"""Anthropic's client for Python: messages, streams, tools, counting, and the tool runner."""

from __future__ import annotations

from typing import Any, Literal

import anthropic
import trying
from anthropic import beta_async_tool, beta_tool
from trying import attempt, is_tale, same

client = anthropic.Anthropic(max_retries=0)
CALL: Any = {
    "model": trying.MODEL,
    "system": trying.SYSTEM,
    "messages": [{"role": "user", "content": trying.QUESTION}],
    "max_tokens": trying.MAX_TOKENS,
    "extra_body": {"temperature": 0},  # the client no longer has an argument for it
}
TOOL: Any = {"name": "paint", "description": "Paint a hero.", "input_schema": trying.SCHEMA}


def same_message(got: Any) -> str:
    wanted, [block] = trying.chat(), got.content
    same("text", block.text, wanted.text)
    same("stop_reason", got.stop_reason, "max_tokens")
    # Tokens that were found in a cache are counted separately.
    num_prompt_tokens = got.usage.input_tokens + (got.usage.cache_read_input_tokens or 0)
    same("usage", (num_prompt_tokens, got.usage.output_tokens), wanted.usage)
    return block.text


@attempt("message")
def _() -> str:
    return same_message(client.messages.create(**CALL))


@attempt("streamed message")
def _() -> str:
    with client.messages.stream(**CALL) as stream:
        pieces = list(stream.text_stream)
        assert len(pieces) > 2, f"only {len(pieces)} pieces"
        same("text", "".join(pieces), trying.chat().text)
        return same_message(stream.get_final_message())


@attempt("content and system as blocks with cache_control")
def _() -> str:
    kept = {"cache_control": {"type": "ephemeral"}}
    blocks: Any = {
        "system": [{"type": "text", "text": trying.SYSTEM, **kept}],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": trying.QUESTION, **kept}]}
        ],
        "metadata": {"user_id": "somebody"},
    }
    return same_message(client.messages.create(**{**CALL, **blocks}))


@attempt("forced tool call, and its result in a second turn")
def _() -> str:
    fields = {**CALL, "max_tokens": 200, "tools": [TOOL]}
    got = client.messages.create(**fields, tool_choice={"type": "tool", "name": "paint"})
    same("stop_reason", got.stop_reason, "tool_use")
    [call] = [block for block in got.content if block.type == "tool_use"]
    same("name", call.name, "paint")
    is_tale(call.input)
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "painted"}
    turns = [{"role": "assistant", "content": got.content}, {"role": "user", "content": [result]}]
    second = client.messages.create(**{**fields, "messages": [*CALL["messages"], *turns]})
    assert second.content
    return str(call.input)


@attempt("streamed tool call")
def _() -> str:
    fields = {**CALL, "max_tokens": 200, "tools": [TOOL], "tool_choice": {"type": "any"}}
    with client.messages.stream(**fields) as stream:
        [call] = [block for block in stream.get_final_message().content if block.type == "tool_use"]
    is_tale(call.input)
    return str(call.input)


@attempt("count of tokens")
def _() -> str:
    fields = {name: CALL[name] for name in ("model", "system", "messages")}
    count = client.messages.count_tokens(**fields).input_tokens
    same("tokens", count, trying.chat().usage[0])
    return str(count)


@attempt("models")
def _() -> str:
    names = [it.id for it in client.models.list()]
    assert trying.MODEL in names, names
    return str(names)


@attempt("error: unknown model")
def _() -> str:
    fields = {**CALL, "model": trying.UNKNOWN}
    return trying.fails(
        lambda: client.messages.create(**fields), "not_found_error", *trying.UNKNOWN_SAYS
    )


@attempt("error: prompt too long")
def _() -> str:
    fields = {**CALL, "messages": [{"role": "user", "content": trying.LONG}]}
    return trying.fails(
        lambda: client.messages.create(**fields), "invalid_request_error", *trying.LONG_SAYS
    )


FIELDS: Any = {
    "model": trying.MODEL,
    "system": trying.SYSTEM,
    "messages": [{"role": "user", "content": trying.QUESTION}],
    "max_tokens": 200,
    "tool_choice": {"type": "any"},
    "max_iterations": 2,
}
Hero = Literal["fox", "hare", "owl"]
painted: list[Any] = []


def paint(hero: Hero, friends: Literal[1, 2, 3]) -> str:
    """Paint a hero."""
    painted.append({"hero": hero, "friends": friends})
    return f"{friends} {hero}"


async def paint_later(hero: Hero, friends: Literal[1, 2, 3]) -> str:
    """Paint a hero."""
    return paint(hero, friends)


def ran(messages: list[Any]) -> str:
    """Checks that the model called the tool in both of its two turns. Returns the calls as text."""
    same("turns", (len(messages), len(painted)), (2, 2))
    for call in painted:
        is_tale(call)
    got = str(painted)
    painted.clear()
    return got


@attempt("the tool runner")
def _() -> str:
    client = anthropic.Anthropic(max_retries=0)
    return ran(list(client.beta.messages.tool_runner(**FIELDS, tools=[beta_tool(paint)])))


@attempt("the tool runner, streamed")
def _() -> str:
    client = anthropic.Anthropic(max_retries=0)
    runner = client.beta.messages.tool_runner(**FIELDS, tools=[beta_tool(paint)], stream=True)
    return ran([stream.get_final_message() for stream in runner])


@attempt("the tool runner, asynchronous")
async def _() -> str:
    client = anthropic.AsyncAnthropic(max_retries=0)
    runner = client.beta.messages.tool_runner(**FIELDS, tools=[beta_async_tool(paint_later)])
    return ran([message async for message in runner])


@attempt("error: context_management")
def _() -> str:
    client = anthropic.Anthropic(max_retries=0)
    fields = {**FIELDS, "tools": [beta_tool(paint)], "context_management": {"edits": []}}
    return trying.fails(
        lambda: client.beta.messages.tool_runner(**fields).until_done(), "context_management"
    )

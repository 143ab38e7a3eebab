"""OpenAI's client for Python: tools, and objects of a class."""

from __future__ import annotations

import json
from typing import Any

import openai
import trying
from tales import Tale
from trying import attempt, is_tale, same

client = openai.OpenAI(max_retries=0)
CHAT: Any = {
    "model": trying.MODEL,
    "messages": trying.MESSAGES,
    "temperature": 0,
    "max_tokens": trying.MAX_TOKENS,
}


@attempt("forced tool call")
def _() -> str:
    fields: Any = {
        **CHAT,
        "tools": [trying.TOOL],
        "tool_choice": trying.TOOL_CHOICE,
        "max_tokens": 200,
    }
    [choice] = client.chat.completions.create(**fields).choices
    [call] = choice.message.tool_calls or []
    same("name", call.function.name, "paint")
    same("finish_reason", choice.finish_reason in ("tool_calls", "stop"), True)
    is_tale(call.function.arguments)
    with client.chat.completions.stream(**fields) as stream:
        [streamed] = stream.get_final_completion().choices[0].message.tool_calls or []
    same("streamed arguments", streamed.function.arguments, call.function.arguments)
    return call.function.arguments


@attempt("strict tool of a class, in a second turn")
def _() -> str:
    fields: Any = {"model": trying.MODEL, "temperature": 0, "max_tokens": 200}
    tools = [openai.pydantic_function_tool(Tale, name="paint")]
    first = client.chat.completions.parse(
        **fields,
        messages=trying.MESSAGES,
        tools=tools,
        tool_choice="required",
        parallel_tool_calls=False,
    )
    [call] = first.choices[0].message.tool_calls or []
    is_tale(call.function.parsed_arguments)
    told = {"role": "tool", "tool_call_id": call.id, "content": "painted"}
    turns: Any = [*trying.MESSAGES, first.choices[0].message, told]
    second = client.chat.completions.create(**fields, messages=turns, tools=[trying.TOOL])
    assert second.choices[0].message.content
    return call.function.arguments


@attempt("structured output of a class")
def _() -> str:
    got = client.chat.completions.parse(**{**CHAT, "max_tokens": 200}, response_format=Tale)
    is_tale(got.choices[0].message.parsed)
    return got.choices[0].message.content or ""


@attempt("forced call of a tool without parameters")
def _() -> str:
    for parameters in ({}, {"type": "object", "properties": {}}):
        tool: Any = {"type": "function", "function": {"name": "now", "parameters": parameters}}
        fields: Any = {**CHAT, "tools": [tool], "tool_choice": "required", "max_tokens": 60}
        [choice] = client.chat.completions.create(**fields).choices
        calls = [it.function for it in choice.message.tool_calls or []]
        same("calls", [(it.name, json.loads(it.arguments)) for it in calls], [("now", {})])
    return "{}"


@attempt("forced tool call beside a response_format, as agents ask with an output class")
def _() -> str:
    schema = {"name": "tale", "schema": trying.SCHEMA, "strict": True}
    form = {"type": "json_schema", "json_schema": schema}
    tools = {"tools": [trying.TOOL], "tool_choice": trying.TOOL_CHOICE}
    fields: Any = {**CHAT, **tools, "response_format": form, "max_tokens": 200}
    [choice] = client.chat.completions.create(**fields).choices
    [call] = choice.message.tool_calls or []
    is_tale(call.function.arguments)
    return call.function.arguments


@attempt("an earlier call whose arguments were cut, sent back by a program that tries again")
def _() -> str:
    call = {"id": "a", "type": "function", "function": {"name": "paint", "arguments": '{"her'}}
    turns = [
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "a", "content": "the arguments are not JSON"},
    ]
    fields: Any = {**CHAT, "messages": [*trying.MESSAGES, *turns], "tools": [trying.TOOL]}
    [choice] = client.chat.completions.create(**fields).choices
    assert choice.message.content
    return choice.message.content


@attempt("tool_choice auto or none with an empty list of tools")
def _() -> str:
    for tool_choice in ("auto", "none"):
        fields: Any = {**CHAT, "tools": [], "tool_choice": tool_choice}
        [choice] = client.chat.completions.create(**fields).choices
        same("text", choice.message.content, trying.chat().text)
    return "a text"

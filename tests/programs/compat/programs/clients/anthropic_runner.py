"""Anthropic's tool runner for Python, which sends `thread` and goes on without it."""

from __future__ import annotations

from typing import Any, Literal

import anthropic
import trying
from anthropic import beta_async_tool, beta_tool
from trying import attempt, is_tale, same

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
    """In each of two turns the model had to call the tool."""
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

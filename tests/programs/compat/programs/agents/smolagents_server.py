"""smolagents: the model class, and an agent that calls a tool."""

from __future__ import annotations

from typing import Any

import trying
from smolagents import OpenAIServerModel, Tool, ToolCallingAgent
from smolagents.models import ChatMessage, MessageRole
from trying import attempt, is_tale, same

MESSAGES = [
    ChatMessage(MessageRole.SYSTEM, [{"type": "text", "text": trying.SYSTEM}]),
    ChatMessage(MessageRole.USER, [{"type": "text", "text": trying.QUESTION}]),
]


class Paint(Tool):
    name = "paint"
    description = "Paint a hero."
    inputs = {  # noqa: RUF012 # as its own documentation writes tools
        "hero": {"type": "string", "description": "who", "enum": ["fox", "hare", "owl"]},
        "friends": {"type": "integer", "description": "how many", "enum": [1, 2, 3]},
    }
    output_type = "string"

    def forward(self, hero: str, friends: int) -> str:
        return f"{friends} {hero}"


def model(name: str = trying.MODEL, max_tokens: int = trying.MAX_TOKENS) -> Any:
    return OpenAIServerModel(
        name, api_base=trying.URL, api_key=trying.KEY, temperature=0, max_tokens=max_tokens,
        client_kwargs={"max_retries": 0}, retry=False,
    )  # fmt: skip


@attempt("chat")
def _() -> str:
    got, wanted = model().generate(MESSAGES), trying.chat()
    same("text", got.content, wanted.text)
    usage = got.token_usage
    same("usage", (usage.input_tokens, usage.output_tokens), wanted.usage)
    return got.content


@attempt("streamed chat with usage")
def _() -> str:
    deltas, wanted = list(model().generate_stream(MESSAGES)), trying.chat()
    same("text", "".join(it.content or "" for it in deltas), wanted.text)
    [usage] = [it.token_usage for it in deltas if it.token_usage]
    same("usage", (usage.input_tokens, usage.output_tokens), wanted.usage)
    return f"{len(deltas)} deltas"


@attempt("forced tool call")
def _() -> str:
    got = model(max_tokens=200).generate(MESSAGES, tools_to_call_from=[Paint()])
    [call] = got.tool_calls
    same("name", call.function.name, "paint")
    is_tale(call.function.arguments)
    return str(call.function.arguments)


@attempt("structured output")
def _() -> str:
    schema = {"name": "tale", "schema": trying.SCHEMA, "strict": True}
    form = {"type": "json_schema", "json_schema": schema}
    got = model(max_tokens=200).generate(MESSAGES, response_format=form)
    is_tale(got.content)
    return got.content


@attempt("an agent's two steps")
def _() -> str:
    """The agent may answer or paint in each step, and has to answer after the last one."""
    agent = ToolCallingAgent([Paint()], model(max_tokens=200), max_steps=2, verbosity_level=0)
    agent.prompt_templates["system_prompt"] = trying.SYSTEM  # its own one is longer than the model
    agent.run(trying.QUESTION)
    calls = [
        call for step in agent.memory.steps for call in getattr(step, "tool_calls", None) or []
    ]
    assert calls, "no call"
    return f"{len(calls)} calls"


@attempt("error: unknown model")
def _() -> str:
    return trying.fails(lambda: model(trying.UNKNOWN).generate(MESSAGES), *trying.UNKNOWN_SAYS)


@attempt("error: prompt too long")
def _() -> str:
    long = [ChatMessage(MessageRole.USER, [{"type": "text", "text": trying.LONG}])]
    return trying.fails(lambda: model().generate(long), *trying.LONG_SAYS)

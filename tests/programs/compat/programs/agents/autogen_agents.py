"""AutoGen: the client of models, and an agent that calls a tool."""

from __future__ import annotations

from typing import Any

import trying
from autogen_agentchat.agents import AssistantAgent
from autogen_core.models import SystemMessage, UserMessage
from autogen_core.tools import FunctionTool
from autogen_ext.models.openai import OpenAIChatCompletionClient
from tales import Tale, paint
from trying import attempt, is_tale, same

INFO: Any = {
    "vision": False, "function_calling": True, "json_output": True, "structured_output": True,
    "family": "unknown",
}  # fmt: skip
MESSAGES = [SystemMessage(content=trying.SYSTEM), UserMessage(content=trying.QUESTION, source="me")]


TOOL = FunctionTool(paint, description="Paint a hero.")


def client(name: str = trying.MODEL, most: int = trying.MAX_TOKENS) -> Any:
    return OpenAIChatCompletionClient(
        model=name, base_url=trying.URL, api_key=trying.KEY, model_info=INFO, max_retries=0,
        temperature=0, max_tokens=most,
    )  # fmt: skip


def same_result(got: Any) -> str:
    wanted = trying.chat()
    same("text", got.content, wanted.text)
    same("usage", (got.usage.prompt_tokens, got.usage.completion_tokens), wanted.usage)
    same("finish_reason", got.finish_reason, "length")
    return str(got.content)


@attempt("chat")
async def _() -> str:
    return same_result(await client().create(MESSAGES))


@attempt("streamed chat with usage")
async def _() -> str:
    asked = client().create_stream(MESSAGES, include_usage=True)
    *pieces, got = [each async for each in asked]
    assert len(pieces) > 2, f"only {len(pieces)} pieces"
    return same_result(got)


@attempt("forced tool call")
async def _() -> str:
    got = await client(most=200).create(MESSAGES, tools=[TOOL], tool_choice=TOOL)
    [call] = got.content
    same("name", call.name, "paint")
    is_tale(call.arguments)
    return str(call.arguments)


@attempt("structured output of a class")
async def _() -> str:
    got = await client(most=200).create(MESSAGES, json_output=Tale)
    is_tale(got.content)
    return str(got.content)


@attempt("an agent's answer")
async def _() -> str:
    agent = AssistantAgent("teller", client(), system_message=trying.SYSTEM)
    got = (await agent.run(task=trying.QUESTION)).messages[-1].content
    same("text", got, trying.chat().text)
    return str(got)


@attempt("an agent with a tool that may be called")
async def _() -> str:
    agent = AssistantAgent("teller", client(), tools=[TOOL], system_message=trying.SYSTEM)
    got = (await agent.run(task=trying.QUESTION)).messages[-1].content
    assert got
    return str(got)


@attempt("error: unknown model")
async def _() -> str:
    return await trying.fails_later(
        client(trying.UNKNOWN).create(MESSAGES), "NotFoundError", *trying.UNKNOWN_SAYS
    )


@attempt("error: prompt too long")
async def _() -> str:
    return await trying.fails_later(
        client().create([UserMessage(content=trying.LONG, source="me")]),
        "BadRequestError",
        *trying.LONG_SAYS,
    )

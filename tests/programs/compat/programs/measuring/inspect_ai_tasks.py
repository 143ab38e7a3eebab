"""Inspect: a model on both APIs, and an evaluation with a tool."""

from __future__ import annotations

from typing import Any, Literal

import trying
from inspect_ai import Task
from inspect_ai import eval as evaluate
from inspect_ai.dataset import Sample
from inspect_ai.model import (
    ChatMessageSystem,
    ChatMessageUser,
    GenerateConfig,
    ResponseSchema,
    get_model,
)
from inspect_ai.scorer import includes
from inspect_ai.solver import generate, system_message
from inspect_ai.tool import ToolFunction, tool
from inspect_ai.util import json_schema
from tales import Tale
from trying import attempt, is_tale, same

MESSAGES = [ChatMessageSystem(content=trying.SYSTEM), ChatMessageUser(content=trying.QUESTION)]


@tool
def paint() -> Any:
    async def execute(hero: Literal["fox", "hare", "owl"], friends: Literal[1, 2, 3]) -> str:
        """Paint a hero.

        Args:
            hero: Who is painted.
            friends: How many friends the hero has.
        """
        return f"{friends} {hero}"

    return execute


def model(is_response: bool, name: str = trying.ALIAS, most: int = trying.MAX_TOKENS) -> Any:
    """Returns a model for chats or for the Responses API. Inspect treats an unknown model as one
    that reasons, and sends no temperature."""
    config = GenerateConfig(temperature=0, max_tokens=most, max_retries=0)
    return get_model(
        f"openai/{name}", config=config, base_url=trying.URL, api_key=trying.KEY, memoize=False,
        responses_api=is_response,
    )  # fmt: skip


for api in ("chat", "responses"):
    is_response = api == "responses"

    @attempt(f"{api}: chat")
    async def _(is_response: bool = is_response) -> str:
        got, wanted = await model(is_response).generate(MESSAGES), trying.chat()
        same("text", got.completion, wanted.text)
        same("stop_reason", got.stop_reason, "max_tokens")
        usage = got.usage  # without tokens that were found in a cache
        num_prompt_tokens = usage.input_tokens + (usage.input_tokens_cache_read or 0)
        same("usage", (num_prompt_tokens, usage.output_tokens), wanted.usage)
        return got.completion

    @attempt(f"{api}: forced tool call")
    async def _(is_response: bool = is_response) -> str:
        asked = model(is_response, most=200)
        choice = ToolFunction("paint")
        got = await asked.generate(MESSAGES, tools=[paint()], tool_choice=choice)
        [call] = got.message.tool_calls
        same("name", call.function, "paint")
        is_tale(call.arguments)
        return str(call.arguments)

    @attempt(f"{api}: structured output of a class")
    async def _(is_response: bool = is_response) -> str:
        schema = ResponseSchema(name="tale", json_schema=json_schema(Tale), strict=True)
        config = GenerateConfig(response_schema=schema)
        got = await model(is_response, most=200).generate(MESSAGES, config=config)
        is_tale(got.completion)
        return got.completion

    @attempt(f"{api}: error: unknown model")
    async def _(is_response: bool = is_response) -> str:
        return await trying.fails_later(
            model(is_response, trying.UNKNOWN).generate(MESSAGES), *trying.UNKNOWN_SAYS
        )

    @attempt(f"{api}: error: prompt too long, as stop_reason")
    async def _(is_response: bool = is_response) -> str:
        got = await model(is_response).generate(trying.LONG)
        same("stop_reason", got.stop_reason, "model_length")
        return got.stop_reason


@attempt("an evaluation")
def _() -> str:
    samples = [Sample(input=trying.QUESTION, target=trying.chat().text)]
    solver = [system_message(trying.SYSTEM), generate()]
    task = Task(dataset=samples, solver=solver, scorer=includes())
    [log] = evaluate(task, model=model(is_response=False), display="none", log_dir="logs")
    same("status", log.status, "success")
    same("accuracy", log.results.scores[0].metrics["accuracy"].value, 1.0)
    return log.status

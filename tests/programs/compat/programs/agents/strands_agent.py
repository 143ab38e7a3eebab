"""Strands Agents: the model class, and agents with tools and output classes."""

from __future__ import annotations

from typing import Any, Literal

import trying
from strands import Agent, tool
from strands.models.openai import OpenAIModel
from strands.models.openai_responses import OpenAIResponsesModel
from tales import Tale
from trying import attempt, is_tale, same


@tool
def paint(hero: Literal["fox", "hare", "owl"], friends: Literal[1, 2, 3]) -> str:
    """Paint a hero."""
    return f"{friends} {hero}"


def try_api(api: str, kind: Any, limit: str) -> None:
    def agent(name: str = trying.MODEL, most: int = trying.MAX_TOKENS, **fields: Any) -> Any:
        model = kind(
            client_args={"api_key": trying.KEY, "base_url": trying.URL, "max_retries": 0},
            model_id=name,
            params={"temperature": 0, limit: most},
        )
        own = {"system_prompt": trying.SYSTEM, "retry_strategy": None, **fields}
        return Agent(model=model, callback_handler=None, **own)

    @attempt(f"{api}: an agent's answer")
    def _() -> str:
        got, wanted = agent(most=trying.ENOUGH_TOKENS)(trying.GREETING), trying.greeting()
        same("text", str(got).removesuffix("\n"), wanted.text)
        usage = got.metrics.accumulated_usage
        same("usage", (usage["inputTokens"], usage["outputTokens"]), wanted.usage)
        return str(got).strip()

    @attempt(f"{api}: an agent's streamed answer")
    async def _() -> str:
        stream = agent(most=trying.ENOUGH_TOKENS).stream_async(trying.GREETING)
        pieces = [event["data"] async for event in stream if "data" in event]
        assert len(pieces) > 2, f"only {len(pieces)} pieces"
        same("text", "".join(pieces), trying.greeting().text)
        return f"{len(pieces)} pieces"

    @attempt(f"{api}: a tool that may be called is sent")
    def _() -> str:
        got = agent(most=trying.ENOUGH_TOKENS, tools=[paint])(trying.GREETING)
        assert str(got).strip()
        return str(got).strip()

    @attempt(f"{api}: structured output of a class")
    def _() -> str:
        """First the model may answer in words, then a tool of the class is forced."""
        got = agent(most=200)(trying.GREETING, structured_output_model=Tale).structured_output
        is_tale(got)
        return repr(got)

    @attempt(f"{api}: error: unknown model")
    def _() -> str:
        return trying.fails(lambda: agent(trying.UNKNOWN)(trying.QUESTION), *trying.UNKNOWN_SAYS)

    @attempt(f"{api}: error: prompt too long")
    def _() -> str:
        """The program knows this error, and reports it in its own words."""
        return trying.fails(lambda: agent()(trying.LONG), "ContextWindowOverflowException")


try_api("chat", OpenAIModel, "max_completion_tokens")
try_api("responses", OpenAIResponsesModel, "max_output_tokens")

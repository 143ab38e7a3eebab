"""Agno: agents on chats and on the Responses API."""

from __future__ import annotations

from typing import Any

import trying
from agno.agent import Agent
from agno.models.openai import OpenAILike, OpenResponses
from tales import Tale, paint, painted
from trying import attempt, is_tale, same


def try_api(api: str, kind: Any, limit: str, choice: dict[str, Any]) -> None:
    def agent(name: str = trying.MODEL, most: int = trying.ENOUGH_TOKENS, **fields: Any) -> Any:
        model = kind(
            id=name, base_url=trying.URL, api_key=trying.KEY, max_retries=0, temperature=0,
            **{limit: most},
        )  # fmt: skip
        return Agent(model=model, system_message=trying.SYSTEM, telemetry=False, **fields)

    def same_run(got: Any) -> str:
        wanted = trying.greeting()
        same("text", got.content, wanted.text)
        same("usage", (got.metrics.input_tokens, got.metrics.output_tokens), wanted.usage)
        return str(got.content)

    @attempt(f"{api}: an agent's answer")
    def _() -> str:
        return same_run(agent().run(trying.GREETING))

    @attempt(f"{api}: an agent's streamed answer")
    def _() -> str:
        """With the Responses API it reads no usage of an answer that is cut."""
        *pieces, got = agent().run(trying.GREETING, stream=True, yield_run_output=True)
        assert len(pieces) > 2, f"only {len(pieces)} pieces"
        return same_run(got)

    @attempt(f"{api}: a forced tool runs")
    def _() -> str:
        painted.clear()
        fields = {"tools": [paint], "tool_choice": choice, "tool_call_limit": 1}
        agent(most=200, **fields).run(trying.QUESTION)
        assert painted, "the tool did not run"
        for call in painted:
            is_tale(call)
        return str(painted[0])

    @attempt(f"{api}: structured output of a class")
    def _() -> str:
        got = agent(most=200, output_schema=Tale).run(trying.QUESTION).content
        is_tale(got)
        return repr(got)

    @attempt(f"{api}: error: unknown model")
    def _() -> str:
        got = agent(trying.UNKNOWN).run(trying.QUESTION)
        same("status", got.status.value, "ERROR")
        return trying.says(RuntimeError(got.content), *trying.UNKNOWN_SAYS)

    @attempt(f"{api}: error: prompt too long")
    def _() -> str:
        got = agent().run(trying.LONG)
        same("status", got.status.value, "ERROR")
        return trying.says(RuntimeError(got.content), *trying.LONG_SAYS)


try_api("chat", OpenAILike, "max_tokens", trying.TOOL_CHOICE)
try_api("responses", OpenResponses, "max_output_tokens", {"type": "function", "name": "paint"})

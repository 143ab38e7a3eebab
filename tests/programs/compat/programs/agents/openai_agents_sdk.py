"""OpenAI's Agents SDK, on chats and on the Responses API."""

from __future__ import annotations

from typing import Any

import agents
import openai
import trying
from tales import Tale, paint, painted
from trying import attempt, is_tale, same

client = openai.AsyncOpenAI(max_retries=0)
agents.set_tracing_disabled(True)
TOOL = agents.function_tool(paint)


def try_api(api: str, model: Any) -> None:
    def agent(name: str = trying.MODEL, **fields: Any) -> Any:
        max_tokens = fields.pop("max_tokens", trying.ENOUGH_TOKENS)
        settings = {"temperature": 0, "max_tokens": max_tokens, **fields.pop("settings", {})}
        return agents.Agent(
            name="Teller",
            instructions=trying.SYSTEM,
            model=model(name, client),
            model_settings=agents.ModelSettings(**settings),
            **fields,
        )

    @attempt(f"{api}: an agent's answer")
    async def _() -> str:
        """With the Responses API it takes one that is cut for an error, so this one is not."""
        got, wanted = await agents.Runner.run(agent(), trying.GREETING), trying.greeting()
        same("text", got.final_output, wanted.text)
        usage = got.context_wrapper.usage
        same("usage", (usage.input_tokens, usage.output_tokens), wanted.usage)
        return str(got.final_output)

    @attempt(f"{api}: an agent's streamed answer")
    async def _() -> str:
        """The program requests the usage from servers other than OpenAI's only if it is configured
        to.
        """
        asked, wanted = agent(settings={"include_usage": True}), trying.greeting()
        run = agents.Runner.run_streamed(asked, trying.GREETING)
        pieces = [
            event.data.delta
            async for event in run.stream_events()
            if event.type == "raw_response_event"
            and event.data.type == "response.output_text.delta"
        ]
        assert len(pieces) > 2, f"only {len(pieces)} pieces"
        same("text", "".join(pieces), wanted.text)
        same("output", run.final_output, wanted.text)
        usage = run.context_wrapper.usage
        same("usage", (usage.input_tokens, usage.output_tokens), wanted.usage)
        return f"{len(pieces)} pieces"

    @attempt(f"{api}: a forced tool runs, and its result goes back")
    async def _() -> str:
        painted.clear()
        settings = {"tool_choice": "paint"}
        asked = agent(max_tokens=200, tools=[TOOL], settings=settings)
        got = await agents.Runner.run(asked, trying.QUESTION, max_turns=3)
        assert got.final_output
        [call] = painted
        is_tale(call)
        return str(call)

    @attempt(f"{api}: structured output of a class")
    async def _() -> str:
        got = await agents.Runner.run(agent(max_tokens=200, output_type=Tale), trying.QUESTION)
        is_tale(got.final_output)
        return repr(got.final_output)

    @attempt(f"{api}: a forced tool of an agent that has an output class")
    async def _() -> str:
        painted.clear()
        fields = {"tools": [TOOL], "output_type": Tale, "settings": {"tool_choice": "paint"}}
        got = await agents.Runner.run(agent(max_tokens=200, **fields), trying.QUESTION)
        is_tale(got.final_output)
        [call] = painted
        is_tale(call)
        return str(call)

    @attempt(f"{api}: error: unknown model")
    async def _() -> str:
        return await trying.fails_later(
            agents.Runner.run(agent(trying.UNKNOWN), trying.QUESTION),
            "NotFoundError",
            *trying.UNKNOWN_SAYS,
        )

    @attempt(f"{api}: error: prompt too long")
    async def _() -> str:
        return await trying.fails_later(
            agents.Runner.run(agent(), trying.LONG), "BadRequestError", *trying.LONG_SAYS
        )


try_api("chat", agents.OpenAIChatCompletionsModel)
try_api("responses", agents.OpenAIResponsesModel)

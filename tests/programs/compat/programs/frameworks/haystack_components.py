"""Haystack: generators of chats and responses, an agent, and embedders."""

from __future__ import annotations

from typing import Any

import trying
from haystack import Document
from haystack.components.agents import Agent
from haystack.components.embedders import OpenAIDocumentEmbedder
from haystack.components.generators.chat import (
    OpenAIChatGenerator,
    OpenAIResponsesChatGenerator,
)
from haystack.dataclasses import ChatMessage
from haystack.tools import create_tool_from_function
from tales import Tale, paint, painted
from trying import attempt, is_tale, same

MESSAGES = [ChatMessage.from_system(trying.SYSTEM), ChatMessage.from_user(trying.QUESTION)]


TOOL = create_tool_from_function(paint)


def try_api(api: str, kind: Any, limit: str, form: str, choice: dict[str, Any]) -> None:
    def generator(name: str = trying.MODEL, most: int = trying.MAX_TOKENS, **fields: Any) -> Any:
        own = {"temperature": 0, limit: most, **fields.pop("own", {})}
        return kind(
            model=name, api_base_url=trying.URL, max_retries=0, generation_kwargs=own, **fields
        )

    def same_reply(got: Any) -> str:
        wanted, [reply] = trying.chat(), got["replies"]
        same("text", reply.text, wanted.text)
        usage = reply.meta["usage"]
        names = ("prompt_tokens", "completion_tokens")
        if api == "responses":
            names = ("input_tokens", "output_tokens")
        same("usage", tuple(usage[name] for name in names), wanted.usage)
        return str(reply.text)

    @attempt(f"{api}: chat")
    def _() -> str:
        return same_reply(generator().run(MESSAGES))

    @attempt(f"{api}: streamed chat with usage")
    def _() -> str:
        chunks: list[Any] = []
        own = {"stream_options": {"include_usage": True}} if api == "chat" else {}
        got = generator(streaming_callback=chunks.append, own=own).run(MESSAGES)
        assert len(chunks) > 3, f"only {len(chunks)} chunks"
        return same_reply(got)

    @attempt(f"{api}: forced tool call")
    def _() -> str:
        got = generator(most=200, tools=[TOOL], own={"tool_choice": choice}).run(MESSAGES)
        [call] = got["replies"][0].tool_calls
        same("name", call.tool_name, "paint")
        is_tale(call.arguments)
        return str(call.arguments)

    @attempt(f"{api}: structured output of a class")
    def _() -> str:
        got = generator(most=200, own={form: Tale}).run(MESSAGES)["replies"][0].text
        is_tale(got)
        return str(got)

    @attempt(f"{api}: an agent calls a tool in each step")
    def _() -> str:
        painted.clear()
        asked = generator(most=200, own={"tool_choice": choice})
        agent = Agent(chat_generator=asked, tools=[TOOL], max_agent_steps=2)
        agent.run(messages=[*MESSAGES])
        assert painted, "the tool did not run"
        for call in painted:
            is_tale(call)
        return str(painted)

    @attempt(f"{api}: error: unknown model")
    def _() -> str:
        return trying.fails(lambda: generator(trying.UNKNOWN).run(MESSAGES), *trying.UNKNOWN_SAYS)

    @attempt(f"{api}: error: prompt too long")
    def _() -> str:
        long = [ChatMessage.from_user(trying.LONG)]
        return trying.fails(lambda: generator().run(long), *trying.LONG_SAYS)


try_api("chat", OpenAIChatGenerator, "max_completion_tokens", "response_format", trying.TOOL_CHOICE)
try_api(
    "responses", OpenAIResponsesChatGenerator, "max_output_tokens", "text_format",
    {"type": "function", "name": "paint"},
)  # fmt: skip


@attempt("embeddings")
def _() -> str:
    embedder = OpenAIDocumentEmbedder(model=trying.MODEL, api_base_url=trying.URL, max_retries=0)
    found = embedder.run([Document(content=text) for text in trying.TEXTS])["documents"]
    return trying.are_vectors([document.embedding for document in found])

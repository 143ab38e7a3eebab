"""Pydantic AI: agents on chats and on the Responses API, and embeddings."""

from __future__ import annotations

from typing import Any, Literal

import trying
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider
from tales import Tale
from trying import attempt, is_tale, same

provider = OpenAIProvider(base_url=trying.URL, api_key=trying.KEY)
provider.client.max_retries = 0


def try_api(api: str, model: Any) -> None:
    def agent(name: str = trying.MODEL, max_tokens: int = trying.MAX_TOKENS, **fields: Any) -> Any:
        return Agent(
            model(name, provider=provider),
            system_prompt=trying.SYSTEM,
            model_settings={"temperature": 0, "max_tokens": max_tokens},
            **fields,
        )

    @attempt(f"{api}: an agent's answer")
    async def _() -> str:
        got, wanted = await agent().run(trying.QUESTION), trying.chat()
        same("text", got.output, wanted.text)
        usage = got.usage
        usage = usage() if callable(usage) else usage
        same("usage", (usage.input_tokens, usage.output_tokens), wanted.usage)
        return str(got.output)

    @attempt(f"{api}: an agent's streamed answer")
    async def _() -> str:
        wanted = trying.chat()
        async with agent().run_stream(trying.QUESTION) as run:
            pieces = [it async for it in run.stream_text(delta=True, debounce_by=None)]
            usage = run.usage
        assert len(pieces) > 2, f"only {len(pieces)} pieces"
        same("text", "".join(pieces), wanted.text)
        usage = usage() if callable(usage) else usage
        same("usage", (usage.input_tokens, usage.output_tokens), wanted.usage)
        return f"{len(pieces)} pieces"

    for kind in (ToolOutput, NativeOutput):

        @attempt(f"{api}: an object by {kind.__name__}")
        async def _(kind: Any = kind) -> str:
            asked = agent(max_tokens=200, output_type=kind(Tale), retries=0)
            got = await asked.run(trying.QUESTION)
            is_tale(got.output)
            return repr(got.output)

    @attempt(f"{api}: a tool that may be called is sent")
    async def _() -> str:
        def paint(hero: Literal["fox", "hare", "owl"], friends: int) -> str:
            """Paint a hero."""
            return f"{friends} {hero}"

        got = await agent(tools=[paint]).run(trying.QUESTION)
        assert got.output
        return str(got.output)

    @attempt(f"{api}: error: unknown model")
    async def _() -> str:
        return await trying.fails_later(
            agent(trying.UNKNOWN).run(trying.QUESTION), "404", *trying.UNKNOWN_SAYS
        )

    @attempt(f"{api}: error: prompt too long")
    async def _() -> str:
        return await trying.fails_later(agent().run(trying.LONG), "400", *trying.LONG_SAYS)


try_api("chat", OpenAIChatModel)
try_api("responses", OpenAIResponsesModel)


@attempt("embeddings")
async def _() -> str:
    from pydantic_ai import Embedder
    from pydantic_ai.embeddings.openai import OpenAIEmbeddingModel

    embedder = Embedder(OpenAIEmbeddingModel(trying.MODEL, provider=provider))
    got = await embedder.embed_documents(trying.TEXTS)
    vectors = [*got.embeddings]
    return trying.are_vectors(vectors)

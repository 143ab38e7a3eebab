"""Semantic Kernel: services of chats, texts and embeddings, and functions that a model calls."""

from __future__ import annotations

from typing import Annotated, Any

import openai
import trying
from semantic_kernel import Kernel
from semantic_kernel.agents import ChatCompletionAgent
from semantic_kernel.connectors.ai import FunctionChoiceBehavior
from semantic_kernel.connectors.ai.open_ai import (
    OpenAIChatCompletion,
    OpenAIChatPromptExecutionSettings,
    OpenAITextCompletion,
    OpenAITextEmbedding,
    OpenAITextPromptExecutionSettings,
)
from semantic_kernel.contents import ChatHistory
from semantic_kernel.functions import kernel_function
from tales import Tale
from trying import attempt, is_tale, same

client = openai.AsyncOpenAI(max_retries=0)


class Painter:
    @kernel_function(name="paint", description="Paint a hero.")
    def paint(self, hero: Annotated[str, "who"]) -> str:
        return f"painted {hero}"


def service(name: str = trying.MODEL) -> Any:
    return OpenAIChatCompletion(ai_model_id=name, async_client=client)


def settings(most: int = trying.MAX_TOKENS, **fields: Any) -> Any:
    return OpenAIChatPromptExecutionSettings(temperature=0, max_tokens=most, **fields)


def history(question: str = trying.QUESTION) -> Any:
    chat = ChatHistory(system_message=trying.SYSTEM)
    chat.add_user_message(question)
    return chat


def same_usage(got: Any, wanted: trying.Answer) -> None:
    usage = got.metadata["usage"]
    same("usage", (usage.prompt_tokens, usage.completion_tokens), wanted.usage)


@attempt("chat")
async def _() -> str:
    got, wanted = await service().get_chat_message_content(history(), settings()), trying.chat()
    same("text", str(got), wanted.text)
    same("finish_reason", got.finish_reason, "length")
    same_usage(got, wanted)
    return str(got)


@attempt("streamed chat with usage")
async def _() -> str:
    stream = service().get_streaming_chat_message_content(history(), settings())
    pieces, wanted = [piece async for piece in stream], trying.chat()
    assert len(pieces) > 2, f"only {len(pieces)} pieces"
    same("text", "".join(map(str, pieces)), wanted.text)
    [last] = [piece for piece in pieces if piece.metadata.get("usage")]
    same_usage(last, wanted)
    return f"{len(pieces)} pieces"


@attempt("forced call of a function")
async def _() -> str:
    kernel = Kernel()
    kernel.add_plugin(Painter(), "painter")
    choice = FunctionChoiceBehavior.Required(auto_invoke=False)
    asked = settings(200, function_choice_behavior=choice)
    got = await service().get_chat_message_content(history(), asked, kernel=kernel)
    [call] = got.items
    same("name", call.name, "painter-paint")
    assert call.parse_arguments()["hero"], call.arguments
    return str(call.arguments)


@attempt("structured output of a class")
async def _() -> str:
    got = await service().get_chat_message_content(history(), settings(200, response_format=Tale))
    is_tale(str(got))
    return str(got)


@attempt("an agent with functions")
async def _() -> str:
    agent = ChatCompletionAgent(
        service=service(), name="teller", instructions=trying.SYSTEM, plugins=[Painter()]
    )
    got = await agent.get_response(trying.GREETING)
    assert str(got)
    return str(got)


@attempt("completion")
async def _() -> str:
    asked = OpenAITextPromptExecutionSettings(temperature=0, max_tokens=trying.MAX_TOKENS)
    text = OpenAITextCompletion(ai_model_id=trying.MODEL, async_client=client)
    got = str(await text.get_text_content(trying.PROMPT, asked))
    same("text", got, trying.completion().text)
    return got


@attempt("embeddings")
async def _() -> str:
    embedding = OpenAITextEmbedding(ai_model_id=trying.MODEL, async_client=client)
    vectors = await embedding.generate_embeddings(trying.TEXTS)
    return trying.are_vectors([[*map(float, vector)] for vector in vectors])


@attempt("error: unknown model")
async def _() -> str:
    return await trying.fails_later(
        service(trying.UNKNOWN).get_chat_message_content(history(), settings()),
        "NotFoundError",
        *trying.UNKNOWN_SAYS,
    )


@attempt("error: prompt too long")
async def _() -> str:
    return await trying.fails_later(
        service().get_chat_message_content(history(trying.LONG), settings()),
        "BadRequestError",
        *trying.LONG_SAYS,
    )

"""LlamaIndex with its classes for servers that are like OpenAI's.

LlamaIndex makes schemas from annotations. So this module must not import `annotations` from
`__future__`, which would turn annotations into texts.
"""

from typing import Any, Literal

import trying
from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.embeddings.openai_like import OpenAILikeEmbedding
from llama_index.llms.openai_like import OpenAILike
from tales import Tale
from trying import attempt, is_tale, same

MESSAGES = [
    ChatMessage(role="system", content=trying.SYSTEM),
    ChatMessage(role="user", content=trying.QUESTION),
]


def model(name: str = trying.MODEL, max_tokens: int = trying.MAX_TOKENS, **fields: Any) -> Any:
    return OpenAILike(
        model=name,
        api_base=trying.URL,
        api_key=trying.KEY,
        max_tokens=max_tokens,
        temperature=0,
        max_retries=0,
        context_window=2048,
        **{"is_chat_model": True, "is_function_calling_model": True, **fields},
    )


@attempt("chat")
def _() -> str:
    got, wanted = model().chat(MESSAGES), trying.chat()
    same("text", got.message.content, wanted.text)
    usage = got.raw.usage
    same("usage", (usage.prompt_tokens, usage.completion_tokens), wanted.usage)
    same("finish_reason", got.raw.choices[0].finish_reason, wanted.finish_reason)
    return got.message.content


@attempt("streamed chat")
def _() -> str:
    pieces = list(model().stream_chat(MESSAGES))
    assert len(pieces) > 2, f"only {len(pieces)} pieces"
    same("text", "".join(it.delta or "" for it in pieces), trying.chat().text)
    return f"{len(pieces)} pieces"


@attempt("completion")
def _() -> str:
    asked = model(is_chat_model=False)
    same("text", asked.complete(trying.PROMPT).text, trying.completion().text)
    pieces = list(asked.stream_complete(trying.PROMPT))
    same("streamed text", "".join(it.delta or "" for it in pieces), trying.completion().text)
    return f"{len(pieces)} pieces"


@attempt("forced tool call")
def _() -> str:
    def paint(hero: Literal["fox", "hare", "owl"], friends: Literal[1, 2, 3]) -> str:
        """Paint a hero."""
        return f"{friends} {hero}"

    tool = FunctionTool.from_defaults(paint)
    got = model(max_tokens=200).chat_with_tools(
        [tool], chat_history=MESSAGES, tool_required=True, allow_parallel_tool_calls=False
    )
    [call] = model().get_tool_calls_from_response(got)
    same("name", call.tool_name, "paint")
    is_tale(call.tool_kwargs)
    return str(call.tool_kwargs)


@attempt("structured output of a class")
def _() -> str:
    got = model(max_tokens=200).as_structured_llm(Tale).chat(MESSAGES).raw
    is_tale(got)
    return repr(got)


@attempt("structured output of a class by should_use_structured_outputs")
def _() -> str:
    asked = model(max_tokens=200, should_use_structured_outputs=True)
    got = asked.as_structured_llm(Tale).chat(MESSAGES).raw
    is_tale(got)
    return repr(got)


@attempt("embeddings")
def _() -> str:
    asked = OpenAILikeEmbedding(
        model_name=trying.MODEL, api_base=trying.URL, api_key=trying.KEY, max_retries=0
    )
    vectors = asked.get_text_embedding_batch(trying.TEXTS)
    return trying.are_vectors(vectors)


@attempt("error: unknown model")
def _() -> str:
    return trying.fails(lambda: model(trying.UNKNOWN).chat(MESSAGES), *trying.UNKNOWN_SAYS)


@attempt("error: prompt too long")
def _() -> str:
    long = [ChatMessage(role="user", content=trying.LONG)]
    return trying.fails(lambda: model().chat(long), *trying.LONG_SAYS)

"""langchain-openai: chats, tools, structured output, the Responses API, embeddings."""

from __future__ import annotations

from typing import Any

import trying
from langchain_openai import ChatOpenAI, OpenAI, OpenAIEmbeddings
from tales import Tale
from trying import attempt, is_tale, same

FIELDS: Any = {"temperature": 0, "max_retries": 0}
MESSAGES = [("system", trying.SYSTEM), ("user", trying.QUESTION)]


def model(name: str = trying.MODEL, max_tokens: int = trying.MAX_TOKENS, **fields: Any) -> Any:
    return ChatOpenAI(model=name, max_tokens=max_tokens, **FIELDS, **fields)


def same_message(got: Any) -> str:
    wanted = trying.chat()
    same("text", got.text, wanted.text)
    usage = got.usage_metadata
    same("usage", usage and (usage["input_tokens"], usage["output_tokens"]), wanted.usage)
    return str(got.text)


def try_api(api: str, **fields: Any) -> None:
    @attempt(f"{api}: chat")
    def _() -> str:
        got = model(**fields).invoke(MESSAGES)
        if api == "chat":
            same("finish_reason", got.response_metadata["finish_reason"], "length")
        return same_message(got)

    @attempt(f"{api}: streamed chat with usage")
    def _() -> str:
        chunks = list(model(stream_usage=True, **fields).stream(MESSAGES))
        assert len(chunks) > 2, f"only {len(chunks)} chunks"
        whole = chunks[0]
        for chunk in chunks[1:]:
            whole += chunk
        return same_message(whole)

    @attempt(f"{api}: forced tool call, and its result")
    def _() -> str:
        bound = model(max_tokens=200, **fields).bind_tools([trying.TOOL], tool_choice="paint")
        got = bound.invoke(MESSAGES)
        [call] = got.tool_calls
        same("name", call["name"], "paint")
        is_tale(call["args"])
        told = {"role": "tool", "tool_call_id": call["id"], "content": "painted"}
        after = model(**fields).bind_tools([trying.TOOL]).invoke([*MESSAGES, got, told])
        assert after.text
        return str(call["args"])

    for method in ("json_schema", "function_calling"):

        @attempt(f"{api}: structured output by {method}")
        def _(method: str = method) -> str:
            asked = model(max_tokens=200, **fields)
            got = asked.with_structured_output(Tale, method=method, strict=True).invoke(MESSAGES)
            is_tale(got)
            return repr(got)

    @attempt(f"{api}: error: unknown model")
    def _() -> str:
        def call() -> Any:
            return model(trying.UNKNOWN, **fields).invoke(MESSAGES)

        return trying.fails(call, "ModelNotFoundError", *trying.UNKNOWN_SAYS)

    @attempt(f"{api}: error: prompt too long")
    def _() -> str:
        """Its own class says that a shorter prompt would be right."""
        words = ("ContextOverflowError", *trying.LONG_SAYS)
        return trying.fails(lambda: model(**fields).invoke(trying.LONG), *words)


try_api("chat", use_responses_api=False)
try_api("responses", use_responses_api=True)


@attempt("completion")
def _() -> str:
    asked = OpenAI(model=trying.MODEL, max_tokens=trying.MAX_TOKENS, **FIELDS)
    same("text", asked.invoke(trying.PROMPT), trying.completion().text)
    pieces = list(asked.stream(trying.PROMPT))
    same("streamed text", "".join(pieces), trying.completion().text)
    return f"{len(pieces)} pieces"


@attempt("a JSON object in a stream")
def _() -> str:
    """A stop string ends it, because the shipped model would go on."""
    form = {"response_format": {"type": "json_object"}, "stop": [","]}
    text = "".join(it.text for it in model(max_tokens=200).bind(**form).stream(MESSAGES))
    assert text.lstrip().startswith("{"), text
    return text


@attempt("embeddings")
def _() -> str:
    """By default it sends token ids, which it makes with OpenAI's tokenizer."""
    asked = OpenAIEmbeddings(model=trying.MODEL, check_embedding_ctx_length=False, max_retries=0)
    vectors = asked.embed_documents(trying.TEXTS)
    return trying.are_vectors(vectors)

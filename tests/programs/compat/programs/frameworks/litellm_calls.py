"""LiteLLM with the providers openai/ and hosted_vllm/; completions, and the Responses API."""

from __future__ import annotations

from typing import Any

import litellm
import trying
from trying import attempt, is_tale, same, same_chat

litellm.telemetry = False
CALL: Any = {
    "messages": trying.MESSAGES,
    "max_tokens": trying.MAX_TOKENS,
    "temperature": 0,
    "num_retries": 0,
    "api_base": trying.URL,
    "api_key": trying.KEY,
}


def try_provider(provider: str) -> None:
    model = f"{provider}/{trying.MODEL}"

    @attempt(f"{provider}: chat")
    def _() -> str:
        return same_chat(litellm.completion(model, **CALL))

    @attempt(f"{provider}: streamed chat with usage")
    def _() -> str:
        options = {"include_usage": True}
        chunks = list(litellm.completion(model, **CALL, stream=True, stream_options=options))
        assert len(chunks) > 2, f"only {len(chunks)} chunks"
        return same_chat(litellm.stream_chunk_builder(chunks, messages=trying.MESSAGES))

    @attempt(f"{provider}: forced tool call")
    def _() -> str:
        fields = {**CALL, "max_tokens": 200}
        got = litellm.completion(
            model, **fields, tools=[trying.TOOL], tool_choice=trying.TOOL_CHOICE
        )
        [call] = got.choices[0].message.tool_calls
        same("name", call.function.name, "paint")
        is_tale(call.function.arguments)
        return call.function.arguments

    @attempt(f"{provider}: structured output")
    def _() -> str:
        schema = {"name": "tale", "schema": trying.SCHEMA, "strict": True}
        form = {"type": "json_schema", "json_schema": schema}
        got = litellm.completion(model, **{**CALL, "max_tokens": 200}, response_format=form)
        is_tale(got.choices[0].message.content)
        return got.choices[0].message.content

    @attempt(f"{provider}: reasoning_effort")
    def _() -> str:
        allowed = ["reasoning_effort"]
        return same_chat(
            litellm.completion(model, **CALL, reasoning_effort="low", allowed_openai_params=allowed)
        )

    @attempt(f"{provider}: embeddings")
    def _() -> str:
        got = litellm.embedding(
            model, input=[trying.QUESTION], api_base=trying.URL, api_key=trying.KEY
        )
        assert len(got.data[0]["embedding"]) > 1
        return "a vector"

    @attempt(f"{provider}: error: unknown model")
    def _() -> str:
        def call() -> Any:
            return litellm.completion(f"{provider}/{trying.UNKNOWN}", **CALL)

        return trying.fails(call, "NotFoundError", *trying.UNKNOWN_SAYS)

    @attempt(f"{provider}: error: prompt too long")
    def _() -> str:
        fields = {**CALL, "messages": [{"role": "user", "content": trying.LONG}]}
        return trying.fails(
            lambda: litellm.completion(model, **fields),
            "ContextWindowExceededError",
            *trying.LONG_SAYS,
        )


for each in ("openai", "hosted_vllm"):
    try_provider(each)


COMPLETION: Any = {
    "prompt": trying.PROMPT,
    "max_tokens": trying.MAX_TOKENS,
    "temperature": 0,
    "num_retries": 0,
    "api_base": trying.URL,
    "api_key": trying.KEY,
}


@attempt("completion")
def _() -> str:
    got, wanted = (
        litellm.text_completion(model=f"text-completion-openai/{trying.MODEL}", **COMPLETION),
        trying.completion(),
    )
    same("text", got.choices[0].text, wanted.text)
    same("finish_reason", got.choices[0].finish_reason, wanted.finish_reason)
    return got.choices[0].text


def respond(**fields: Any) -> Any:
    return litellm.responses(
        model=f"openai/{trying.MODEL}",
        instructions=trying.SYSTEM,
        input=trying.QUESTION,
        temperature=0,
        max_output_tokens=trying.MAX_TOKENS,
        api_base=trying.URL,
        api_key=trying.KEY,
        **fields,
    )


@attempt("response")
def _() -> str:
    got, wanted = respond(), trying.chat()
    text = got.output[-1].content[0].text
    same("text", text, wanted.text)
    same("usage", (got.usage.input_tokens, got.usage.output_tokens), wanted.usage)
    return text


@attempt("streamed response")
def _() -> str:
    events = list(respond(stream=True))
    deltas = [it.delta for it in events if it.type == "response.output_text.delta"]
    assert len(deltas) > 2, f"only {len(deltas)} deltas"
    same("text", "".join(deltas), trying.chat().text)
    return f"{len(deltas)} deltas"

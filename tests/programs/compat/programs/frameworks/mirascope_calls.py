"""Mirascope: calls, streams, tools and objects, on chats and on the Responses API."""

from __future__ import annotations

from typing import Any, Literal

import trying
from mirascope import llm
from tales import Tale
from trying import attempt, is_tale, same

llm.register_provider("openai", base_url=trying.URL, api_key=trying.KEY)
MESSAGES = [llm.messages.system(trying.SYSTEM), llm.messages.user(trying.QUESTION)]


@llm.tool
def paint(hero: Literal["fox", "hare", "owl"], friends: Literal[1, 2, 3]) -> str:
    """Paint a hero."""
    return f"{friends} {hero}"


def model(api: str, name: str = trying.ALIAS, max_tokens: int = trying.MAX_TOKENS) -> Any:
    """Returns a model for `api`. Mirascope sends no temperature to a chat model that it does not
    know."""
    return llm.Model(f"openai/{name}:{api}", temperature=0, max_tokens=max_tokens)


def same_response(got: Any) -> str:
    wanted = trying.chat()
    same("text", got.text(), wanted.text)
    same("usage", (got.usage.input_tokens, got.usage.output_tokens), wanted.usage)
    same("finish_reason", got.finish_reason, llm.FinishReason.MAX_TOKENS)
    return str(got.text())


for api in ("completions", "responses"):

    @attempt(f"{api}: call")
    def _(api: str = api) -> str:
        return same_response(model(api).call(MESSAGES))

    @attempt(f"{api}: stream")
    def _(api: str = api) -> str:
        stream = model(api).stream(MESSAGES)
        pieces = list(stream.text_stream())
        assert len(pieces) > 2, f"only {len(pieces)} pieces"
        return same_response(stream)

    @attempt(f"{api}: a tool that may be called is sent")
    def _(api: str = api) -> str:
        got = model(api).call(MESSAGES, tools=[paint])
        assert got.text() or got.tool_calls
        return str(got.content)

    for mode in ("strict", "tool"):

        @attempt(f"{api}: an object by {mode}")
        def _(api: str = api, mode: Any = mode) -> str:
            form = llm.format(Tale, mode=mode)
            got = model(api, max_tokens=200).call(MESSAGES, format=form).parse()
            is_tale(got)
            return repr(got)

    @attempt(f"{api}: error: unknown model")
    def _(api: str = api) -> str:
        return trying.fails(
            lambda: model(api, trying.UNKNOWN).call(MESSAGES), "NotFound", *trying.UNKNOWN_SAYS
        )

    @attempt(f"{api}: error: prompt too long")
    def _(api: str = api) -> str:
        return trying.fails(lambda: model(api).call(trying.LONG), "BadRequest", *trying.LONG_SAYS)

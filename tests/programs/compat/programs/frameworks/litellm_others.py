"""LiteLLM: completions, and the Responses API."""

from __future__ import annotations

from typing import Any

import litellm
import trying
from trying import attempt, same

litellm.telemetry = False
CALL: Any = {
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
        litellm.text_completion(model=f"text-completion-openai/{trying.MODEL}", **CALL),
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

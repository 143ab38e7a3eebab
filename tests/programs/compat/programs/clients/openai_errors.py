"""OpenAI's client for Python: what it raises."""

from __future__ import annotations

from typing import Any

import openai
import trying
from trying import attempt

client = openai.OpenAI(max_retries=0)
CHAT: Any = {
    "model": trying.MODEL,
    "messages": trying.MESSAGES,
    "temperature": 0,
    "max_tokens": trying.MAX_TOKENS,
}


@attempt("error: unknown model")
def _() -> str:
    fields = {**CHAT, "model": trying.UNKNOWN}
    return trying.fails(
        lambda: client.chat.completions.create(**fields), "NotFoundError", *trying.UNKNOWN_SAYS
    )


@attempt("error: prompt too long")
def _() -> str:
    fields = {**CHAT, "messages": [{"role": "user", "content": trying.LONG}]}
    words = ("BadRequestError", "context_length_exceeded", *trying.LONG_SAYS)
    return trying.fails(lambda: client.chat.completions.create(**fields), *words)


@attempt("error: wrong API key")
def _() -> str:
    wrong = client.with_options(api_key="wrong")
    return trying.fails(lambda: wrong.models.list(), "AuthenticationError", "invalid_api_key")

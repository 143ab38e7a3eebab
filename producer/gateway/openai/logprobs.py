"""Log-probabilities in OpenAI's two formats: for chats, and the older one for completions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from promptq.shared.protocol.events import TokenLogprob, TopLogprob


def chat_logprobs(logprobs: Sequence[TokenLogprob]) -> dict[str, Any]:
    """The format of chats."""
    content = [
        {**_entry(chosen), "top_logprobs": [_entry(other) for other in chosen.top or ()]}
        for chosen in logprobs
    ]
    return {"content": content, "refusal": None}


def completion_logprobs(logprobs: Sequence[TokenLogprob], offset: int) -> dict[str, Any]:
    """The format of completions; `offset` is where the text of the first token begins.

    The likeliest tokens are those that were asked for, and the chosen one.
    """
    offsets, top = [], []
    for chosen in logprobs:
        offsets.append(offset)
        offset += len(_text(chosen))
        likeliest = {_text(other): other.logprob for other in chosen.top or ()}
        top.append({**likeliest, _text(chosen): chosen.logprob})
    return {
        "tokens": [_text(chosen) for chosen in logprobs],
        "token_logprobs": [chosen.logprob for chosen in logprobs],
        "top_logprobs": top,
        "text_offset": offsets,
    }


def text_length(logprobs: Sequence[TokenLogprob]) -> int:
    """Characters of the tokens' texts."""
    return sum(len(_text(chosen)) for chosen in logprobs)


def _entry(token: TokenLogprob | TopLogprob) -> dict[str, Any]:
    text = _text(token)
    # If it is not a whole character, its bytes are unknown.
    encoded = None if "\ufffd" in text else list(text.encode())
    return {"token": text, "logprob": token.logprob, "bytes": encoded}


def _text(token: TokenLogprob | TopLogprob) -> str:
    return token.token if token.token is not None else f"token_id:{token.token_id}"

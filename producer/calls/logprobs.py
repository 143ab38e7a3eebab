"""Writes log-probabilities in the formats of OpenAI's chats, OpenAI's completions and vLLM."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from promptq.shared.protocol.events import Result, TokenEvent, TokenLogprob, TopLogprob
from promptq.shared.runtime.turns import Work

_FREED_AT_ONCE = 16  # tokens between two pauses


def chat_logprobs(logprobs: Iterable[TokenLogprob]) -> Work[dict[str, Any]]:
    """Returns log-probabilities in the format of OpenAI's chats. May pause after each token."""
    content = []
    for chosen in logprobs:
        content.append(chat_logprob(chosen))
        yield
    return {"content": content, "refusal": None}


def chat_logprob(chosen: TokenLogprob) -> dict[str, Any]:
    """Returns a token's log-probability in the format of OpenAI's chats."""
    return {**_entry(chosen), "top_logprobs": [_entry(other) for other in chosen.top or ()]}


@dataclass(frozen=True, slots=True)
class FirstToken:
    """A prompt's first token, which has no log-probability because no token precedes it."""

    token: str


def tokens_of_prompt(source: TokenEvent | Result) -> list[FirstToken | TokenLogprob]:
    """Returns the prompt's tokens with log-probabilities; an empty list if `source` has none."""
    if not source.prompt_texts:
        return []
    first = FirstToken(source.prompt_texts[0])
    return [first, *(token for token in source.prompt_logprobs or () if token is not None)]


def completion_logprobs(
    logprobs: Sequence[FirstToken | TokenLogprob], offset: int
) -> Work[dict[str, Any]]:
    """Returns log-probabilities in the format of OpenAI's completions. `offset` is the number of
    characters of the answer before the first token.

    Each position has the likeliest tokens and the chosen token.
    """
    tokens: list[str] = []
    token_logprobs: list[float | None] = []
    offsets: list[int] = []
    top: list[dict[str, float] | None] = []
    for chosen in logprobs:
        tokens.append(_text(chosen))
        offsets.append(offset)
        offset += len(tokens[-1])
        if isinstance(chosen, FirstToken):
            token_logprobs.append(None)
            top.append(None)
            continue
        token_logprobs.append(chosen.logprob)
        likeliest: dict[str, float] = {}
        for other in chosen.top or ():  # of tokens with the same text, only the likeliest
            likeliest.setdefault(_text(other), other.logprob)
        top.append({**likeliest, tokens[-1]: chosen.logprob})
        yield
    return {
        "tokens": tokens,
        "token_logprobs": token_logprobs,
        "top_logprobs": top,
        "text_offset": offsets,
    }


def prompt_logprobs(source: Result) -> Work[list[dict[str, Any] | None] | None]:
    """Returns the prompt's log-probabilities in vLLM's format; None if the result has none. Each
    position maps the ids of the prompt's token and of the likeliest tokens to their
    log-probabilities. The first position has None."""
    if source.prompt_logprobs is None:
        return None
    tokens = []
    for chosen in source.prompt_logprobs:
        tokens.append(None if chosen is None else _by_token_id(chosen))
        yield
    return tokens


def _by_token_id(chosen: TokenLogprob) -> dict[str, Any]:
    by_id = {str(chosen.token_id): _ranked(chosen, chosen.rank)}
    for rank, other in enumerate(chosen.top or (), start=1):
        by_id.setdefault(str(other.token_id), _ranked(other, rank))
    return by_id


def _ranked(token: TokenLogprob | TopLogprob, rank: int) -> dict[str, Any]:
    return {"logprob": token.logprob, "rank": rank, "decoded_token": _text(token)}


def free_logprobs(source: TokenEvent | Result) -> Work[None]:
    """Empties the lists of log-probabilities in an event or a result, with pauses, because freeing
    many objects at once would delay other streams."""
    for items in (source.logprobs, source.prompt_logprobs):
        while items:
            del items[-_FREED_AT_ONCE:]
            yield


def text_length(logprobs: Sequence[FirstToken | TokenLogprob]) -> int:
    """Returns the number of characters of the tokens' texts."""
    return sum(len(_text(chosen)) for chosen in logprobs)


def _entry(token: TokenLogprob | TopLogprob) -> dict[str, Any]:
    text = _text(token)
    # The bytes of a token without a whole character are unknown.
    encoded = None if "\ufffd" in text else list(text.encode())
    return {"token": text, "logprob": token.logprob, "bytes": encoded}


def _text(token: FirstToken | TokenLogprob | TopLogprob) -> str:
    if isinstance(token, FirstToken) or token.token is not None:
        return token.token or ""
    return f"token_id:{token.token_id}"

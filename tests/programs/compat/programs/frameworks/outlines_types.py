"""Outlines, as for a vLLM server and as for OpenAI: text, and output that follows a type."""

from __future__ import annotations

import re
from typing import Any, Literal

import openai
import outlines
import trying
from outlines.inputs import Chat
from outlines.types import CFG, Regex
from tales import Tale
from trying import attempt, is_tale, same

FIELDS: Any = {"temperature": 0, "max_tokens": trying.MAX_TOKENS}
ENOUGH: Any = {"temperature": 0, "max_tokens": 200}
CHAT = Chat(trying.MESSAGES)
GRAMMAR = """
start: "A " HERO " has " NUMBER " friends" ("!" | " and a " HERO ".")
HERO: "fox" | "hare" | "owl"
NUMBER: /[1-3]/
"""
FOLLOWS_GRAMMAR = r"A (fox|hare|owl) has [1-3] friends(!| and a (fox|hare|owl)\.)"


def model(kind: str, name: str = trying.MODEL) -> Any:
    return getattr(outlines, f"from_{kind}")(openai.OpenAI(max_retries=0), name)


for kind in ("vllm", "openai"):

    @attempt(f"{kind}: chat")
    def _(kind: str = kind) -> str:
        got = model(kind)(CHAT, **FIELDS)
        same("text", got, trying.chat().text)
        return str(got)

    @attempt(f"{kind}: streamed chat")
    def _(kind: str = kind) -> str:
        pieces = list(model(kind).stream(CHAT, **FIELDS))
        assert len(pieces) > 2, f"only {len(pieces)} pieces"
        same("text", "".join(pieces), trying.chat().text)
        return f"{len(pieces)} pieces"

    @attempt(f"{kind}: an object of a class")
    def _(kind: str = kind) -> str:
        got = model(kind)(CHAT, Tale, **ENOUGH)
        is_tale(got)
        return str(got)

    @attempt(f"{kind}: error: unknown model")
    def _(kind: str = kind) -> str:
        return trying.fails(
            lambda: model(kind, trying.UNKNOWN)(CHAT, **FIELDS), *trying.UNKNOWN_SAYS
        )

    @attempt(f"{kind}: error: prompt too long")
    def _(kind: str = kind) -> str:
        return trying.fails(lambda: model(kind)(trying.LONG, **FIELDS), *trying.LONG_SAYS)


@attempt("vllm: a choice")
def _() -> str:
    got = model("vllm")(CHAT, Literal["fox", "hare", "owl"], **ENOUGH)
    assert got in ("fox", "hare", "owl"), got
    return str(got)


@attempt("vllm: a regular expression")
def _() -> str:
    got = model("vllm")(CHAT, Regex("[1-9][0-9]{2} (foxes|owls)"), **ENOUGH)
    assert re.fullmatch("[1-9][0-9]{2} (foxes|owls)", got), got
    return str(got)


@attempt("vllm: a grammar by CFG")
def _() -> str:
    got = model("vllm")(CHAT, CFG(GRAMMAR), **ENOUGH)
    assert re.fullmatch(FOLLOWS_GRAMMAR, got), got
    return str(got)

"""guidance's VLLMModel, which sends each piece of a program as a grammar."""

from __future__ import annotations

import re
from typing import Any

import trying
from guidance import assistant, gen, select, system, user
from guidance import json as gen_json
from guidance.models.experimental import VLLMModel
from trying import attempt, is_tale


def asked(name: str = trying.MODEL, question: str = trying.QUESTION) -> Any:
    model = VLLMModel(name, base_url=trying.URL, api_key=trying.KEY, echo=False)
    with system():
        model += trying.SYSTEM
    with user():
        model += question
    return model


def answered(*parts: Any, **fields: Any) -> Any:
    model = asked(**fields)
    with assistant():
        for part in parts:
            model += part
    return model


@attempt("a choice")
def _() -> str:
    got = answered(select(["fox", "hare", "owl"], name="hero"))["hero"]
    assert got in ("fox", "hare", "owl"), got
    return str(got)


@attempt("a regular expression")
def _() -> str:
    got = answered(gen("number", regex="[1-9][0-9]{2}"))["number"]
    assert re.fullmatch("[1-9][0-9]{2}", got), got
    return str(got)


@attempt("JSON of a schema")
def _() -> str:
    got = answered(gen_json("tale", schema=trying.SCHEMA))["tale"]
    is_tale(got)
    return str(got)


@attempt("text and captures in one grammar")
def _() -> str:
    hero = select(["fox", "hare", "owl"], name="hero")
    got = answered("A " + hero + " has " + gen("friends", regex="[1-3]") + " friends.")
    text = f"A {got['hero']} has {got['friends']} friends."
    assert text in str(got), f"{text!r} is not in {str(got)!r}"
    return text


@attempt("error: unknown model")
def _() -> str:
    hero = select(["fox", "owl"])
    return trying.fails(lambda: answered(hero, name=trying.UNKNOWN), *trying.UNKNOWN_SAYS)


@attempt("error: prompt too long")
def _() -> str:
    hero = select(["fox", "owl"])
    return trying.fails(lambda: answered(hero, question=trying.LONG), *trying.LONG_SAYS)

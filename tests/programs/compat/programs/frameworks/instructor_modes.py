"""Instructor: objects of a class by tools, by JSON and by the Responses API."""

from __future__ import annotations

from typing import Any

import instructor
import openai
import trying
from instructor.core import IncompleteOutputException
from tales import Tale
from trying import attempt, is_tale

FIELDS: Any = {"model": trying.MODEL, "messages": trying.MESSAGES, "temperature": 0}


def client(mode: instructor.Mode) -> Any:
    return instructor.from_openai(openai.OpenAI(max_retries=0), mode=mode)


MODES = {
    "TOOLS": instructor.Mode.TOOLS,
    "TOOLS_STRICT": instructor.Mode.TOOLS_STRICT,
    "JSON_SCHEMA": instructor.Mode.JSON_SCHEMA,
    "RESPONSES_TOOLS": instructor.Mode.RESPONSES_TOOLS,
}
for name, mode in MODES.items():

    @attempt(name)
    def _(name: str = name, mode: Any = mode) -> str:
        most = "max_output_tokens" if name.startswith("RESPONSES") else "max_tokens"
        got, answer = client(mode).create_with_completion(
            **FIELDS, **{most: 200}, response_model=Tale, max_retries=1
        )
        is_tale(got)
        assert answer.usage
        return repr(got)


@attempt("JSON")
def _() -> str:
    """The schema is only in the prompt, and the shipped model writes an object of its own."""
    try:
        got = client(instructor.Mode.JSON).create(
            **FIELDS, max_tokens=200, response_model=Tale, max_retries=1
        )
    except IncompleteOutputException as error:
        text = str(error.last_completion.choices[0].message.content)
        assert text.lstrip().startswith("{"), text
        return text
    return repr(got)


@attempt("TOOLS: partial objects in a stream")
def _() -> str:
    got = list(
        client(instructor.Mode.TOOLS).create_partial(**FIELDS, max_tokens=200, response_model=Tale)
    )
    is_tale(got[-1])
    return f"{len(got)} states"


@attempt("error: unknown model")
def _() -> str:
    fields = {**FIELDS, "model": trying.UNKNOWN}
    return trying.fails(
        lambda: client(instructor.Mode.TOOLS).create(**fields, response_model=Tale, max_retries=1),
        *trying.UNKNOWN_SAYS,
    )

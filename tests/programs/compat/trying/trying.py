"""Shared parts of the programs' scripts: their calls, the right answers, and their reports.

A script runs in the environment of its program, so this module needs Python alone. A plain call of
the gateway shows the right answer: a program must return the same text, usage and finish reason.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import time
import urllib.error
import urllib.request
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

URL = os.environ["OPENAI_BASE_URL"]
"""The URL to which the program sends its calls, with /v1. The traffic is recorded."""
ROOT_URL = URL.removesuffix("/v1")
KEY = os.environ["OPENAI_API_KEY"]
MODEL = os.environ["COMPAT_MODEL"]
ALIAS = "gpt-4o"
"""A further name of the model, for programs that know a model's abilities by its name."""

SYSTEM = "You tell stories."
QUESTION = "Tell me a story about a fox and a lantern."
MESSAGES: list[Any] = [
    {"role": "system", "content": SYSTEM},
    {"role": "user", "content": QUESTION},
]
GREETING = "Hi"
"""Its answer ends by itself within ENOUGH_TOKENS."""
ENOUGH_TOKENS = 100
PROMPT = "Once upon a time, there was a fox"
MAX_TOKENS = 24
LONG = "once " * 20_000
"""A prompt that is longer than the model accepts."""
UNKNOWN = "no-such-model"

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "hero": {"type": "string", "enum": ["fox", "hare", "owl"]},
        "friends": {"type": "integer", "enum": [1, 2, 3]},
    },
    "required": ["hero", "friends"],
    "additionalProperties": False,
}
"""A schema with short values only; `is_tale` checks whether a value follows it."""
FUNCTION: dict[str, Any] = {
    "name": "paint",
    "description": "Paint a hero.",
    "parameters": SCHEMA,
}
TOOL: dict[str, Any] = {"type": "function", "function": FUNCTION}
TOOL_CHOICE: dict[str, Any] = {"type": "function", "function": {"name": "paint"}}


def is_tale(got: Any) -> None:
    """Raise AssertionError if a value does not follow SCHEMA. Accepts JSON as text, too."""
    value = json.loads(got) if isinstance(got, str) else got
    if hasattr(value, "model_dump"):
        value = value.model_dump(mode="json")
    wanted = SCHEMA["properties"]
    same("fields", sorted(value), sorted(wanted))
    for name, schema in wanted.items():
        assert value[name] in schema["enum"], f"{name}: {value[name]!r} is not in the schema"


TEXTS = [QUESTION, "The rain in the valley"]
"""Texts to embed."""


def are_vectors(vectors: list[list[float]]) -> str:
    """Returns the number of dimensions as text. Raises AssertionError unless the vectors belong to
    two different texts."""
    same("vectors", len(vectors), len(TEXTS))
    assert len(vectors[0]) > 1, "a vector has no length"
    assert vectors[0] != vectors[1], "different texts have one vector"
    return f"{len(vectors[0])} dimensions"


def same(what: str, got: Any, wanted: Any) -> None:
    assert got == wanted, f"{what}: {got!r} instead of {wanted!r}"


def says(error: BaseException, *words: str) -> str:
    """Checks that an error of the program has these words. Returns the error as text. Raises
    AssertionError."""
    code = getattr(error, "code", None)
    told = f"{type(error).__name__}: {error}" + (f" ({code})" if isinstance(code, str) else "")
    for word in words:
        assert word in told, f"the error does not say {word!r}: {told}"
    return told


UNKNOWN_SAYS = (UNKNOWN, MODEL)
"""The wrong name, and a right one."""
LONG_SAYS = ("characters",)


def fails(call: Callable[[], Any], *words: str) -> str:
    """Checks that the call raises an error with these words. Returns the error as text. Raises
    AssertionError."""
    try:
        got = call()
    except Exception as error:
        return says(error, *words)
    raise AssertionError(f"no error was raised: {got!r}")


async def fails_later(call: Awaitable[Any], *words: str) -> str:
    """Checks that the awaited call raises an error with these words. Returns the error as text.
    Raises AssertionError."""
    try:
        got = await call
    except Exception as error:
        return says(error, *words)
    raise AssertionError(f"no error was raised: {got!r}")


def plain(path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    """Returns the gateway's answer to a plain call that does not go through the program."""
    request = urllib.request.Request(
        os.environ["COMPAT_GATEWAY"] + path,
        None if body is None else json.dumps(body).encode(),
        {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)


@dataclass
class Answer:
    """The gateway's answer to a plain call. A program must return the same answer."""

    text: str
    finish_reason: str
    usage: tuple[int, int]
    """Tokens of the prompt, and of the answer."""


def chat(question: str = QUESTION, **fields: Any) -> Answer:
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]
    body = {"messages": messages, "max_tokens": MAX_TOKENS, "temperature": 0, **fields}
    answer = plain("/v1/chat/completions", body)
    return _answer(answer, answer["choices"][0]["message"]["content"], is_cut=not fields)


def greeting() -> Answer:
    """Returns the whole answer to GREETING, for programs that treat an answer cut at `max_tokens`
    as an error."""
    answer = chat(GREETING, max_tokens=ENOUGH_TOKENS)
    same("what a plain call gets", answer.finish_reason, "stop")
    return answer


def same_chat(got: Any) -> str:
    """Checks an answer in the form of OpenAI's client against the answer of `chat`. Returns its
    text."""
    wanted, [choice] = chat(), got.choices
    same("text", choice.message.content, wanted.text)
    same("finish_reason", choice.finish_reason, wanted.finish_reason)
    same("usage", (got.usage.prompt_tokens, got.usage.completion_tokens), wanted.usage)
    return str(choice.message.content)


def completion(prompt: str = PROMPT) -> Answer:
    body = {"prompt": prompt, "max_tokens": MAX_TOKENS, "temperature": 0}
    answer = plain("/v1/completions", body)
    return _answer(answer, answer["choices"][0]["text"], is_cut=True)


def _answer(answer: dict[str, Any], text: str, *, is_cut: bool) -> Answer:
    """Returns a plain answer. Checks reason and length of one that MAX_TOKENS should cut."""
    usage, reason = answer["usage"], answer["choices"][0]["finish_reason"]
    tokens = (usage["prompt_tokens"], usage["completion_tokens"])
    if is_cut:
        same("what a plain call gets", (reason, tokens[1]), ("length", MAX_TOKENS))
    return Answer(text, reason, tokens)


_LOOP = asyncio.new_event_loop()


def attempt(tried: str) -> Callable[[Callable[[], Any]], None]:
    """Run the decorated function or coroutine at once, and report its result as the attempt
    `tried`.

    The function returns what the program got. An exception is the reason why the attempt fails.
    """

    def run(function: Callable[[], Any]) -> None:
        began = time.time()
        got, why = None, ""
        try:
            got = function()
            if inspect.iscoroutine(got):
                got = _LOOP.run_until_complete(got)
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                raise
            why = " ".join(f"{type(error).__name__}: {error}".split())
            why = why.removeprefix("AssertionError: ")
        told = {
            "tried": tried,
            "passed": not why,
            "got": got if isinstance(got, str) else repr(got),
            "why": why,
            "began": began,
            "ended": time.time(),
        }
        with Path(os.environ["COMPAT_TOLD"]).open("a") as file:
            file.write(json.dumps(told) + "\n")

    return run

"""DSPy: a language model on each API, and modules that ask it for typed fields."""

from __future__ import annotations

from typing import Any, Literal

import dspy
import trying
from trying import attempt, same

dspy.configure_cache(enable_disk_cache=False, enable_memory_cache=False)


class Tell(dspy.Signature):
    """Tell of a hero."""

    question: str = dspy.InputField()
    hero: Literal["fox", "hare", "owl"] = dspy.OutputField()
    friends: Literal[1, 2, 3] = dspy.OutputField()


def model(name: str = trying.MODEL, kind: Any = "chat", most: int = trying.MAX_TOKENS) -> Any:
    return dspy.LM(
        f"openai/{name}", kind, temperature=0, max_tokens=most, num_retries=0,
        api_base=trying.URL, api_key=trying.KEY,
    )  # fmt: skip


def same_usage(lm: Any, wanted: trying.Answer) -> None:
    usage = lm.history[-1]["usage"]
    names = ("prompt_tokens", "completion_tokens")
    if "input_tokens" in usage:
        names = ("input_tokens", "output_tokens")
    same("usage", tuple(usage[name] for name in names), wanted.usage)


for kind in ("chat", "responses"):

    @attempt(f"{kind}: chat")
    def _(kind: str = kind) -> str:
        lm, wanted = model(kind=kind), trying.chat()
        [got] = lm(messages=trying.MESSAGES)
        text = got["text"] if isinstance(got, dict) else got
        same("text", text, wanted.text)
        same_usage(lm, wanted)
        return str(text)

    @attempt(f"{kind}: error: unknown model")
    def _(kind: str = kind) -> str:
        lm = model(trying.UNKNOWN, kind)
        return trying.fails(lambda: lm(messages=trying.MESSAGES), *trying.UNKNOWN_SAYS)

    @attempt(f"{kind}: error: prompt too long")
    def _(kind: str = kind) -> str:
        return trying.fails(lambda: model(kind=kind)(trying.LONG), *trying.LONG_SAYS)


@attempt("completion")
def _() -> str:
    """The program adds words to the prompt."""
    [got] = model(kind="text")(trying.PROMPT)
    same("text", got, trying.completion(f"{trying.PROMPT}\n\nBEGIN RESPONSE:").text)
    return str(got)


@attempt("a module with typed fields, by JSON")
def _() -> str:
    """The program sends the schema to models that it knows."""
    with dspy.context(lm=model(trying.ALIAS, most=200), adapter=dspy.JSONAdapter()):
        got = dspy.Predict(Tell)(question=trying.QUESTION)
    trying.is_tale({"hero": got.hero, "friends": got.friends})
    return f"{got.friends} {got.hero}"


@attempt("forced tool call")
def _() -> str:
    fields = {"tools": [trying.TOOL], "tool_choice": trying.TOOL_CHOICE}
    [got] = model(most=200)(messages=trying.MESSAGES, **fields)
    [call] = got["tool_calls"]
    trying.is_tale(call.function.arguments)
    return str(call.function.arguments)


@attempt("embeddings")
def _() -> str:
    embedder = dspy.Embedder(
        f"openai/{trying.MODEL}", caching=False, api_base=trying.URL, api_key=trying.KEY
    )
    return trying.are_vectors([[*map(float, vector)] for vector in embedder(trying.TEXTS)])

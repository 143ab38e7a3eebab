"""llm, Simon Willison's command, with further models of its extra-openai-models.yaml."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import trying
from trying import attempt, is_tale, same

ENTRIES = (
    ("teller", trying.MODEL, ", supports_tools: true, supports_schema: true"),
    ("completer", trying.MODEL, ", completion: true"),
    ("nobody", trying.UNKNOWN, ""),
)
OPTIONS = ("-o", "temperature", "0", "-o", "max_tokens")
folder = Path(os.environ["HOME"], "llm")
folder.mkdir()
os.environ["LLM_USER_PATH"] = str(folder)
(folder / "extra-openai-models.yaml").write_text(
    "".join(
        f"- {{model_id: {own}, model_name: {theirs}, api_base: '{trying.URL}',"
        f" api_key_name: promptq{more}}}\n"
        for own, theirs, more in ENTRIES
    )
)
(folder / "keys.json").write_text(json.dumps({"promptq": trying.KEY}))


def llm(*arguments: str) -> str:
    command = ["llm", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError((done.stdout + done.stderr).strip())
    return done.stdout


def tell(*arguments: str, most: int = trying.MAX_TOKENS) -> str:
    return llm(
        "-m", "teller", "-s", trying.SYSTEM, trying.QUESTION, *OPTIONS, str(most), *arguments
    )


@attempt("chat, streamed, with usage")
def _() -> str:
    wanted = trying.chat()
    same("text", tell("-u").removesuffix("\n"), wanted.text)
    logged = subprocess.run(
        ["llm", "logs", "-n", "1", "--json"], capture_output=True, text=True, check=True
    )
    [entry] = json.loads(logged.stdout)
    same("usage", (entry["input_tokens"], entry["output_tokens"]), wanted.usage)
    return wanted.text


@attempt("chat, not streamed")
def _() -> str:
    wanted = trying.chat()
    same("text", tell("--no-stream").removesuffix("\n"), wanted.text)
    return wanted.text


@attempt("completion")
def _() -> str:
    wanted = trying.completion()
    got = llm("-m", "completer", trying.PROMPT, *OPTIONS, str(trying.MAX_TOKENS))
    same("text", got.removesuffix("\n"), wanted.text)
    return wanted.text


@attempt("structured output of a schema")
def _() -> str:
    got = tell("--schema", json.dumps(trying.SCHEMA), most=200)
    is_tale(got)
    return got


@attempt("a tool that may be called is sent")
def _() -> str:
    python = "def paint(hero: str) -> str:\n    'Paint a hero.'\n    return hero\n"
    got = tell("--functions", python)
    assert got.strip()
    return got


@attempt("error: unknown model")
def _() -> str:
    def call() -> str:
        return llm("-m", "nobody", trying.QUESTION)

    return trying.fails(call, *trying.UNKNOWN_SAYS)


@attempt("error: prompt too long")
def _() -> str:
    return trying.fails(lambda: llm("-m", "teller", trying.LONG), *trying.LONG_SAYS)

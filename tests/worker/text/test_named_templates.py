"""Models whose chat templates have names: `default`, and `tool_use` for chats with tools."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from promptq.producer.calls.output.model_text import ExpectedOutput, read_whole
from promptq.shared.errors import InvalidRequestError
from promptq.shared.protocol.output_format import NO_ARGUMENTS, ToolCallOutput, ToolSchema
from promptq.shared.protocol.output_style import OutputStyle
from promptq.shared.protocol.request import Request
from promptq.worker.shipped import MODEL_DIR
from promptq.worker.text.grammars.schema_masks import Grammars
from promptq.worker.text.output_marks import OutputMarks
from promptq.worker.text.output_styles import style_of
from promptq.worker.text.tokenizer import HuggingFaceTokenizer
from tests.worker.engine.checkpoints.test_formats import FILES
from tests.worker.engine.checkpoints.test_refused import rewritten
from tests.worker.text.families import FAMILIES, TOOLS
from tests.worker.text.grammars.test_grammars import END, walk

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}]}
HERMES = FAMILIES["Hermes"]
PLAIN = "{% for m in messages %}{{ m.content }}{% endfor %}plain"
WITH_TOOLS = PLAIN.replace("plain", "with tools ") + HERMES.template


def as_list(folder: Path, templates: dict[str, str]) -> None:
    """The list in tokenizer_config.json that older models have."""
    listed = [{"name": name, "template": text} for name, text in templates.items()]
    write_config(folder, chat_template=listed)


def as_object(folder: Path, templates: dict[str, str]) -> None:
    write_config(folder, chat_template=templates)


def as_files(folder: Path, templates: dict[str, str]) -> None:
    """The files that transformers 5 writes."""
    write_config(folder)
    others = folder / "additional_chat_templates"
    others.mkdir()
    for name, text in templates.items():
        to = folder / "chat_template.jinja" if name == "default" else others / f"{name}.jinja"
        to.write_text(text)


def write_config(folder: Path, **more: Any) -> None:
    file = folder / "tokenizer_config.json"
    config = json.loads(file.read_text())
    config.pop("chat_template", None)
    file.write_text(json.dumps({**config, **more}))


def loaded(
    folder: Path, write: Callable[[Path, dict[str, str]], None], **templates: str
) -> HuggingFaceTokenizer:
    """The shipped model's tokenizer with these templates."""
    names = shutil.ignore_patterns("*.safetensors", "chat_template.jinja")
    shutil.copytree(MODEL_DIR, folder, ignore=names, dirs_exist_ok=True)
    write(folder, templates)
    return HuggingFaceTokenizer.load(str(folder))


def text_of(tokenizer: HuggingFaceTokenizer, **fields: Any) -> str:
    return tokenizer.decode(tokenizer.encode_prompt(Request.build({**CHAT, **fields})))


@pytest.mark.parametrize("write", [as_list, as_object, as_files])
def test_calls_are_read_and_forced_as_the_template_with_tools_writes_them(
    tmp_path: Path, write: Callable[[Path, dict[str, str]], None]
) -> None:
    tokenizer = loaded(tmp_path, write, default=PLAIN, tool_use=WITH_TOOLS)
    assert text_of(tokenizer) == text_of(tokenizer, tools=[]) == "Hiplain"
    assert text_of(tokenizer, tools=TOOLS, tool_choice="none") == "Hiplain"
    assert text_of(tokenizer, tools=TOOLS).startswith("Hiwith tools")

    style = OutputStyle.from_json(style_of(tokenizer).to_json())
    read = read_whole("Well." + HERMES.calls, style, ExpectedOutput.of({"tools": TOOLS}))
    assert (read.content, len(read.calls)) == ("Well.", 2)

    size = tokenizer.num_tokens
    wanted = ToolCallOutput((ToolSchema("stop-all", NO_ARGUMENTS, True),))
    grammar = Grammars(tokenizer, size, frozenset({END})).start(wanted, frozenset({END}))
    assert tokenizer.decode(walk(grammar, 0, size)).replace("{ }", "{}") == HERMES.forced


@pytest.mark.parametrize("reasons", ["default", "tool_use"])
def test_reasoning_is_that_of_the_template_that_renders_the_chat(
    tmp_path: Path, reasons: str
) -> None:
    templates = {"default": PLAIN, "tool_use": WITH_TOOLS}
    templates[reasons] += "{% if true %}<think></think><think>\n{% endif %}"
    tokenizer = loaded(tmp_path, as_list, **templates)
    style = OutputStyle.from_json(style_of(tokenizer).to_json())
    assert style is not None
    for fields in ({}, {"tools": TOOLS}, {"tools": TOOLS, "tool_choice": "none"}):
        request = Request.build({**CHAT, **fields})
        marks = OutputMarks(tokenizer, style, request, tokenizer.encode_prompt(request))
        stream, _ = marks.text_stream([], [], 0)
        text = "".join(map(stream.push, tokenizer.encode_text("Hm.</think>Yes"))) + stream.flush()
        is_reasoning = reasons == ("tool_use" if fields == {"tools": TOOLS} else "default")
        assert text == "<think>" * is_reasoning + "Hm.</think>Yes"
        read = read_whole("<think>Hm.</think>Yes", style, ExpectedOutput.of(fields))
        assert (read.reasoning, read.content) == (
            ("Hm.", "Yes") if is_reasoning else ("", "<think>Hm.</think>Yes")
        )


def test_what_no_template_renders_is_refused_in_one_sentence(tmp_path: Path) -> None:
    tokenizer = loaded(tmp_path, as_object, tool_use=WITH_TOOLS)
    assert text_of(tokenizer, tools=TOOLS).startswith("Hiwith tools")
    with pytest.raises(InvalidRequestError) as caught:
        text_of(tokenizer)
    assert str(caught.value) == (
        "messages: the model has no chat template for chats without tools; send tools, or a prompt"
    )
    tokenizer = loaded(tmp_path, as_object, rag=PLAIN)
    with pytest.raises(InvalidRequestError, match="no chat template for chats; send a prompt"):
        text_of(tokenizer, tools=TOOLS)
    assert style_of(tokenizer) == OutputStyle()


def test_the_default_template_renders_tools_where_none_is_for_them(tmp_path: Path) -> None:
    tokenizer = loaded(tmp_path, as_list, default=WITH_TOOLS, rag=PLAIN)
    assert text_of(tokenizer, tools=TOOLS).startswith("Hiwith tools")
    assert style_of(tokenizer) == HERMES.style


def test_templates_of_a_gguf_file(tmp_path: Path) -> None:
    fields: dict[str, Any] = {
        "tokenizer.chat_template": PLAIN,
        "tokenizer.chat_template.tool_use": WITH_TOOLS,
        "tokenizer.chat_templates": ["tool_use"],
    }
    file = rewritten(FILES / "small-q8_0.gguf", tmp_path / "m.gguf", **fields)
    tokenizer = HuggingFaceTokenizer.load(str(file))
    assert text_of(tokenizer) == "Hiplain"
    assert text_of(tokenizer, tools=TOOLS).startswith("Hiwith tools")
    assert style_of(tokenizer) == HERMES.style

"""Chat templates that read content as a list of parts, as those of many vision models do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.worker.text.families import TOOLS
from tests.worker.text.test_named_templates import as_files, loaded, text_of

SMOLVLM = (
    "{% for message in messages %}{{ message['role'] | capitalize }}"
    "{% if message['content'][0]['type'] == 'image' %}{{ ':' }}{% else %}{{ ': ' }}{% endif %}"
    "{% for line in message['content'] %}{% if line['type'] == 'text' %}{{ line['text'] }}"
    "{% elif line['type'] == 'image' %}{{ '<image>' }}{% endif %}{% endfor %}"
    "<end_of_utterance>{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)
LLAVA = (
    "{% for m in messages %}{{ m.role }}:"
    "{% for c in m.content | selectattr('type', 'equalto', 'image') %}<image>{% endfor %}"
    "{% for c in m.content | selectattr('type', 'equalto', 'text') %} {{ c.text | trim }}"
    "{% endfor %}{{ '\n' }}{% endfor %}"
)
STRICT = (
    "{% if messages[0].role == 'system' %}{{ '[' + messages[0].content + ']' }}"
    "{% set messages = messages[1:] %}{% endif %}{% for m in messages %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('order') }}{% endif %}"
    "{% if m.role == 'user' %}{{ m.content[0].text }}{% else %}{{ m.content }}{% endif %};"
    "{% endfor %}"
)
EITHER = (
    "{% for m in messages %}{% if m.content is string %}{{ m.content }};{% else %}"
    "{% for c in m.content %}part {{ c.text }};{% endfor %}{% endif %}{% endfor %}"
)
CHAT = [
    {"role": "system", "content": "Be short."},
    {"role": "user", "content": [{"type": "text", "text": "Hello"}, {"type": "text", "text": "!"}]},
    {"role": "assistant", "content": None},
    {"role": "user", "content": "Bye"},
]


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (
            SMOLVLM,
            "System: Be short.<end_of_utterance>\nUser: Hello!<end_of_utterance>\n"
            "Assistant: <end_of_utterance>\nUser: Bye<end_of_utterance>\nAssistant:",
        ),
        (LLAVA, "system: Be short.\nuser: Hello!\nassistant: \nuser: Bye\n"),
        (STRICT, "[Be short.]Hello!;;Bye;"),
        (EITHER, "Be short.;Hello!;;Bye;"),
    ],
    ids=["SmolVLM", "LLaVA", "strict", "either"],
)
def test_content_has_the_form_that_the_template_reads(
    template: str, expected: str, tmp_path: Path
) -> None:
    tokenizer = loaded(tmp_path, as_files, default=template)
    for _ in range(2):
        assert text_of(tokenizer, messages=CHAT) == expected


def test_other_roles_and_chats_with_tools_have_the_form_that_their_template_reads(
    tmp_path: Path,
) -> None:
    tokenizer = loaded(tmp_path, as_files, default=EITHER, tool_use="{{ tools[0].type }} " + LLAVA)
    call = {"type": "function", "function": {"name": "stop-all", "arguments": "{}"}}
    chat: list[dict[str, Any]] = [
        {"role": "critic", "content": "Hm"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "done"},
    ]
    written = "critic: Hm\nassistant: \ntool: done\n"
    assert text_of(tokenizer, messages=chat, tools=TOOLS) == "function " + written
    assert text_of(tokenizer, messages=chat) == "Hm;;done;"

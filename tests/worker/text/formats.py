"""How chat templates of newer families render calls, reasoning and content."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

from tokenizers import AddedToken
from transformers import AutoTokenizer

from promptq.shared.protocol.output_style import OutputStyle
from promptq.shared.protocol.request import Request
from promptq.worker.shipped import MODEL_DIR
from promptq.worker.text.output_styles import output_style
from promptq.worker.text.tokenizer import HuggingFaceTokenizer

USER: Any = {"role": "user", "content": "Go"}
TEXTS = (
    "Paris", "", " ", "\n", "a\nb\n", '"', "'", "\\", '\\"}', "São 日本 🦊", "{}", "[", "<", ">",
    "</", "5", "true", "null", "None", "</think>", "<tool_call>", "a, b=1)]", "é\t\x7f", "}<", ":",
)  # fmt: skip
"""Values of arguments. A format's own marks are added to them."""
PROPERTIES: Any = {
    "count": {"type": "integer"},
    "days": {"type": "array", "items": {"type": "integer"}},
    "empty": {"type": "array", "items": {"type": "string"}},
    "flag": {"type": "boolean"},
    "mode": {"enum": ["fast", "slow"]},
    "name": {"type": "string"},
    "none": {"type": ["integer", "null"]},
    "place": {
        "type": "object",
        "properties": {"tags": {"type": "array", "items": {"type": "string"}}, "x": {}},
    },
    "share": {"type": "number"},
}
SCHEMA: Any = {"type": "object", "properties": PROPERTIES, "required": ["name"]}
TOOLS: Any = [
    {"type": "function", "function": {"name": "get_weather", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "stop-all"}},
]
ARGUMENTS: Any = {
    "count": -5,
    "days": [1, 2],
    "empty": [],
    "flag": False,
    "mode": "fast",
    "name": 'São "}]\\\n',
    "none": None,
    "place": {"tags": ['a"b', "ü\n", ""], "x": {"y": [1.5, True, None]}},
    "share": 0.25,
}
"""In the order of the schema and of the alphabet: both are orders of templates."""


@dataclass(frozen=True)
class Format:
    """The part of a family's chat template that writes messages of the assistant."""

    name: str
    assistant: str
    """Renders `m`, up to `end`."""
    end: str
    teaches: str = ""
    """Text about calls, which may be all that shows the family's style."""
    prompt: str = "<|assistant|>"
    begun: str = ""
    """The beginning of the output that the prompt has already."""
    added: tuple[str, ...] = ()
    most_calls: int = 2
    has_reasoning: bool = True
    drops: frozenset[str] = frozenset()
    """Arguments that the template itself does not write so that they could be read again."""
    marks: tuple[str, ...] = ()
    """Marks that texts of arguments may hold, as only the mark behind them ends them."""
    text_before_call: bool = True

    @property
    def template(self) -> str:
        prompt = (self.prompt + self.begun).replace("\n", "\\n")
        return (
            f"{{% if tools %}}{self.teaches}{{% endif %}}{{% for m in messages %}}"
            f"{{% if m.role == 'assistant' %}}{self.assistant}"
            "{% else %}<|{{ m.role }}|>{{ m.content }}{% endif %}{% endfor %}"
            f"{{% if add_generation_prompt %}}{{{{ '{prompt}' }}}}{{% endif %}}"
        )

    @property
    def style(self) -> OutputStyle:
        style = OutputStyle.from_json(output_style(self.template).to_json())
        assert style is not None
        return style

    @cache  # noqa: B019  # there are few formats
    def tokenizer(self) -> HuggingFaceTokenizer:
        """The shipped model's tokenizer with what the family adds."""
        ours: Any = AutoTokenizer.from_pretrained(str(MODEL_DIR))
        ours.add_tokens([AddedToken(it, special=True, normalized=False) for it in self.added])
        ours.chat_template = self.template
        return HuggingFaceTokenizer(ours)

    def written(self, message: dict[str, Any]) -> str:
        """The output for which the template renders this message."""
        tokenizer = self.tokenizer()
        asked, answered = (
            tokenizer.chats.render(Request.build({"messages": messages, "tools": TOOLS}))
            for messages in ([USER], [USER, {"role": "assistant", **message}])
        )
        prompt = self.prompt + self.begun
        text = answered.removeprefix(asked.removesuffix(prompt)).removesuffix(prompt)
        return text.removeprefix(self.prompt).removeprefix(self.begun).removesuffix(self.end)


_THINK = "<think>{{ m.reasoning_content }}</think>"
_CALLS = "{% for c in m.tool_calls or [] %}{% set f = c.function %}"
_DSML_CALLS = (
    "{{ m.content }}{% if m.tool_calls %}{{ '\\n\\n' }}<{{ d }}SECTION>" + _CALLS + "{{ '\\n' }}"
    "<{{ d }}invoke name=\"{{ f.name }}\">{{ '\\n' }}"
    "{% for k, v in f.arguments.items() %}{% if not loop.first %}{{ '\\n' }}{% endif %}"
    "<{{ d }}parameter name=\"{{ k }}\" string=\"{{ 'true' if v is string else 'false' }}\">"
    "{{ v if v is string else v|tojson }}</{{ d }}parameter>{% endfor %}{{ '\\n' }}"
    "</{{ d }}invoke>{% endfor %}{{ '\\n' }}</{{ d }}SECTION>{% endif %}<eos>"
)
_GEMMA_VALUE = (
    "{% macro lit(v) %}{% if v is string %}{{ '<|\"|>' + v + '<|\"|>' }}"
    "{% elif v is boolean %}{{ 'true' if v else 'false' }}"
    "{% elif v is mapping %}{{ '{' }}{% for k, w in v|dictsort %}"
    "{% if not loop.first %},{% endif %}{{ k }}:{{ lit(w) }}{% endfor %}{{ '}' }}"
    "{% elif v is sequence %}[{% for w in v %}{{ lit(w) }}{% if not loop.last %},{% endif %}"
    "{% endfor %}]{% else %}{{ v }}{% endif %}{% endmacro %}"
)
FORMATS = {
    each.name: each
    for each in (
        Format(
            "gpt-oss",
            # Reasoning is in `thinking`, which is called so in no other family.
            "{% set message = m %}{% if message.thinking %}"
            "<|start|>assistant<|channel|>analysis<|message|>{{ message.thinking }}<|end|>"
            "{% endif %}{% if m.tool_calls %}{% set f = m.tool_calls[0].function %}"
            "<|start|>assistant to=functions.{{ f.name }}<|channel|>commentary json<|message|>"
            "{{ f.arguments|tojson }}<|call|>{% else %}"
            "<|start|>assistant<|channel|>final<|message|>{{ m.content }}<|end|>{% endif %}",
            "<|end|>",
            prompt="<|start|>assistant",
            added=("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>",
                   "<|call|>"),
            most_calls=1,
            marks=("<tool_call>",),
            text_before_call=False,
        ),
        Format(
            "glm-4.5",
            "\n" + _THINK + "{% if m.content %}{{ '\\n' + m.content }}{% endif %}" + _CALLS
            + "{{ '\\n<tool_call>' + f.name }}\n{% for k, v in f.arguments.items() %}\n"
            "<arg_key>{{ k }}</arg_key>\n<arg_value>{{ v if v is string else v|tojson }}"
            "</arg_value>\n{% endfor %}\n</tool_call>{% endfor %}<|user|>",
            "<|user|>",
            added=("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>",
                   "</arg_value>"),
            marks=("</tool_call>", "<arg_key>"),
        ),
        Format(
            "glm-4.7",
            _THINK + "{{ m.content }}" + _CALLS
            + "<tool_call>{{ f.name }}{% for k, v in f.arguments.items() %}"
            "<arg_key>{{ k }}</arg_key><arg_value>{{ v if v is string else v|tojson }}</arg_value>"
            "{% endfor %}</tool_call>{% endfor %}<|user|>",
            "<|user|>",
            begun="<think>",
            marks=("</tool_call>", "<arg_key>"),
        ),
        Format(
            "gemma-4",
            _GEMMA_VALUE + "{% if m.reasoning_content %}{{ '<|channel>thought\\n' }}"
            "{{ m.reasoning_content }}<channel|>{% endif %}{{ m.content }}" + _CALLS
            + "{{ '<|tool_call>call:' + f.name + '{' }}{% for k, v in f.arguments|dictsort %}"
            "{% if not loop.first %},{% endif %}{{ k }}:{{ lit(v) }}{% endfor %}"
            "{{ '}<tool_call|>' }}{% endfor %}<turn|>",
            "<turn|>",
            added=("<|tool_call>", "<tool_call|>", '<|"|>', "<|channel>", "<channel|>"),
            marks=("<tool_call|>", "}<tool_call|>"),
        ),
        Format(
            "minimax-m2",
            "<think>{{ '\\n' + (m.reasoning_content or '') + '\\n' }}</think>"
            "{{ '\\n\\n' + m.content }}{% if m.tool_calls %}"
            "{{ '\\n<minimax:tool_call>\\n' }}" + _CALLS
            + "{{ '<invoke name=\"' + f.name + '\">\\n' }}{% for k, v in f.arguments.items() %}"
            "<parameter name=\"{{ k }}\">{{ v if v is string else v|tojson }}"
            "{{ '</parameter>\\n' }}{% endfor %}{{ '</invoke>\\n' }}{% endfor %}"
            "</minimax:tool_call>{% endif %}[e~[",
            "[e~[",
            begun="<think>\n",
            added=("<minimax:tool_call>", "</minimax:tool_call>"),
            marks=("</invoke>", '<parameter name="a">'),
        ),
        Format(
            "deepseek-v3.2",
            "{% set d = '｜DSML｜' %}" + _THINK + _DSML_CALLS.replace("SECTION", "function_calls"),
            "<eos>",
            begun="<think>",
            added=("｜DSML｜",),
            marks=("</parameter>",),
        ),
        Format(
            "deepseek-v4",
            "{% set d = '｜DSML｜' %}" + _THINK + _DSML_CALLS.replace("SECTION", "tool_calls"),
            "<eos>",
            begun="<think>",
            marks=("</parameter>",),
        ),
        Format(
            "kimi-k2",
            _THINK + "{{ m.content }}{% if m.tool_calls %}<|tool_calls_section_begin|>" + _CALLS
            + "<|tool_call_begin|>{{ c.id }}<|tool_call_argument_begin|>{{ f.arguments|tojson }}"
            "<|tool_call_end|>{% endfor %}<|tool_calls_section_end|>{% endif %}<|im_end|>",
            "<|im_end|>",
            added=("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>",
                   "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"),
            marks=("<|tool_call_end|>",),
        ),
        Format(
            "qwen3-coder",
            "<think>\n{{ m.reasoning_content }}\n</think>\n\n{{ m.content }}" + _CALLS
            + "{{ '\\n<tool_call>\\n<function=' + f.name + '>\\n' }}"
            "{% for k, v in f.arguments.items() %}{{ '<parameter=' + k + '>\\n' }}"
            "{{ v if v is string else v|tojson }}{{ '\\n</parameter>\\n' }}{% endfor %}"
            "{{ '</function>\\n</tool_call>' }}{% endfor %}<|im_end|>",
            "<|im_end|>",
            begun="<think>\n",
            added=("<tool_call>", "</tool_call>"),
            marks=("</function>", "<parameter=a>"),
        ),
        Format(
            "pythonic",
            "{{ m.content }}{% if m.tool_calls %}[" + _CALLS
            + "{{ f.name }}({% for k, v in f.arguments.items() %}"
            "{{ k }}=\"{{ '%s'|format(v) }}\"{% if not loop.last %}, {% endif %}{% endfor %})"
            "{% if not loop.last %}, {% endif %}{% endfor %}]{% endif %}<|eot|>",
            "<|eot|>",
            teaches="Use exact format: [func_name1(param1=value1, param2=value2), func_name2(...)]",
            has_reasoning=False,
            drops=frozenset({"name", "place"}),
            marks=(")", "]"),
            text_before_call=False,
        ),
        Format(
            "llama-4",
            "{% if m.tool_calls %}<|python_start|>{{ m.content }}<|python_end|>{% for c in"
            " m.tool_calls %}{{ '{\"name\": \"' + c.function.name + '\", \"parameters\": ' }}"
            "{{ c.function.arguments|tojson }}{{ '}' }}{% endfor %}{% else %}{{ m.content }}"
            "{% endif %}<|eot|>",
            "<|eot|>",
            teaches='{{ \'{"name": function name, "parameters": dictionary of argument name and its'
            " value}' }}",
            added=("<|python_start|>", "<|python_end|>"),
            has_reasoning=False,
        ),
        Format(
            "mistral",
            "{% if m.reasoning_content %}[THINK]{{ m.reasoning_content }}[/THINK]{% endif %}"
            "{{ m.content }}" + _CALLS + "[TOOL_CALLS]{{ f.name }}[ARGS]{{ f.arguments|tojson }}"
            "{% endfor %}</s>",
            "</s>",
            added=("[TOOL_CALLS]", "[ARGS]", "[THINK]", "[/THINK]"),
            marks=("[ARGS]",),
        ),
        Format(
            "mistral-numbered",
            "{{ m.content }}" + _CALLS + "{% if c.id|length != 9 %}{{ raise_exception('9') }}"
            "{% endif %}[TOOL_CALLS]{{ f.name }}[CALL_ID]{{ c.id }}[ARGS]{{ f.arguments|tojson }}"
            "{% endfor %}</s>",
            "</s>",
            added=("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
            has_reasoning=False,
            marks=("[ARGS]",),
        ),
    )
}  # fmt: skip

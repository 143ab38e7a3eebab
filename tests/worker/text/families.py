"""The parts of chat templates that say how model families write calls and reasoning."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from promptq.shared.protocol.output_style import OutputStyle
from promptq.worker.shipped import MODEL_DIR
from promptq.worker.text.output_styles import output_style
from promptq.worker.text.tokenizer import HuggingFaceTokenizer

_TURNS = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}"
_PROMPT = "{% if add_generation_prompt %}<|assistant|>{% endif %}"

ARGUMENTS = ('{"city": "São \\"}]\\\\", "days": [1, {"a": "b"}]}', "{}")
"""Of the calls `get_weather` and `stop-all` that each family writes in `calls`."""
NAMES = ("get_weather", "stop-all")


@dataclass(frozen=True)
class Family:
    """A family's template, its special tokens, and how it writes those calls after `content`."""

    template: str
    calls: str = ""
    special: tuple[str, ...] = ()
    content: str = "Let me see. "
    forced: str = ""
    """How a call of `stop-all` is written that a grammar forces."""

    @property
    def style(self) -> OutputStyle:
        return output_style(_TURNS + self.template + _PROMPT)

    def tokenizer(self, prompt: str = "") -> HuggingFaceTokenizer:
        """The shipped model's tokenizer with what the family adds; `prompt` ends the prompt."""
        ours: Any = AutoTokenizer.from_pretrained(str(MODEL_DIR))
        ours.add_tokens([AddedToken(it, special=True, normalized=False) for it in self.special])
        ours.add_tokens(
            [AddedToken(it, special=False) for it in ("<think>", "</think>", "<tool_call>")]
        )
        ours.chat_template = _TURNS + self.template + _PROMPT + prompt
        return HuggingFaceTokenizer(ours)


def _objects(
    before: str, after: str, key: str = "arguments", more: str = "", name_key: str = "name"
) -> list[str]:
    pairs = zip(NAMES, ARGUMENTS, strict=True)
    return [f'{before}{{"{name_key}": "{name}", "{key}": {it}{more}}}{after}' for name, it in pairs]


FIRST, SECOND = ARGUMENTS
FAMILIES = {
    "Hermes": Family(
        '{% if tools %}<tool_call>\n{"name": <function-name>, ...}\n</tool_call>{% endif %}',
        "\n".join(_objects("<tool_call>\n", "\n</tool_call>")),
        forced='<tool_call>\n{"name": "stop-all", "arguments": {}}\n</tool_call>',
    ),
    "Llama 3": Family(
        '{% if tools %}{"name": function name, "parameters": dictionary of argument name and its'
        " value}{% endif %}",
        "<|python_tag|>" + "; ".join(_objects("", "", "parameters")),
        special=("<|python_tag|>",),
        forced='{"name": "stop-all", "parameters": {}}',
    ),
    "Llama 3, bare": Family(
        '{% if tools %}{"name": function name, "parameters": dictionary of argument name and its'
        " value}{% endif %}",
        "; ".join(_objects("", "", "parameters")),
        content="",
        forced='{"name": "stop-all", "parameters": {}}',
    ),
    "Command R": Family(
        "{% if tools %}Write 'Action:' followed by ```json\n[\n    {\n"
        '        "tool_name": title of the tool in the specification,\n{% endif %}',
        "Action: ```json\n["
        + ",\n".join(_objects("", "", "parameters", name_key="tool_name"))
        + "\n]```",
        forced='Action: ```json\n[{"tool_name": "stop-all", "parameters": {}}]```',
    ),
    "Mistral, a list": Family(
        "{% if tools %}[TOOL_CALLS] [ {{ tools }} ]{% endif %}",
        "[TOOL_CALLS] [" + ", ".join(_objects("", "", more=', "id": "a]}b"')) + "]",
        special=("[TOOL_CALLS]",),
        forced='[TOOL_CALLS] [{"name": "stop-all", "arguments": {}}]',
    ),
    "Mistral, close": Family(
        "{% if tools %}[TOOL_CALLS][ {{ tools }} ]{% endif %}",
        "[TOOL_CALLS] [\n" + ",\n".join(_objects("", "")) + "\n]",
        special=("[TOOL_CALLS]",),
        forced='[TOOL_CALLS][{"name": "stop-all", "arguments": {}}]',
    ),
    "Mistral, named": Family(
        "{% if tools %}[TOOL_CALLS]name[ARGS]{% endif %}[THINK][/THINK]",
        f"[TOOL_CALLS]get_weather[ARGS]{FIRST}[TOOL_CALLS]stop-all[ARGS]{SECOND}",
        special=("[TOOL_CALLS]", "[ARGS]", "[THINK]", "[/THINK]"),
        forced="[TOOL_CALLS]stop-all[ARGS]{}",
    ),
    "Mistral, numbered": Family(
        "{% if tools %}[TOOL_CALLS]name[CALL_ID]id[ARGS]{% endif %}",
        f"[TOOL_CALLS]get_weather[CALL_ID]a1[ARGS]{FIRST}[TOOL_CALLS]stop-all[ARGS]{SECOND}",
        special=("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
        forced="[TOOL_CALLS]stop-all[CALL_ID]a1b2c3d4e[ARGS]{}",
    ),
    "DeepSeek V3": Family(
        "{% if tools %}<｜tool▁calls▁begin｜>function<｜tool▁sep｜>```json```{% endif %}"
        "{% set shown = messages[0].content.split('</think>')[-1] %}",
        "<｜tool▁calls▁begin｜>"
        + "\n".join(
            f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{it}\n```<｜tool▁call▁end｜>"
            for name, it in zip(NAMES, ARGUMENTS, strict=True)
        )
        + "<｜tool▁calls▁end｜>",
        forced="<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>stop-all\n```json\n"
        "{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    ),
    "DeepSeek V3.1": Family(
        "{% if tools %}<｜tool▁calls▁begin｜>{% endif %}</think>",
        "<｜tool▁calls▁begin｜>"
        + "".join(
            f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{it}<｜tool▁call▁end｜>"
            for name, it in zip(NAMES, ARGUMENTS, strict=True)
        )
        + "<｜tool▁calls▁end｜>",
        special=("<｜tool▁calls▁begin｜>", "<｜tool▁sep｜>"),
        forced="<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>stop-all<｜tool▁sep｜>{}"
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    ),
    "Kimi K2": Family(
        "{% if tools %}<|tool_calls_section_begin|><|tool_call_argument_begin|>{% endif %}",
        "<|tool_calls_section_begin|>"
        + "".join(
            f"<|tool_call_begin|>functions.{name}:{n}<|tool_call_argument_begin|>{it}"
            "<|tool_call_end|>"
            for n, (name, it) in enumerate(zip(NAMES, ARGUMENTS, strict=True))
        )
        + "<|tool_calls_section_end|>",
        forced="<|tool_calls_section_begin|><|tool_call_begin|>functions.stop-all:0"
        "<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>",
    ),
    "Qwen3-Coder": Family(
        "{% if tools %}<tool_call>\n<function=name>\n<parameter=p>\n</parameter>{% endif %}"
        "</think>",
        '<tool_call>\n<function=get_weather>\n<parameter=city>\nSão "}]\\\n</parameter>\n'
        '<parameter=days>\n[1, {"a": "b"}]\n</parameter>\n</function>\n</tool_call>\n'
        "<tool_call>\n<function=stop-all>\n</function>\n</tool_call>",
        forced="<tool_call>\n<function=stop-all>\n</function>\n</tool_call>",
    ),
    "GLM 4.5": Family(
        "{% if tools %}<tool_call>\n</arg_key>\n<arg_value>{% endif %}</think>",
        '<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>São "}]\\</arg_value>\n'
        '<arg_key>days</arg_key>\n<arg_value>[1, {"a": "b"}]</arg_value>\n</tool_call>\n'
        "<tool_call>stop-all\n</tool_call>",
        forced="<tool_call>stop-all\n</tool_call>",
    ),
    "MiniMax M2": Family(
        "{% if tools %}<minimax:tool_call><invoke name={% endif %}</think>",
        '<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="city">São "}]\\'
        '</parameter>\n<parameter name="days">[1, {"a": "b"}]</parameter>\n</invoke>\n'
        '<invoke name="stop-all">\n</invoke>\n</minimax:tool_call>',
        special=("<minimax:tool_call>",),
        forced='<minimax:tool_call>\n<invoke name="stop-all">\n</invoke>\n</minimax:tool_call>',
    ),
    "DeepSeek V3.2": Family(
        "{% if tools %}<｜DSML｜function_calls>{% endif %}</think>",
        '<｜DSML｜function_calls>\n<｜DSML｜invoke name="get_weather">\n'
        '<｜DSML｜parameter name="city" string="true">São "}]\\</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="days" string="false">[1, {"a": "b"}]</｜DSML｜parameter>\n'
        '</｜DSML｜invoke>\n<｜DSML｜invoke name="stop-all">\n\n</｜DSML｜invoke>\n'
        "</｜DSML｜function_calls>",
        forced='<｜DSML｜function_calls>\n<｜DSML｜invoke name="stop-all">\n</｜DSML｜invoke>\n'
        "</｜DSML｜function_calls>",
    ),
    "Gemma 4": Family(
        "{% if tools %}<|tool_call>call:<tool_call|>{% endif %}"
        "{% set shown = '<|channel>thought\n<channel|>' %}",
        '<|tool_call>call:get_weather{city:<|"|>São "}]\\<|"|>,days:[1,{a:<|"|>b<|"|>}]}'
        "<tool_call|><|tool_call>call:stop-all{}<tool_call|>",
        special=("<|tool_call>", "<tool_call|>"),
        forced="<|tool_call>call:stop-all{}<tool_call|>",
    ),
    "Llama 4, pythonic": Family(
        "{% if tools %}[func_name1(param1=value1){% endif %}",
        '[get_weather(city="São \\"}]\\\\", days=[1, {\'a\': "b"}]), stop-all()]',
        content="",
        forced="[stop-all()]",
    ),
}
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}, "days": {"type": "array"}},
            },
        },
    },
    {"type": "function", "function": {"name": "stop-all"}},
]


def byte_fallback() -> PreTrainedTokenizerFast:
    """Makes a tokenizer like SentencePiece's: spaces are U+2581, and characters without a token are
    spelt in bytes.
    """
    words = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    words += ["▁", '"', "{", "}", ":", ",", "a", "b", '▁"', '{"', '":', "▁{", "cat", "1", "23"]
    model = models.BPE(
        {word: i for i, word in enumerate(words)}, [], unk_token="<unk>", byte_fallback=True
    )
    tokenizer = Tokenizer(model)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    tokenizer.add_special_tokens([AddedToken(word, special=True) for word in words[:3]])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>")


def sentence_piece(*, adds_bos: bool = False) -> PreTrainedTokenizerFast:
    """Makes a tokenizer like Llama 2's, which puts a space before each text, and drops the first
    one when it decodes.
    """
    tokenizer = byte_fallback()
    backend = tokenizer.backend_tokenizer
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    backend.decoder = decoders.Sequence(
        [
            *(decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()),
            decoders.Strip(" ", 1, 0),
        ]
    )
    if adds_bos:
        backend.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", 1)]
        )
    return tokenizer

"""A chat template that would take gigabytes is refused before it takes them."""

from __future__ import annotations

import resource
from typing import Any

import pytest
from transformers import AutoTokenizer

from promptq.shared.errors import InvalidRequestError
from promptq.shared.protocol.request import Request
from promptq.worker.shipped import MODEL_DIR
from promptq.worker.text.chat_rendering import ChatRenderer

GROWING = [
    '{{ "x" * 3000000000 }}',
    "{{ 3000000000 * 'x' }}",
    "{{ 'x' * n }}",
    "{{ ([0] * 300000000) | length }}",
    "{{ 'x' | center(3000000000) }}",
    "{{ 'x' | center(width=n) }}",
    "{{ 'x'.center(3000000000) }}",
    "{{ 'x'.ljust(n) }}{{ 'x'.rjust(n) }}",
    "{{ '1'.zfill(3000000000) }}",
    "{{ '\\t'.expandtabs(2000000000) }}",
    "{{ '%3000000000d' | format(1) }}",
    "{{ '%*d' | format(n, 1) }}",
    "{{ '%3000000000d' % 1 }}",
    "{{ '{:>3000000000}'.format(1) }}",
    "{{ '{:>{}}'.format(1, n) }}",
    "{{ 'a\\nb' | indent(3000000000) }}",
    "{{ messages | tojson(indent=1000000000) }}",
    "{{ [1] | batch(1000000000, 0) | list }}",
    "{{ [1] | slice(1000000000) | list }}",
    "{{ 1.5 | round(1000000000, 'ceil') }}",
    "{{ 10 ** 1000000000 }}",
    "{{ (1).to_bytes(3000000000) }}",
    "{% set s = namespace(x=10) %}{% for i in range(40) %}{% set s.x = s.x * s.x %}{% endfor %}",
    "{% set s = namespace(x='x') %}{% for i in range(40) %}{% set s.x = s.x ~ s.x %}{% endfor %}",
    "{% set s = namespace(x='x') %}{% for i in range(40) %}{% set s.x = s.x + s.x %}{% endfor %}",
    "{% set s = namespace(x=[0]) %}{% for i in range(40) %}{% set s.x = s.x + s.x %}{% endfor %}",
    "{% set s = namespace(x=['x']) %}{% for i in range(40) %}{% set s.x = [s.x, s.x] %}{% endfor %}"
    "{{ s.x }}",
    "{% set s = namespace(x=['x']) %}{% for i in range(40) %}{% set s.x = [s.x, s.x] %}{% endfor %}"
    "{{ s.x | string | length }}",
    "{% set s = namespace(x=[]) %}{% for i in range(900) %}"
    "{% set s.x = s.x + ['x' * 9000000 ~ i] %}{% endfor %}",
    "{% set b = 'x' * 9000000 %}{% set s = namespace(x=[]) %}{% for i in range(900) %}"
    "{% set s.x = s.x + [b[1:]] %}{% endfor %}",
    "{% set b = 'x' * 9000000 %}{% for i in range(900) %}{{ b }}{% endfor %}",
    "{% set b = 'x' * 9000000 %}{% macro m() %}{% for i in range(900) %}{{ b }}{% endfor %}"
    "{% endmacro %}{{ m() | length }}",
    "{% set b = 'x' * 9000000 %}{% set c %}{% for i in range(900) %}{{ b }}{% endfor %}"
    "{% endset %}",
    "{% set b = 'x' * 9000000 %}{{ ([b] * 900) | join | length }}",
    "{% set b = 'x' * 9000000 %}{{ ''.join([b] * 900) | length }}",
    "{% set b = 'x' * 9000 %}{{ b | replace('x', b) | replace('x', b) | length }}",
    "{% set b = 'x' * 9000 %}{{ b.replace('', b).replace('x', b) | length }}",
    "{% set b = '{0}' * 9000 %}{{ b.format('x' * 900000) | length }}",
    "{% set b = 'x ' * 900000 %}{{ b | wordwrap(1, wrapstring='x' * 9000) | length }}",
    "{% filter center(3000000000) %}x{% endfilter %}",
    "{{ ['x'] | map('center', 3000000000) | list }}",
]
LARGE = {"words": "ab ", "lines": "ab\\n", "letters": "\u1234", "marks": "&\x01", "sharp": "\xdf"}
"""Texts of some 60 MB are within the limit. In pieces they take gigabytes."""
GROWING += [
    f"{{% set s = '{LARGE[name]}' * {2**20 // len(LARGE[name])} * 24 %}}{{{{ {expression} }}}}"
    for name, expression in [
        *(("words", "s.split(' ') | length"), ("words", "s.split() | length")),
        *(("words", "s.rsplit() | length"), ("words", "s.encode().split() | length")),
        *(
            ("words", f"s | {it} | length")
            for it in ("title", "urlize", "wordwrap(40)", "striptags")
        ),
        *(("words", "s | wordcount"), ("words", "s.split(' ', 2000000) | length")),
        *(("lines", "s.splitlines() | length"), ("lines", "s | indent(1) | length")),
        *(("letters", f"s | {it} | list | length") for it in ("list", "unique", "map('upper')")),
        *(("letters", f"s | {it} | list | length") for it in ("batch(2)", "slice(3)", "select")),
        *(("letters", "s | sort | length"), ("letters", "s | join(',') | length")),
        *(("letters", "','.join(s) | length"), ("letters", "cycler(*s)")),
        *(("letters", "'{}'.format(*s)"), ("letters", "s | urlencode | length")),
        *(("letters", "s.encode('unicode_escape') | length"), ("letters", "s | groupby('x')")),
        *(("marks", f"s | {it} | length") for it in ("tojson", "e", "forceescape", "pprint")),
        *(("marks", "{'x': s} | xmlattr"), ("marks", "[s] | tojson | length")),
        *(("sharp", "s.upper() | length"), ("sharp", "s | upper | length")),
    ]
]


def rendered(template: str, **fields: Any) -> str:
    tokenizer = AutoTokenizer.from_pretrained(str(MODEL_DIR))
    tokenizer.chat_template = template
    request = Request.build({"messages": [{"role": "user", "content": "Hi"}], **fields})
    return ChatRenderer(tokenizer).render(request)


@pytest.mark.matrix(10)
@pytest.mark.parametrize("template", GROWING)
def test_what_grows_is_refused_in_one_sentence_before_it_takes_the_memory(template: str) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(InvalidRequestError) as caught:
        rendered(template, chat_template_kwargs={"n": 3_000_000_000})
    assert str(caught.value) in (
        "messages: the model's chat template refuses them: it makes a text or list of more than"
        " 64 MiB, or of more than 512 MiB in all",
        # Of lists within lists, the text is measured for as long as the template may take.
        "messages: take too long to render: the model's chat template needs more than 1 s",
    )
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 800 * 1024


def test_arguments_of_calls_are_json_where_a_template_takes_them_for_a_text() -> None:
    """DeepSeek's template does that, for example."""
    called = {"function": {"name": "f", "arguments": '{"a": ["é", null]}'}}
    template = (
        "{% for call in messages[0].tool_calls %}{{ 'f' + call.function.arguments + '.' }}"
        "{{ call.function.arguments.a[0] }}{{ call.function.arguments | tojson }}{% endfor %}"
    )
    text = rendered(template, messages=[{"role": "assistant", "tool_calls": [called]}])
    assert text == 'f{"a": ["é", null]}.é{"a": ["é", null]}'


def test_what_templates_do_gives_the_same() -> None:
    """The limited environment renders what the library renders."""
    template = (
        "{%- for m in messages %}{{ '<|' ~ m.role ~ '|>\\n' + m['content'][0:9] | trim }}"
        "{{ m | tojson(indent=2) }}{{ 'a\\nb' | indent(4, first=True) }}{{ '-' * 3 }}{{ 7 % 4 }}"
        "{{ ['a', 1] | join(', ') }}{{ messages | map(attribute='role') | join('+') }}"
        "{{ messages | join('+', attribute='content') }}{{ '%5.1f|%s' | format(2.25, 'x') }}"
        "{{ '{:>4}'.format('a') }}{{ 'a b'.replace(' ', '_') }}{{ 'ab' | replace('a', 'x') }}"
        "{{ ['x', 'y'] }}{{ none }}{{ undefined }}{{ true }}{{ 2 ** 5 }}{{ [[1], [2]] | length }}"
        "{{ 'x' | center(5) }}{{ ','.join(['a', 'b']) }}{{ 1.25 | round(1) }}{{ [1, 2] | sum }}"
        "{%- set c %}in{{ m.role }}{% endset %}{{ c }}{% macro f(x) %}[{{ x }}]{% endmacro %}"
        "{{ f(1) ~ f('a') }}{{ 'a b' | title | upper }}{{ [3, 1] | sort | first }}{% endfor %}"
        "{{ 'a,b'.split(',') }}{{ ' a b '.split() }}{{ '{}{}'.format(*'ab') }}{{ 'ab' | list }}"
    )
    assert rendered(template) == (
        '<|user|>\nHi{\n  "role": "user",\n  "content": "Hi"\n}    a\n    b---3a, 1userHi'
        "  2.2|x   aa_bxb['x', 'y']NoneTrue322  x  a,b1.23inuser[1][a]A B1"
        "['a', 'b']['a', 'b']ab['a', 'b']"
    )


def test_a_long_message_may_be_taken_apart() -> None:
    """Templates split so to find the reasoning. A message may have 8 MiB."""
    content = "word \u1234\n" * 500_000 + "</think>answer"
    template = (
        "{% set s = messages[0].content %}{{ s.split('</think>')[-1] }}{{ s.rsplit('w', 1) | length"
        " }}{{ s | tojson | length }}{{ s.splitlines() | length }}{{ s | upper | length }}"
    )
    text = rendered(template, messages=[{"role": "user", "content": content}])
    assert text == f"answer2{len(content) + 500_002}500001{len(content)}"

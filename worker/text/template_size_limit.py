"""Limits the memory of chat templates. Before an operation that may make a large value, this module
checks how large the value would be.

A single call into C, such as a text times a number, can take all memory in a moment, and no other
thread can stop it. jinja2 is imported only here.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from typing import Any

from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.filters import make_attrgetter
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from transformers.utils import chat_template_utils

MOST_BYTES = 2**26
"""The most bytes of one value."""
MOST_BYTES_IN_ALL = 2**29
"""The most bytes of all values together that a template may make in one rendering."""

_SMALL = 256
"""Shorter texts do not count: the time limit ends a template before such texts fill the memory."""
_MOST_BITS = 2**16
_MOST_DECIMALS = 1000
_LONGEST_SEPARATOR = 64
_MOST_PIECES = 2**20
"""The most pieces into which one operation may split a text. A piece takes some 50 to 80 bytes."""
_LINE_ENDS = "\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029"
_INTO_PIECES = frozenset(
    {
        *("batch", "groupby", "list", "map", "reject", "rejectattr", "select", "selectattr"),
        *("slice", "sort", "striptags", "title", "unique", "urlize", "wordcount", "wordwrap"),
    }
)
"""Filters that split a text into characters or words."""
_GROWTH = {
    **dict.fromkeys(("e", "escape", "forceescape", "tojson", "xmlattr"), 6),
    **dict.fromkeys(("urlencode", "encode"), 12),
    "pprint": 10,
}
"""For each filter or method: the most characters or bytes in its result for one character."""
_CASES = frozenset({"capitalize", "casefold", "lower", "swapcase", "title", "upper"})
"""Filters and methods whose result needs up to 12 bytes for a character that is not ASCII."""
_MEASURED = (str, bytes, list, tuple, dict)
_TEXTS_OF_ANYTHING = frozenset(
    {
        *("capitalize", "center", "e", "escape", "forceescape", "format", "indent", "lower"),
        *("pprint", "replace", "safe", "string", "striptags", "title", "tojson", "trim"),
        *("truncate", "upper", "urlencode", "urlize", "wordcount", "wordwrap", "xmlattr"),
    }
)
"""Filters that turn a list or an object into a text."""

_NUMBER = re.compile(r"[0-9]+")


class TemplateSizeError(Exception):
    """Raised if a template makes a value that is too large."""

    def __init__(self) -> None:
        super().__init__(
            f"it makes a text or list of more than {MOST_BYTES >> 20} MiB, or of more than"
            f" {MOST_BYTES_IN_ALL >> 20} MiB in all"
        )


_num_bytes: ContextVar[list[int] | None] = ContextVar("num_bytes", default=None)


@contextmanager
def size_limit() -> Iterator[None]:
    """Inside this context, transformers' chat templates raise TemplateSizeError for large values.

    Replaces, for the whole process, the class that transformers uses as a template's environment.
    """
    library: Any = chat_template_utils
    library.ImmutableSandboxedEnvironment = BoundedEnvironment
    token = _num_bytes.set([0])
    try:
        yield
    finally:
        _num_bytes.reset(token)


def _check(size: int, most: int = MOST_BYTES) -> None:
    if size > most:
        raise TemplateSizeError


def _kept(value: Any) -> Any:
    """Count the bytes of a new value, and return it. Raises TemplateSizeError above a limit."""
    if type(value) is str and len(value) < _SMALL:
        return value
    if isinstance(value, _MEASURED):
        size = sys.getsizeof(value)
        _check(size)
        if (num_bytes := _num_bytes.get()) is not None:
            num_bytes[0] += size
            _check(num_bytes[0], MOST_BYTES_IN_ALL)
    return value


def _length(value: Any) -> int:
    """Returns the approximate number of characters of a value as a text."""
    if isinstance(value, str | bytes):
        return len(value)
    if isinstance(value, int):
        return value.bit_length() // 3
    if not isinstance(value, _MEASURED):
        return 16
    size = 2
    for item in value.items() if isinstance(value, dict) else value:
        size += _length(item) + 2
        _check(size)
    return size


def _json_of(value: Any) -> str:
    """Returns a text unchanged, and another value as JSON: some templates expect texts only."""
    _check(_length(value))
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _int_of(value: Any) -> int:
    return abs(value) if isinstance(value, int) else 0


def _check_pieces(text: str | bytes, separator: Any, most: int) -> None:
    """Check the number of pieces before a text is split at most `most` times (-1: no limit)."""
    if len(text) > _MOST_PIECES and not 0 <= most <= _MOST_PIECES:
        _check(len(text.split(separator, _MOST_PIECES)), _MOST_PIECES)


def _check_lines(text: str | bytes) -> None:
    if len(text) > _MOST_PIECES:
        letters = text.decode("latin-1") if isinstance(text, bytes) else text
        _check(sum(map(letters.count, _LINE_ENDS)), _MOST_PIECES)


def _check_characters(value: Any) -> None:
    """Check the length of a text before each of its characters becomes a separate text."""
    if isinstance(value, str | bytes):
        _check(len(value), _MOST_PIECES)


def _check_growth(name: str, value: Any) -> None:
    if isinstance(value, str) and len(value) > _SMALL and not value.isascii() and name in _CASES:
        _check(len(value) * 12)
    if name in _GROWTH:
        _check(_length(value) * _GROWTH[name])


def _check_format(template: str | bytes, values: Iterable[Any]) -> None:
    """Check the length that `%` or `format` would produce. The check takes each field to be as wide
    as the largest number in the template or the values, since widths are such numbers."""
    text = template.decode("latin-1") if isinstance(template, bytes) else template
    values = list(values)
    num_fields = text.count("%") + text.count("{")
    _check(num_fields * _length(values) + len(text))
    numbers = _NUMBER.findall(text)
    _check(sum(int(number[:16]) for number in numbers))
    if "*" in text or "{" in text:  # a width may be a value
        _check(num_fields * sum(map(_int_of, values)))


def _check_method(text: str | bytes, name: str, args: Sequence[Any]) -> None:
    _check_growth(name, text)
    match name, args:
        case "split" | "rsplit", _:
            separators = [arg for arg in args if isinstance(arg, str | bytes)]
            most = [arg for arg in args if isinstance(arg, int)]
            _check_pieces(text, separators[0] if separators else None, most[0] if most else -1)
        case "splitlines", _:
            _check_lines(text)
        case "center" | "ljust" | "rjust" | "zfill", [width, *_]:
            _check(_int_of(width))
        case "expandtabs", [size, *_]:
            _check(len(text) * _int_of(size))
        case "replace", [old, new, *_] if isinstance(old, str | bytes):
            count = text.count(old) if type(old) is type(text) else len(text)  # type: ignore[arg-type]
            _check(len(text) + count * _length(new))
        case "join", [pieces]:
            _check(sum(len(text) + _length(piece) for piece in pieces))
        case "translate", [dict() as table]:
            _check(len(text) * max(map(_length, table.values()), default=1))


def _check_filter(name: str, value: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    arguments = [*args, *kwargs.values()]
    width = max(map(_int_of, arguments), default=0)
    if name in _TEXTS_OF_ANYTHING and isinstance(value, list | tuple | dict):
        _check(_length(value))
    if name in _INTO_PIECES:
        _check_characters(value)
    _check_growth(name, value)
    match name:
        case "center" | "slice":
            _check(width)
        case "batch":
            _check(width * 8)
        case "indent":
            steps = max(width, *map(_length, arguments), 4) if arguments else 4
            _check_lines(str(value))
            _check(_length(value) + (str(value).count("\n") + 1) * steps)
        case "replace" if len(arguments) >= 2:
            _check_method(str(value), "replace", [str(arguments[0]), str(arguments[1])])
        case "format":
            _check_format(str(value), arguments)
        case "wordwrap":
            longest = max((len(item) for item in arguments if isinstance(item, str)), default=1)
            _check(len(str(value)) * longest)
        case "round":
            _check(width // _MOST_DECIMALS * MOST_BYTES)
        case "tojson":
            longest = max([width, *map(_length, arguments)], default=0)
            _check(longest // _LONGEST_SEPARATOR * MOST_BYTES)
        case "sum" if any(isinstance(arg, _MEASURED) for arg in args[1:] or [kwargs.get("start")]):
            raise TemplateSizeError


def _bounded(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the filter with checks of the sizes of its arguments and its result."""
    has_context = hasattr(original, "jinja_pass_arg")

    @wraps(original)
    def bounded(*args: Any, **kwargs: Any) -> Any:
        context, (value, *arguments) = args[:has_context], args[has_context:]
        if name == "join":
            _check_characters(value)
            attribute = arguments[1] if len(arguments) > 1 else kwargs.get("attribute")
            value = [*value]
            if attribute is not None:
                value = [*map(make_attrgetter(context[0].environment, attribute), value)]
            separator = str(arguments[0] if arguments else kwargs.get("d", ""))
            _check_method(separator, "join", [value])
            return _kept(separator.join(map(str, value)))
        _check_filter(name, value, arguments, kwargs)
        return _kept(original(*context, value, *arguments, **kwargs))

    return bounded


class _Filters(dict[str, Callable[..., Any]]):
    def __setitem__(self, name: str, original: Callable[..., Any]) -> None:
        super().__setitem__(name, _bounded(name, original))


class _Generator(CodeGenerator):
    """Compiles templates so that the operator `~` and slices check sizes."""

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        self.write("environment.joined((")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write("))")

    def visit_Getitem(self, node: nodes.Getitem, frame: Frame) -> None:
        is_copy = isinstance(node.arg, nodes.Slice)
        self.write("environment.kept(" * is_copy)
        super().visit_Getitem(node, frame)
        self.write(")" * is_copy)


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """The sandbox of transformers' chat templates, with limits on the sizes of values."""

    code_generator_class = _Generator
    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, finalize=_printed, **kwargs)
        filters = _Filters()
        for name, original in self.filters.items():
            filters[name] = original
        self.filters = filters

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        """Parse a template. Adds the checked filter `list` to each argument after a `*`."""
        template = super()._parse(source, name, filename)
        calls: Iterable[Any] = template.find_all((nodes.Call, nodes.Filter, nodes.Test))
        for call in calls:
            if call.dyn_args is not None:
                call.dyn_args = nodes.Filter(call.dyn_args, "list", [], [], None, None)
        return template

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "+" and type(left) is type(right) is str:  # the most frequent operation
            _check(len(left) + len(right))
            return _kept(left + right)
        if operator == "+" and {type(left), type(right)} == {str, dict}:
            left, right = map(_json_of, (left, right))
        sizes = [len(operand) for operand in (left, right) if isinstance(operand, _MEASURED)]
        numbers = [operand for operand in (left, right) if isinstance(operand, int)]
        match operator:
            case "+":
                _check(sum(sizes))
            case "*" if sizes and numbers:
                _check(sys.getsizeof(left if numbers[0] is right else right) * max(0, *numbers, 0))
            case "*":
                _check(sum(number.bit_length() for number in numbers), _MOST_BITS)
            case "**" if isinstance(left, int) and isinstance(right, int):
                _check(left.bit_length() * abs(right), _MOST_BITS)
            case "%" if isinstance(left, str | bytes):
                _check_format(left, right if isinstance(right, tuple) else [right])
        return _kept(super().call_binop(context, operator, left, right))

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        method = getattr(__obj, "__wrapped__", __obj)  # `format` is wrapped by the sandbox
        text, name = getattr(method, "__self__", None), getattr(method, "__name__", "")
        if isinstance(text, str | bytes):
            if name == "join" and len(args) == 1:
                _check_characters(args[0])
                args = ([*args[0]],)
            if name in ("format", "format_map"):
                _check_format(text, [*args, *kwargs.values()])
            else:
                _check_method(text, name, [*args, *kwargs.values()])
        elif name == "to_bytes":
            _check(max(map(_int_of, [*args, *kwargs.values()]), default=1))
        return _kept(super().call(__context, __obj, *args, **kwargs))

    @staticmethod
    def concat(pieces: Iterable[str]) -> str:
        """Returns the joined text of a template or block. Raises TemplateSizeError if too large."""
        size, kept = 0, []
        for piece in pieces:
            size += len(piece)
            _check(size)
            kept.append(piece)
        joined: str = _kept("".join(kept))
        return joined

    @staticmethod
    def joined(parts: Sequence[Any]) -> str:
        """Returns the result of the operator `~`. Raises TemplateSizeError if it is too large."""
        _check(sum(map(_length, parts)))
        joined: str = _kept("".join(map(str, parts)))
        return joined

    kept = staticmethod(_kept)


def _printed(value: Any) -> Any:
    """Check the size of a value before it becomes output, and return the value."""
    if isinstance(value, list | tuple | dict):
        _length(value)
    return value

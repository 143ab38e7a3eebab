"""An acceptor of GBNF, which advances stacks as llama.cpp does."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

_PARTS = re.compile(
    r'\s*(?:"((?:\\.|[^"\\])*)"|\[(\^?)((?:\\.|[^\]\\])*)\]|<\[(\d+)\]>|([A-Za-z0-9-]+)'
    r"|([*+?]|\{\d+(?:,\d*)?\})|([()|]))"
)
_CHARACTER = re.compile(r"\\U(.{8})|\\u(.{4})|\\x(..)|\\(.)|(.)", re.DOTALL)
_CONTROLS = {"n": "\n", "r": "\r", "t": "\t"}
_MOST_REPEATED = 2000

Element = tuple[str, Any]
"""A token id, a rule's name, or (whether it excludes, ranges of characters)."""
Stack = Any  # None, or the first element and the stack behind it


def _characters(text: str) -> list[str]:
    return [
        chr(int(match[1] or match[2] or match[3], 16))
        if match[1] or match[2] or match[3]
        else _CONTROLS.get(match[4], match[4]) or match[5]
        for match in _CHARACTER.finditer(text)
    ]


class Acceptor:
    """The rules of a GBNF text. Raises AssertionError for a text that llama.cpp would refuse."""

    def __init__(self, gbnf: str) -> None:
        self._rules: dict[str, list[list[Element]]] = {}
        for line in filter(None, gbnf.splitlines()):
            name, _, body = line.partition(" ::=")
            assert body.strip(" |"), f"{line}: the next rule would be read as its body"
            assert not body.rstrip().endswith("|"), line
            assert name not in self._rules, line
            self._rules[name], rest = self._alternatives(body)
            assert not rest, line
        used = {
            each[1]
            for rule in self._rules.values()
            for seq in rule
            for each in seq
            if each[0] == "rule"
        }
        assert used <= self._rules.keys(), used - self._rules.keys()

    def _new(self, body: list[list[Element]]) -> Element:
        name = f"_{len(self._rules)}"
        self._rules[name] = body
        return "rule", name

    def _alternatives(self, text: str) -> tuple[list[list[Element]], str]:
        """Returns the alternatives up to a closing parenthesis, and the text behind it."""
        found: list[list[Element]] = [[]]
        last: list[Element] = []
        while text.strip():
            match = _PARTS.match(text)
            assert match is not None, text
            text = text[match.end() :]
            literal, negated, members, token_id, name, times, mark = match.groups()
            if mark == "(":
                inner, text = self._alternatives(text)
                last = [self._new(inner)]
            elif mark == ")":
                return found, text
            elif mark == "|":
                found.append([])
                continue
            elif times:
                least, _, most = {"*": "0,", "+": "1,", "?": "0,1"}.get(
                    times, times[1:-1]
                ).partition(",")
                found[-1] = found[-1][: len(found[-1]) - len(last)]
                most = most if "," in times or times in "*+?" else least
                found[-1] += self._repeated(last, int(least), int(most) if most else None)
                last = []
                continue
            elif literal is not None:
                last = [("set", (False, ((each, each),))) for each in _characters(literal)]
            elif members is not None:
                last = [("set", (bool(negated), (*self._ranges(members),)))]
            else:
                last = [("token", int(token_id)) if token_id else ("rule", name)]
            found[-1] = found[-1] + last
        return found, ""

    def _repeated(self, what: list[Element], least: int, most: int | None) -> list[Element]:
        assert what, "nothing is repeated"
        assert max(least, most or 0) <= _MOST_REPEATED
        if most is None:
            loop = self._new([])
            self._rules[loop[1]] = [[*what, loop], []]
            return [*what * least, loop]
        rest: list[Element] = []
        for _ in range(most - least):
            rest = [self._new([[*what, *rest], []])]
        return [*what * least, *rest]

    def _ranges(self, members: str) -> list[tuple[str, str]]:
        parts = [match[0] for match in _CHARACTER.finditer(members)]
        ranges = []
        while parts:
            first = last = parts.pop(0)
            if len(parts) > 1 and parts[0] == "-":
                last = parts[1]
                del parts[:2]
            ranges.append((_characters(first)[0], _characters(last)[0]))
        return ranges

    def _advanced(self, stack: Stack) -> set[Stack]:
        """Returns stacks that begin with a character or a token."""
        found, left, seen = set[Stack](), [stack], set[Stack]()
        while left:
            stack = left.pop()
            if stack in seen:
                continue
            seen.add(stack)
            assert len(seen) < 10_000, "left recursion"
            if stack is None or stack[0][0] != "rule":
                found.add(stack)
                continue
            (_, name), rest = stack
            for sequence in self._rules[name]:
                longer = rest
                for element in reversed(sequence):
                    longer = (element, longer)
                left.append(longer)
        return found

    def read(self, text: Iterable[str | int]) -> tuple[int, bool]:
        """Returns how many characters and token ids may follow each other, and whether the text may
        end there."""
        stacks, number = self._advanced((("rule", "root"), None)), 0
        for each in text:
            after = set[Stack]()
            for stack in stacks:
                if stack is not None and self._matches(stack[0], each):
                    after |= self._advanced(stack[1])
            if not after:
                break
            stacks, number = after, number + 1
        return number, None in stacks

    def _matches(self, element: Element, each: str | int) -> bool:
        kind, value = element
        if isinstance(each, int):
            return kind == "token" and value == each
        if kind != "set":
            return False
        negated, ranges = value
        return any(first <= each <= last for first, last in ranges) is not negated

"""Cuts a text at a stop string, and holds back the text's end if a stop string may begin there."""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter


class StopStrings:
    """Searches the output of a request, which comes in parts, for the request's stop strings."""

    def __init__(self, strings: Sequence[str]) -> None:
        self._strings = [_StopString(string) for string in strings]
        self._held = ""
        self.found: str | None = None
        """The stop string that ended the text; None if none was found."""

    def __bool__(self) -> bool:
        return bool(self._strings)

    def begin_after(self, text: str) -> None:
        """Set the text before the first part. A stop string may begin in this text, but not end."""
        for each in self._strings:
            each.find(text[max(0, len(text) - len(each.string) + 1) :], may_end=False)

    def release(self, text: str, *, may_end: bool) -> str:
        """Add the next part. Returns text that can no longer be part of a stop string, including
        text that was held back. If `may_end` is False, ignores stop strings that end in this part.
        """
        if not self._strings:
            return text
        if self.found is not None:
            return ""
        num_held = len(self._held)
        self._held += text
        begins = [(each.find(text, may_end), each.string) for each in self._strings]
        if ends := [(begin, string) for begin, string in begins if begin is not None]:
            begin, self.found = min(ends, key=itemgetter(0))
            self._held, text = "", self._held[: max(0, num_held + begin)]
            return text
        hold = max(string.num_matched for string in self._strings)
        cut = max(0, len(self._held) - hold)
        released, self._held = self._held[:cut], self._held[cut:]
        return released

    def flush(self) -> str:
        """End the text, and return the part that was held back."""
        held, self._held = self._held, ""
        return held


class _StopString:
    """Searches a text that comes in parts for one stop string, by the algorithm of Knuth, Morris
    and Pratt (1977). The cost for a character does not depend on the length of the stop string."""

    def __init__(self, string: str) -> None:
        self.string = string
        self.num_matched = 0
        """The text so far ends with the first `num_matched` characters of the stop string."""
        self._borders = [0]  # by prefix: length of the longest shorter prefix that is its end too
        matched = 0
        for length in range(1, len(string)):
            while matched and string[length] != string[matched]:
                matched = self._borders[matched - 1]
            matched += string[length] == string[matched]
            self._borders.append(matched)

    def find(self, text: str, may_end: bool) -> int | None:
        """Add the next part. Returns the index at which the stop string begins, relative to this
        part (negative: in an earlier part). Returns None if the stop string does not end in this
        part, or if none `may_end` in it."""
        string, matched = self.string, self.num_matched
        begin = 0 if matched else text.find(string[0])
        if begin < 0:
            return None
        for at in range(begin, len(text)):
            while matched and text[at] != string[matched]:
                matched = self._borders[matched - 1]
            matched += text[at] == string[matched]
            if matched == len(string):
                if may_end:
                    return at + 1 - matched
                matched = self._borders[matched - 1]
        self.num_matched = matched
        return None

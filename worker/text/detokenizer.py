"""Turns tokens into text one by one, without incomplete characters and without stop strings."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from promptq.worker.text.stop_strings import StopStrings

REPLACEMENT = "\ufffd"
_CONTEXT_TOKENS = 6
_MOST_BROKEN_TOKENS = 1024

_MOST_TOKENS = 16
_MOST_BYTES = 4
"""The most bytes of a character in UTF-8."""

Decode = Callable[[Sequence[int]], str]


class IncrementalDecoder:
    """Decodes token by token. Holds back tokens that may be the first bytes of a character.

    A tokenizer decodes such bytes as U+FFFD. Tokens are decoded together with a few earlier tokens,
    because many tokenizers drop a space in front of the first token.
    """

    def __init__(self, decode: Decode, context: Sequence[int] = ()) -> None:
        self._decode = decode
        self._tokens, self._done = _whole(decode, context)
        """The last tokens, and the text that was returned for the first `_num_done` of them."""
        self._num_done = len(self._tokens)
        self._lacks_context = not self._done and bool(decode(context[-_CONTEXT_TOKENS:]))
        """Whether the context has text, but no whole character at its end."""

    def push(self, token_id: int) -> str:
        """Add a token. Returns new text that cannot change, or '' if a character is incomplete."""
        if self._lacks_context:
            self._lacks_context = False
            alone = self._decode([token_id])
            if not alone.endswith(REPLACEMENT):  # the token is its own context
                self._tokens, self._done, self._num_done = [token_id], alone, 1
        self._tokens.append(token_id)
        if len(self._tokens) - self._num_done > _MOST_TOKENS and not self._may_be_complete():
            return ""
        whole = self._decode(self._tokens)
        text = whole[len(self._done) :]
        if not text or text.endswith(REPLACEMENT):
            return ""
        self._settle(whole)
        return text

    def flush(self) -> str:
        """Returns the text that was held back. An incomplete character becomes U+FFFD."""
        if self._num_done == len(self._tokens):
            return ""
        whole = self._decode(self._tokens)
        text = whole[len(self._done) :]
        self._settle(whole)
        return text

    def _may_be_complete(self) -> bool:
        """Whether the held tokens may end with a whole character. Decodes only some held tokens."""
        # Some tokenizers decode a whole run of bytes as U+FFFD if one byte is wrong. If there is a
        # wrong byte, the first held tokens have it: whole characters before it were returned.
        first = self._tokens[self._num_done : self._num_done + _MOST_BYTES]
        text = self._decode([*first, *self._tokens[_MOST_BYTES - _MOST_TOKENS :]])
        return bool(text) and not text.endswith(REPLACEMENT)

    def _settle(self, whole: str) -> None:
        # Old tokens are dropped rarely, because the remaining tokens must then be decoded again.
        if len(self._tokens) <= _MOST_TOKENS:
            self._done = whole
        else:
            del self._tokens[: self._num_done]
            self._done = self._decode(self._tokens)
        self._num_done = len(self._tokens)


def _whole(decode: Decode, context: Sequence[int]) -> tuple[list[int], str]:
    """Returns a few tokens up to the last whole character of the context, and the tokens' text.
    After an incomplete character, decoding would begin with a wrong character."""
    end = len(context)
    while end > max(0, len(context) - _MOST_BROKEN_TOKENS):
        tokens = list(context[max(0, end - _CONTEXT_TOKENS) : end])
        text = decode(tokens)
        if not text.endswith(REPLACEMENT):
            return tokens, text
        end -= 1
    return [], ""


class TextStream:
    """A request's output text, cut at its stop strings.

    No stop string ends before output token number `min_tokens`, counted from 1; a stop string may
    begin before that token. `prefix`, such as the mark `<think>`, is put before the output's text,
    and is not searched for stop strings.
    """

    def __init__(
        self,
        decode: Decode,
        context: Sequence[int] = (),
        stop: Sequence[str] = (),
        min_tokens: int = 0,
        prefix: str = "",
    ) -> None:
        self._prefix = prefix
        self._decoder = IncrementalDecoder(decode, context)
        self._stop = StopStrings(stop)
        self._min_tokens = min_tokens
        self._num_tokens = 0

    @property
    def stopped(self) -> bool:
        """Whether a stop string was found. Text after it does not belong to the output."""
        return self.stop_string is not None

    @property
    def stop_string(self) -> str | None:
        """The stop string that was found; None if none was found yet."""
        return self._stop.found

    @property
    def may_stop(self) -> bool:
        """Whether the request has stop strings, so that each token must be checked immediately."""
        return bool(self._stop)

    def begin(self, token_ids: Sequence[int]) -> str:
        """Begin the output with the tokens of the request's output prefix. Returns the prefix's
        text up to the last whole character. A stop string may begin in this text, but not end."""
        self._num_tokens += len(token_ids)
        text = "".join(map(self._decoder.push, token_ids))
        self._stop.begin_after(text)
        return self._prefix + text if token_ids else text

    def push(self, token_id: int) -> str:
        """Add the next output token. Returns further text that later tokens cannot change: it ends
        before an incomplete character, and before the beginning of a possible stop string."""
        self._num_tokens += 1
        text = self._release(self._decoder.push(token_id))
        return self._prefix + text if self._num_tokens == 1 else text

    def flush(self) -> str:
        """End the output. Returns the text that was held back, but of text with a stop string only
        the part before the stop string."""
        return self._release(self._decoder.flush()) + self._stop.flush()

    def replay(self, token_ids: Iterable[int]) -> str:
        """Add tokens of earlier attempts one by one. Returns the joined results of `push`."""
        return "".join(map(self.push, token_ids))

    def _release(self, text: str) -> str:
        return self._stop.release(text, may_end=self._num_tokens >= self._min_tokens)

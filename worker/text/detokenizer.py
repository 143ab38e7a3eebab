"""Turns tokens into text as they come: never half a character, nor what stop strings cut off."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from promptq.worker.text.stop_strings import StopStrings

REPLACEMENT = "\ufffd"
_CONTEXT_TOKENS = 6
_MOST_TOKENS = 16
_MOST_BYTES = 4
"""Of a character."""

Decode = Callable[[Sequence[int]], str]


class IncrementalDecoder:
    """Decodes token by token, holding back what may be the first bytes of a character.

    A tokenizer shows such bytes as U+FFFD. Tokens are decoded together with a few before them,
    since many tokenizers drop a space in front of the first token.
    """

    def __init__(self, decode: Decode, context: Sequence[int] = ()) -> None:
        self._decode = decode
        self._tokens = list(context[-_CONTEXT_TOKENS:])
        self._done = decode(self._tokens)
        """The text of the first `_num_done` tokens, which was given."""
        if self._done.endswith(REPLACEMENT):
            # Half a character in front would swallow the first one behind it.
            self._tokens, self._done = [], ""
        self._num_done = len(self._tokens)

    def push(self, token_id: int) -> str:
        """The text that is certain with this token; empty while a character is incomplete."""
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
        """What was held back, a dangling half character as U+FFFD."""
        if self._num_done == len(self._tokens):
            return ""
        whole = self._decode(self._tokens)
        text = whole[len(self._done) :]
        self._settle(whole)
        return text

    def _may_be_complete(self) -> bool:
        """Whether it is worth decoding all that is held back, of which there is much.

        If a character has come to its end, the last tokens show it. The first ones are there for
        tokenizers that show a whole run of bytes as U+FFFD if one is wrong: it is among them, for
        otherwise they would have made a character.
        """
        first = self._tokens[self._num_done : self._num_done + _MOST_BYTES]
        text = self._decode([*first, *self._tokens[_MOST_BYTES - _MOST_TOKENS :]])
        return bool(text) and not text.endswith(REPLACEMENT)

    def _settle(self, whole: str) -> None:
        """All tokens are given. Old ones are left out only now and then, as it costs a decoding."""
        if len(self._tokens) <= _MOST_TOKENS:
            self._done = whole
        else:
            del self._tokens[: self._num_done]
            self._done = self._decode(self._tokens)
        self._num_done = len(self._tokens)


class TextStream:
    """A request's output text, cut at its stop strings.

    A stop string is looked for from output token `min_tokens` on.
    """

    def __init__(
        self,
        decode: Decode,
        context: Sequence[int] = (),
        stop: Sequence[str] = (),
        min_tokens: int = 0,
    ) -> None:
        self._decoder = IncrementalDecoder(decode, context)
        self._stop = StopStrings(stop)
        self._min_tokens = min_tokens
        self._num_tokens = 0

    @property
    def stopped(self) -> bool:
        """Whether a stop string was found; what follows it is not text of this request."""
        return self._stop.found

    @property
    def may_stop(self) -> bool:
        """Whether there are stop strings, so that each token is to be looked at as it comes."""
        return bool(self._stop)

    def push(self, token_id: int) -> str:
        """Take the next output token and give the text that is certain."""
        self._num_tokens += 1
        return self._release(self._decoder.push(token_id))

    def flush(self) -> str:
        """The end: give all that was held back, unless a stop string is in it."""
        return self._release(self._decoder.flush()) + self._stop.flush()

    def replay(self, token_ids: Iterable[int], emitted: str) -> str:
        """Rebuild the state of an earlier attempt that emitted these tokens and this text.

        Gives what is certain beyond that text, which is nothing unless the attempt was cut short.
        """
        text = "".join(self.push(token_id) for token_id in token_ids)
        return text[len(emitted) :]

    def _release(self, text: str) -> str:
        return self._stop.release(text, look=self._num_tokens >= self._min_tokens)

"""The stand-in's batch: sequences in slots, one token at a time, and its kinds of failures."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Collection, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from llguidance import LLMatcher

LETTERS = b"abcdefghijklmnopqrstuvwxyz "
VOCAB_SIZE = 257
_MASK = 2**64 - 1


def _mixed(number: int) -> int:
    number = ((number ^ (number >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    number = ((number ^ (number >> 27)) * 0x94D049BB133111EB) & _MASK
    return number ^ (number >> 31)


def next_token(
    tokens: Sequence[int],
    draw: tuple[int, int] | None = None,
    banned: Collection[int] = (),
    allowed: Collection[int] | None = None,
) -> int:
    """Returns the token after `tokens`: a letter that depends on the number of tokens and on the
    last one. If no letter is allowed, returns another allowed token.

    For a request that is not greedy, `draw` has the seed and the number of tokens that this call
    has generated. So another attempt draws other random numbers, as with the real servers.
    """
    state = _mixed(len(tokens) * 0x9E3779B97F4A7C15 + tokens[-1] + (tokens[0] << 16) & _MASK)
    if draw is not None:
        state = _mixed(state ^ _mixed(draw[0] + (draw[1] << 32) + 1))
    for among in (LETTERS, range(VOCAB_SIZE)):
        for step in range(len(among)):
            token = among[(state + step) % len(among)]
            if token not in banned and (allowed is None or token in allowed):
                return token
    raise ValueError("no token may come")


def continuation(prompt: Sequence[int], num_tokens: int) -> list[int]:
    """Returns the `num_tokens` tokens that answer a greedy request."""
    tokens = [*prompt]
    for _ in range(num_tokens):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


POISON = ord("!")
"""A prompt with this token breaks its stream after two tokens, each time."""
_OF_STREAMS = ("break", "abort", "end", "malformed", "foreign")
FAULTS = (
    *(*_OF_STREAMS, "freeze", "overload", "refuse", "refuse_grammars", "unmask"),
    *("forbid_masks", "unreport", "break_reports", "spoil", "forbid_adapters", "too_long"),
)
"""`break`: streams end with an error object; `abort`: with the reason `abort`; `end`: without any;
`malformed`: with JSON of another form; `foreign`: with a token that the model does not have;
`freeze`: no more tokens are generated; `overload`: new requests are refused with 503; `refuse`:
with 404; `refuse_grammars`: those with a grammar are refused with 400; `unmask`: masks are ignored;
`forbid_masks`: those with a mask are refused with 403, as by a proxy (in vLLM's dialect only);
`unreport`: log-probabilities of prompts are left out; `break_reports`: calls for them end with 500;
`spoil`: one of them is NaN; `forbid_adapters`: no more adapters
are loaded (404); `too_long`: documents are refused with 400. The first five are over when each
running stream has failed once."""


class BrokenError(Exception):
    """Makes a running stream fail in the way of `fault`."""

    def __init__(self, fault: str) -> None:
        self.fault = fault


class Batch:
    """Runs sequences. `told` counts the requests and how they ended."""

    def __init__(
        self,
        max_num_seqs: int,
        max_model_len: int,
        token_seconds: float,
        kv_tokens: int | None = None,
        most_at_once: float = math.inf,
    ) -> None:
        self.max_num_seqs = max_num_seqs
        self.max_model_len = max_model_len
        self.kv_tokens = kv_tokens or max_num_seqs * max_model_len
        self._most_at_once = most_at_once
        self._tokens: dict[int, list[int]] = {}  # of running requests, by their numbers
        self.fault = ""
        self._token_seconds = token_seconds
        self._slots = asyncio.Semaphore(max_num_seqs)
        self._running = self._waiting = 0
        self._counts = {
            "started": 0,
            "ended": 0,
            "broken_off": 0,
            "most_running": 0,
            "refused": 0,
            "waited": 0,
        }
        self._last_broken = math.inf

    def fail(self, fault: str) -> None:
        """Begin a fault (see `FAULTS`). A fault of streams hits the running streams; if none runs,
        the next ones."""
        self.fault = fault
        self._last_broken = self._counts["started"] if self._running else math.inf

    def told(self) -> dict[str, Any]:
        return {"running": self._running, "waiting": self._waiting, **self._counts}

    @property
    def kv_usage(self) -> float:
        return sum(map(len, self._tokens.values())) / self.kv_tokens

    def refuses_more(self) -> bool:
        """Whether the batch is too full for another request. Counts each refused request."""
        is_full = self._running + self._waiting >= self._most_at_once
        self._counts["refused"] += is_full
        return is_full

    async def generate(
        self,
        prompt: Sequence[int],
        num_tokens: int,
        *,
        ends: Collection[int] = (),
        min_tokens: int = 0,
        seed: int | None = None,
        bias: dict[int, float] | None = None,
        allowed: Collection[int] | None = None,
        grammar: LLMatcher | None = None,
    ) -> AsyncIterator[tuple[int, str | None]]:
        """Yields each token, with a finish reason on the last one. Raises BrokenError."""
        self._waiting += 1
        self._counts["waited"] += self._slots.locked()
        try:
            await self._slots.acquire()
        finally:
            self._waiting -= 1
        self._running += 1
        self._counts["started"] += 1
        number_of_stream = self._counts["started"]
        self._counts["most_running"] = max(self._running, self._counts["most_running"])
        tokens, is_over = [*prompt], False
        self._tokens[number_of_stream] = tokens
        banned = {token for token, by in (bias or {}).items() if by is False or by <= -50}
        try:
            num_tokens = min(num_tokens, self.max_model_len - len(prompt))
            for number in range(1, num_tokens + 1):
                await asyncio.sleep(self._token_seconds)
                while self.fault == "freeze":
                    await asyncio.sleep(0.01)
                if POISON in prompt and number > 2:
                    raise BrokenError("break")
                if self.fault in _OF_STREAMS and number_of_stream <= self._last_broken:
                    raise BrokenError(self.fault)
                draw = None if seed is None else (seed, number)
                if grammar is not None:
                    bits = int.from_bytes(grammar.compute_bitmask(), "little")
                    allowed = {token for token in range(VOCAB_SIZE) if bits >> token & 1}
                held = banned | (set(ends) if number <= min_tokens else set())
                if self.fault == "unmask":
                    held, allowed = set(), None
                tokens.append(next_token(tokens, draw, held, allowed))
                if grammar is not None and not grammar.is_stopped():
                    grammar.consume_token(tokens[-1])
                is_over = tokens[-1] in ends or number == num_tokens
                reason = None if not is_over else "stop" if tokens[-1] in ends else "length"
                if is_over:
                    self._counts["ended"] += 1
                yield tokens[-1], reason
                if is_over:
                    return
        finally:
            if not is_over:
                self._counts["broken_off"] += 1
            self._running -= 1
            del self._tokens[number_of_stream]
            self._slots.release()
            if self.fault in _OF_STREAMS and not self._running:
                self.fault = ""

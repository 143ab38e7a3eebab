"""The model of the stand-in: the next token is a known function of all tokens before it."""

from __future__ import annotations

from collections.abc import Collection, Sequence

LETTERS = b"abcdefghijklmnopqrstuvwxyz "
_MASK = 2**64 - 1


def _mixed(number: int) -> int:
    number = ((number ^ (number >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    number = ((number ^ (number >> 27)) * 0x94D049BB133111EB) & _MASK
    return number ^ (number >> 31)


def next_token(
    tokens: Sequence[int], draw: tuple[int, int] | None = None, banned: Collection[int] = ()
) -> int:
    """The token after `tokens`: a letter, by their number and the last of them.

    `draw` is the seed and how many tokens this call has generated, for a request that is not
    greedy: as in the real servers, another attempt draws other numbers.
    """
    state = _mixed(len(tokens) * 0x9E3779B97F4A7C15 + tokens[-1] + (tokens[0] << 16) & _MASK)
    if draw is not None:
        state = _mixed(state ^ _mixed(draw[0] + (draw[1] << 32) + 1))
    for step in range(len(LETTERS)):
        token = LETTERS[(state + step) % len(LETTERS)]
        if token not in banned:
            return token
    raise ValueError("every letter is banned")


def continuation(prompt: Sequence[int], num_tokens: int) -> list[int]:
    """What a greedy request gets."""
    tokens = [*prompt]
    for _ in range(num_tokens):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]

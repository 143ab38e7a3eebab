"""Takes amounts from the rates of one holder, such as an API key."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from promptq.shared.queue.call import Call


@dataclass(frozen=True, slots=True)
class Rate:
    """An `amount` to be taken from a rate of `limit` a minute."""

    name: str
    amount: int
    limit: int


@dataclass(frozen=True, slots=True)
class RateAnswer:
    """Whether all was taken, and how each rate stands, by its name."""

    wait_ms: int | None
    """0 if all was taken. Otherwise nothing was; None if an amount is more than its limit."""
    remaining: dict[str, int]
    reset_ms: dict[str, int]
    """How long it takes until all of a rate is back."""


def take_of_rates(holder: str, rates: Sequence[Rate]) -> Call[RateAnswer]:
    """Take from all of a holder's rates or from none."""
    args: list[str | bytes | int] = [holder]
    for rate in rates:
        args += [rate.name, rate.amount, rate.limit]

    def parse(reply: list[int]) -> RateAnswer:
        wait_ms, *rest = (int(it) for it in reply)
        names = [rate.name for rate in rates]
        return RateAnswer(
            wait_ms=None if wait_ms < 0 else wait_ms,
            remaining=dict(zip(names, rest[::2], strict=True)),
            reset_ms=dict(zip(names, rest[1::2], strict=True)),
        )

    return Call("charge_rates", args, parse)

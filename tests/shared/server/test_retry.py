"""How long calls that the server does not accept are repeated, by a clock that the test moves."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import ResponseError
from structlog.testing import capture_logs

from promptq.shared.server.retry import keep_trying, note_failure


class Clock:
    """Time passes only in what moves it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr("time.monotonic", lambda: self.now)
        monkeypatch.setattr(asyncio, "sleep", self._sleep)

    async def _sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def away(clock: Clock, until: float, takes: Callable[[], float]) -> Callable[[], Awaitable[str]]:
    """A call to a server that answers from that time on."""

    async def call() -> str:
        is_away = clock.now < until
        clock.now += takes()
        if is_away:
            raise RedisConnectionError("away")
        return "answer"

    return call


async def test_gives_up_after_the_time_that_it_tried(clock: Clock) -> None:
    with pytest.raises(RedisConnectionError):
        await keep_trying(away(clock, 1000.0, lambda: 5.0), 60.0)
    assert 60.0 <= clock.now < 70.0


async def test_a_server_that_is_back_in_time(clock: Clock) -> None:
    assert await keep_trying(away(clock, 59.0, lambda: 0.1), 60.0) == "answer"


async def test_a_standstill_of_the_process_is_not_held_against_the_server(clock: Clock) -> None:
    """The process stands still in its first try; the server is back 10 s after that."""
    durations = iter([300.0])
    call = away(clock, 310.0, lambda: next(durations, 0.1))
    assert await keep_trying(call, 60.0) == "answer"


async def test_the_parts_of_a_process_say_once_a_minute_why_the_server_refuses_them(
    clock: Clock, fresh_log: None
) -> None:
    """However the call was sent, and anew in the next outage."""
    parts = (
        "%s",
        "%s script: 1a2b, on @user_script:7.",
        "Command # 1 (DEL a) of pipeline caused error: %s",
    )
    with capture_logs() as logs:
        for reason in ("MISCONF no disk", "NOREPLICAS"):
            for part in parts * 3:
                note_failure(ResponseError(part % reason))
        clock.now += 61
        note_failure(ResponseError("NOREPLICAS"))
        note_failure(ResponseError("NOREPLICAS"))
        await keep_trying(away(clock, clock.now + 1, lambda: 0.1), 60)
        note_failure(ResponseError("NOREPLICAS"))
    said = [line["error"] for line in logs if "error" in line]
    assert said == ["MISCONF no disk", "NOREPLICAS", "NOREPLICAS", "away", "NOREPLICAS"]

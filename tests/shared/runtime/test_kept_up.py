"""Background tasks do not die silently."""

from __future__ import annotations

import pytest

from promptq.shared.runtime import tasks


async def test_a_background_task_that_fails_is_logged_and_begins_anew(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tasks, "_ANEW_SECONDS", 0.0)
    times: list[int] = []

    async def work() -> None:
        times.append(len(times))
        if len(times) < 3:
            raise ValueError("a stranger's")

    await tasks.kept_up("upkeep", work)
    assert times == [0, 1, 2]
    assert caplog.messages == ["the background task 'upkeep' failed and is restarted"] * 2
    assert all(record.exc_info is not None for record in caplog.records)

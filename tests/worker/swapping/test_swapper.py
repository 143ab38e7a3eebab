"""The owner sends commands to the processes of models in the right order. They are real, but load
nothing."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from promptq.shared.queue.request_queue import AsyncRequestQueue
from promptq.shared.settings.worker import WorkerSettings
from promptq.worker.swapping.model_choice import SwapTimes
from promptq.worker.swapping.model_process import ModelProcess, forking
from promptq.worker.swapping.standby import Order, Report
from promptq.worker.swapping.swapper import ModelFailedError, Swapper
from tests.support.requests import async_put
from tests.support.waiting import async_until


def pretend(notes: Path, settings: WorkerSettings, _redis_url: str, owner: Connection) -> None:
    """The model `large` has room alone only, and `broken` does not load."""

    def note(what: str) -> None:
        with notes.open("a") as file:
            file.write(f"{settings.queue} {what}\n")

    def tell(what: Report, text: str = "") -> None:
        note(what)
        owner.send((what, text, None))

    tell(Report.REGISTERED)
    while True:
        try:
            told, _ = owner.recv()
        except EOFError:
            return
        note(told)
        if told in (Order.DRAIN, Order.STOP):
            time.sleep(0.05)
            note("ends")
            return
        if settings.model == "broken":
            tell(Report.FAILED, "it is broken")
            sys.exit(1)
        time.sleep(0.2)  # loading takes longer than what else may happen at once
        is_large = settings.model == "large" and told is Order.LOAD
        tell(Report.NO_ROOM if is_large else Report.SERVING)


TIMES = SwapTimes(least_loaded=0, longest_wait=60, idle=3600)


@asynccontextmanager
async def swapping(
    queue: AsyncRequestQueue, notes: Path, model_of_b: str, *, overlaps: bool = True
) -> AsyncIterator[Callable[[], list[str]]]:
    """Swaps a model of the queue `a` with one of `b`. Gives what was noted since `a` served."""
    context = forking(__name__)
    settings = {
        "a": WorkerSettings(queue="a", model="small"),
        "b": WorkerSettings(queue="b", model=model_of_b),
    }
    swapper = Swapper(
        {"a": "small", "b": model_of_b},
        lambda name, known: ModelProcess(
            context, partial(pretend, notes), settings[name], "", known
        ),
        queue,
        TIMES,
        overlaps=overlaps,
    )
    stop = asyncio.Event()

    def noted() -> list[str]:
        return notes.read_text().splitlines()

    try:
        await swapper.start(stop)
        began = len(noted())
        running = asyncio.create_task(swapper.run(stop))
        yield lambda: noted()[began:]
        stop.set()
        await running
    finally:
        swapper.kill()


@pytest.mark.parametrize(
    ("model", "overlaps", "told"),
    [
        ("small", True, ["b load", "b serving", "a drain", "a ends", "a registered"]),
        (
            "large",
            True,
            [*("b load", "b no room", "a drain", "a ends"), "b load alone", "b serving"],
        ),
        ("small", False, ["a drain", "a ends", "b load alone", "b serving"]),
    ],
)
async def test_a_change_has_two_models_in_memory_only_if_there_is_room(
    queue: AsyncRequestQueue, tmp_path: Path, model: str, overlaps: bool, told: list[str]
) -> None:
    async with swapping(queue, tmp_path / "notes", model, overlaps=overlaps) as notes:
        await async_put(AsyncRequestQueue(queue.redis, "b"))

        def noted() -> list[str]:  # the process that took the place of the ended one is no matter
            return [it for it in notes() if told[-1] == "a registered" or it != "a registered"]

        await async_until(lambda: len(noted()) >= len(told))
        assert noted() == told


def test_what_this_process_starts_later_may_import_from_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the processes of models may not."""
    monkeypatch.delenv("PYTHONSAFEPATH", raising=False)
    before = dict(os.environ)
    context = forking(__name__)
    target = partial(pretend, tmp_path / "notes")
    process = ModelProcess(context, target, WorkerSettings(queue="a", model="small"), "")
    process.kill()
    assert dict(os.environ) == before


async def test_a_model_that_does_not_load_leaves_the_other_one_alone(
    queue: AsyncRequestQueue, tmp_path: Path
) -> None:
    """The owner tries the model again, since memory may have become free."""
    async with swapping(queue, tmp_path / "notes", "broken") as notes:
        await async_put(AsyncRequestQueue(queue.redis, "b"))
        await async_until(lambda: notes().count("b load") == 2)
        assert not [it for it in notes() if it.startswith("a ")]


async def test_if_the_first_model_does_not_load_that_is_reported(
    queue: AsyncRequestQueue, tmp_path: Path
) -> None:
    context = forking(__name__)
    settings = WorkerSettings(queue="b", model="broken")
    swapper = Swapper(
        {"b": "broken"},
        lambda _, known: ModelProcess(
            context, partial(pretend, tmp_path / "notes"), settings, "", known
        ),
        queue,
        TIMES,
    )
    try:
        with pytest.raises(ModelFailedError, match=r"^broken \(queue b\): it is broken$"):
            await swapper.start(asyncio.Event())
    finally:
        swapper.kill()

"""A prompt and a cancel pass through the files that docs/architecture.md lists, in that order."""

from __future__ import annotations

import asyncio
import math
import re
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import promptq
from promptq.producer.clients.sync_client import Client
from promptq.shared.protocol.keys import Keys
from promptq.shared.queue.call import Call
from promptq.worker.engine.api.messages import StepOutput
from promptq.worker.leases import prefetcher
from tests.support.model_free import running_worker, served_model_free
from tests.support.paths import ROOT
from tests.support.roles import as_role
from tests.support.waiting import async_until

Place = tuple[str, str]
"""A file and a function in it. A script has none, and where the page names none, any will do."""

PAGE = (ROOT / "docs" / "architecture.md").read_text().partition("\n## The path of a request\n")[2]
PROMPT, CANCEL = (
    re.findall(r"`(\w+(?:/\w+)+\.(?:py|lua))`(?: `(\w+)`)?", part)
    for part in PAGE.partition("\n## ")[0].split("\nA cancel ")
)
MODEL = {"worker/engine/runner/model_runner.py", "worker/engine/sampling/sampler.py"}
"""Files that an engine without a model does not enter."""


@pytest.fixture
def visits(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Place]]:
    """Each entry into a function of the product, and each script that is sent."""
    seen: list[Place] = []
    home = f"{Path(promptq.__file__).parent}/"

    def note_entry(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(home):
            seen.append((code.co_filename.removeprefix(home), code.co_name))

    find_key = Call.key

    def key_noted(call: Call[Any], sender: Keys) -> str:  # once for each time that it is sent
        seen.append((f"shared/lua/scripts/{call.script}.lua", ""))
        return find_key(call, sender)

    monkeypatch.setattr(Call, "key", key_noted)
    threading.setprofile(note_entry)  # for threads that start from now on
    sys.setprofile(note_entry)
    yield seen
    sys.setprofile(None)
    threading.setprofile(None)  # type: ignore[arg-type]


def passed(way: Sequence[Place], visits: Sequence[Place]) -> list[Place]:
    """The beginning of a way that visits follow, each place after the one before."""
    following = iter(visits)
    reached = []
    for file, function in way:
        if not any(file == seen and function in ("", name) for seen, name in following):
            break
        reached.append((file, function))
    return reached


def test_the_ways_are_short_and_their_places_are_there() -> None:
    assert len({file for file, _ in PROMPT}) == 24
    assert len({file for file, _ in CANCEL}) == 12
    for file, function in [*PROMPT, *CANCEL]:
        assert not function or f"def {function}(" in (ROOT / file).read_text(), (file, function)


async def test_a_prompt_and_a_cancel_go_their_ways(
    redis_url: str, visits: list[Place], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No timer claims, renews or steps in between, so that each order has one cause."""
    monkeypatch.setattr(prefetcher, "POLL_SECONDS", math.inf)
    served = served_model_free()
    engine: Any = served.engine
    step, steps = engine.step, threading.Semaphore(2)  # the whole of the first, one of the second

    def step_if_allowed() -> StepOutput:
        steps.acquire()
        output: StepOutput = step()
        return output

    monkeypatch.setattr(engine, "step", step_if_allowed)
    with Client(as_role("producer", redis_url)) as client:
        async with running_worker(redis_url, served, lease_ms=10**9):
            try:
                await async_until(lambda: ("worker/leases/ready.py", "wait") in visits)
                visits.clear()
                await asyncio.to_thread(client.generate, "a", max_tokens=1)
                way = [place for place in PROMPT if place[0] not in MODEL]
                assert passed(way, visits) == way

                request_id = await asyncio.to_thread(client.enqueue, "a", max_tokens=4000)
                await asyncio.to_thread(next, client.stream(request_id))
                visits.clear()
                await asyncio.to_thread(client.cancel, request_id)
                await asyncio.to_thread(client.result, request_id)
            finally:
                steps.release(10**6)
            await async_until(lambda: not engine.stats.num_used_blocks)
            assert passed(CANCEL, visits) == CANCEL

"""A queue on the embedded server, its address for workers, and how tests use the machine."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
import structlog
import torch

from promptq.shared.runtime.logs import configure_logs
from promptq.worker.engine.core import drafting
from tests.support.roles import as_role


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Tiny models gain nothing from a second thread, and where other work keeps a core busy,
    threads that wait for each other make them ten times slower."""
    torch.set_num_threads(1)


@pytest.fixture
def worker_url(redis_url: str) -> str:
    return as_role("worker", redis_url)


@pytest.fixture
def logs_in_json() -> Iterator[None]:
    """Log as a worker does, for one test: others in this process read logs of another form."""
    root = logging.getLogger()
    handlers, level, before = root.handlers[:], root.level, structlog.get_config()
    configure_logs("info", "json")
    yield
    structlog.configure(**before)
    root.handlers[:] = handlers
    root.setLevel(level)


@pytest.fixture
def guessed_lookups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lookups cost what the first guess says, however long a step takes beside other tests."""
    monkeypatch.setattr(drafting.DraftTimes, "note_lookups", lambda times, seconds, cost: None)


@pytest.fixture
def costless(monkeypatch: pytest.MonkeyPatch, guessed_lookups: None) -> None:
    """From the first step on, drafts pay for any number of sequences, right or wrong."""
    monkeypatch.setattr(drafting.DraftTimes, "cost", lambda times, length: 1.0)
    monkeypatch.setattr(drafting.RecentMedian, "is_known", True)
    monkeypatch.setattr(drafting.RecentMedian, "value", 1.0)
    monkeypatch.setattr(drafting, "_DRAFT_COST", 0.0)
    monkeypatch.setattr(drafting, "_ROW_COST", 1e-6)

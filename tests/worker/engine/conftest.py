"""How tests of the engine use the machine, and the seed of those that are random."""

from __future__ import annotations

import secrets

import pytest
import torch


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Tiny models gain nothing from a second thread, and where other work keeps a core busy,
    threads that wait for each other make them ten times slower."""
    torch.set_num_threads(1)


@pytest.fixture
def seed() -> int:
    """Another one each time; that of a failure is printed."""
    chosen = secrets.randbelow(1 << 31)
    print(f"seed {chosen}")
    return chosen

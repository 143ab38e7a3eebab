"""How tests of the engine use the machine."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Tiny models gain nothing from a second thread, and where other work keeps a core busy,
    threads that wait for each other make them ten times slower."""
    torch.set_num_threads(1)

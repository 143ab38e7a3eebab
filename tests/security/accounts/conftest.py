"""Gateways that share a folder for files, and keys of their callers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import pytest

from tests.producer.gateway.living import LiveGateway, live_gateway
from tests.producer.gateway.living import make_key as make_api_key


@pytest.fixture
def start(redis_url: str, tmp_path: Path) -> Iterator[Callable[..., LiveGateway]]:
    """Starts gateways that share a folder for files."""
    with ExitStack() as stack:
        yield lambda **settings: stack.enter_context(
            live_gateway(redis_url, files_dir=tmp_path / "files", **settings)
        )


@pytest.fixture
def make_key(redis_url: str) -> Callable[..., str]:
    """Makes keys, and gives their secrets."""
    return partial(make_api_key, redis_url)

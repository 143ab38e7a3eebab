"""OpenAI's client of a gateway that keeps files."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import openai
import pytest

from tests.producer.gateway.living import live_gateway


@pytest.fixture
async def client(redis_url: str, tmp_path: Path) -> AsyncIterator[openai.AsyncOpenAI]:
    with live_gateway(redis_url, files_dir=tmp_path / "files") as gateway:
        base_url = gateway.base_url
        async with openai.AsyncOpenAI(base_url=base_url, api_key="x", max_retries=0) as client:
            yield client

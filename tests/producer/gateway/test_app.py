"""The application as a whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx2
import pydantic
import pytest

from tests.producer.gateway.living import LiveGateway


def test_no_call_waits_until_routes_are_made(
    start_gateway: Callable[..., LiveGateway], monkeypatch: pytest.MonkeyPatch
) -> None:
    gateway, made = start_gateway(), []
    plain = pydantic.TypeAdapter.__init__

    def noting(self: Any, *args: Any, **options: Any) -> None:
        made.append(args)
        plain(self, *args, **options)

    monkeypatch.setattr(pydantic.TypeAdapter, "__init__", noting)
    paths = ("/v1/models", "/v1/batches", "/readyz")
    answers = [httpx2.get(f"{gateway.url}{path}").status_code for path in paths]
    assert (answers, made) == ([200, 200, 503], [])

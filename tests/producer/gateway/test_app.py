"""The application as a whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx2
import pydantic
import pytest
import structlog

from tests.producer.gateway.living import LiveGateway
from tests.support.waiting import until


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
    answers = [httpx2.get(f"{gateway.url}{path}", timeout=None).status_code for path in paths]
    assert (answers, made) == ([200, 200, 503], [])


def test_files_of_the_dashboard_are_no_calls(start_gateway: Callable[..., LiveGateway]) -> None:
    gateway = start_gateway()
    paths = ("/", "/favicon.ico", "/dashboard/files/app.js", "/dashboard/files/none", "/docs")
    with structlog.testing.capture_logs() as lines:
        for path in paths:
            httpx2.get(f"{gateway.url}{path}")
        until(lambda: len([it for it in lines if it["event"] == "answered"]) == len(paths))
    levels = {it["path"]: it["log_level"] for it in lines if it["event"] == "answered"}
    assert levels == {path: "info" if path == "/docs" else "debug" for path in paths}


@pytest.mark.parametrize(("logs", "level"), [(True, "info"), (False, "debug")])
def test_a_gateway_may_keep_calls_out_of_its_log(
    start_gateway: Callable[..., LiveGateway], logs: bool, level: str
) -> None:
    gateway = start_gateway(http_log_requests=logs)
    with structlog.testing.capture_logs() as lines:
        assert httpx2.get(f"{gateway.url}/v1/models", timeout=None).status_code == 200
        until(lambda: any(it["event"] == "answered" for it in lines))
    assert [it["log_level"] for it in lines if it["event"] == "answered"] == [level]

"""Fixtures: the real servers, one after the other."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.programs.engines.real_servers import NAMES, RealServer, real_server, why_missing


@pytest.fixture(scope="module", params=NAMES)
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RealServer]:
    if why := why_missing(request.param):
        pytest.skip(why)
    with real_server(request.param, tmp_path_factory.mktemp("server")) as running:
        yield running

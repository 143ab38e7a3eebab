"""A short run of `python -m tests fuzz`: no crash, and nothing is left waiting."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import redis

from promptq.shared.protocol.keys import Keys
from tests.programs.fuzz.commands import KINDS, make_request
from tests.programs.fuzz.fuzzing import Fuzzing, report
from tests.programs.fuzz.http_fuzzing import HttpFuzzing, report_http, send
from tests.programs.fuzz.http_requests import KINDS as KINDS_OF_HTTP
from tests.programs.fuzz.http_requests import all_routes
from tests.support.roles import as_role

COUNT = 4500
HTTP_COUNT = 600


@pytest.mark.long
def test_malformed_requests_harm_nobody(redis_url: str, tmp_path: Path) -> None:
    seed = random.randrange(10**6)
    with redis.Redis.from_url(as_role("", redis_url)) as client:
        outcome = Fuzzing(client, redis_url, tmp_path / "worker.log", seed).run(COUNT)
    assert not outcome.faults, report(outcome) + (tmp_path / "worker.log").read_text()[-3000:]
    assert outcome.kinds.total() == COUNT
    assert {kind.__name__ for kind in KINDS} <= set(outcome.kinds)


def test_malformed_http_harms_nobody(redis_url: str, tmp_path: Path) -> None:
    """No status 500, no growth of memory, and another client is served throughout."""
    seed = random.randrange(10**6)
    outcome = HttpFuzzing(redis_url, tmp_path, seed).run(HTTP_COUNT)
    shown = report_http(outcome)
    assert not outcome.faults, shown + (tmp_path / "gateway.log").read_text()[-3000:]
    assert outcome.routes.total() == HTTP_COUNT
    assert len(outcome.routes) == len(all_routes()), shown
    assert set(outcome.kinds) == KINDS_OF_HTTP
    assert outcome.num_good > 0


def test_nothing_is_thrown_at_another_machine() -> None:
    with pytest.raises(ValueError, match="not on this machine"):
        send("http://192.0.2.1:80", b"")


def test_is_a_function_of_its_seed() -> None:
    made = [[make_request(Keys(), n, random.Random(n)) for n in range(200)] for _ in range(2)]
    assert made[0] == made[1]

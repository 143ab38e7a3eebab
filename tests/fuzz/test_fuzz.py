"""The short form of `make fuzz`: whatever is pushed, no crash and nothing left waiting."""

from __future__ import annotations

import random
from pathlib import Path

import redis

from promptq.shared.protocol.keys import Keys
from tests.fuzz.commands import make_request
from tests.fuzz.fuzzing import Fuzzing, report
from tests.fuzz.payloads import KINDS
from tests.roles import as_role

COUNT = 15_000


def test_malformed_requests_harm_nobody(redis_url: str, tmp_path: Path) -> None:
    seed = random.randrange(10**6)
    with redis.Redis.from_url(as_role("", redis_url)) as client:
        outcome = Fuzzing(client, redis_url, tmp_path / "worker.log", seed).run(COUNT)
    assert not outcome.faults, report(outcome) + (tmp_path / "worker.log").read_text()[-3000:]
    assert outcome.kinds.total() == COUNT
    assert {kind.__name__ for kind in KINDS} <= set(outcome.kinds)


def test_is_a_function_of_its_seed() -> None:
    made = [[make_request(Keys(), n, random.Random(n)) for n in range(200)] for _ in range(2)]
    assert made[0] == made[1]

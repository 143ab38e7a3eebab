"""Every engine respects priorities and the shares of tenants."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import redis

from promptq import Client
from promptq.shared.queue import lookups
from promptq.shared.queue.request_queue import RequestQueue
from promptq.worker.shipped import MODEL_DIR
from tests.programs.engines.real_servers import NAMES, SLOTS, real_server, why_missing
from tests.support.processes import started
from tests.support.requests import new
from tests.support.roles import as_role

WEIGHTS = {"a": 1, "b": 2, "c": 4}
PRIORITIES = (1, -1, 0)
NUM_REQUESTS = 500
NUM_TOKENS = 24
AHEAD = 2 * SLOTS
"""A worker holds as many running requests as slots, and at most as many waiting ones."""


def requests() -> list[tuple[str, int]]:
    """Returns the tenant and the priority of each request. Tenants and priorities are mixed
    evenly."""
    kinds = [(tenant, priority) for priority in PRIORITIES for tenant in WEIGHTS]
    return [kinds[number % len(kinds)] for number in range(NUM_REQUESTS)]


def claimed_in_order(redis_url: str, folder: Path, *options: str) -> list[tuple[str, int]]:
    """Returns tenant and priority of all requests, in the order in which a worker claimed them."""
    url = as_role("operator", redis_url)
    with Client(url) as client, redis.Redis.from_url(url) as plain:
        queue = RequestQueue(plain)
        for tenant, weight in WEIGHTS.items():
            plain.hset(queue.keys.config, f"weight:{tenant}", str(weight))
        fields: dict[str, Any] = {"max_tokens": NUM_TOKENS, "temperature": 0.0}
        ids = queue.enqueue(
            [new(tenant=tenant, priority=by, **fields) for tenant, by in requests()]
        )
        slots = ("--max-num-seqs", str(SLOTS), "--model", str(MODEL_DIR), "--dtype", "float32")
        with started(folder, redis_url, *slots, *options):
            for request_id in ids:
                assert len(client.result(request_id).token_ids) == NUM_TOKENS
        times = [int(queue.run(lookups.record(queue.keys, it))["claimed_at"]) for it in ids]
    # One claim may take the last of a priority and the first of the next at the same time.
    pairs = zip(times, requests(), strict=True)
    return [kind for _, kind in sorted(pairs, key=lambda it: (it[0], it[1][1]))]


@pytest.mark.parametrize("name", ["native", *NAMES])
def test_priorities_come_in_order_and_tenants_get_their_shares(
    redis_url: str, tmp_path: Path, name: str
) -> None:
    if name == "native":
        order = claimed_in_order(redis_url, tmp_path)
    elif why := why_missing(name):
        pytest.skip(why)
    else:
        with real_server(name, tmp_path) as server:
            options = ("--engine", name, "--upstream", server.url)
            order = claimed_in_order(redis_url, tmp_path, *options)
    found = [priority for _, priority in order]
    assert found == sorted(found), "a request came before a more urgent one"
    for priority in sorted(PRIORITIES):
        tenants = [tenant for tenant, by in order if by == priority]
        # Until the tenant with the most weight has no more, each gets its share.
        last = max(number for number, tenant in enumerate(tenants) if tenant == "c")
        shared = Counter(tenants[: last + 1])
        for tenant, weight in WEIGHTS.items():
            share = (last + 1) * weight / sum(WEIGHTS.values())
            assert abs(shared[tenant] - share) <= AHEAD, (priority, tenant, shared)

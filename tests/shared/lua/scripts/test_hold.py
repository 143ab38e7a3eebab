"""Leases that one holder has at a time."""

from __future__ import annotations

from typing import Any

from promptq.shared.queue import scripts
from promptq.shared.queue.request_queue import RequestQueue


def test_one_holder_at_a_time(queue: RequestQueue, client: Any) -> None:
    def hold(holder: str, ttl_ms: int) -> bool:
        return queue.run(scripts.hold(queue.keys, key, holder, ttl_ms))

    key = queue.keys.jobs_leader
    assert not hold("a", 0), "nobody's to let go of"
    assert hold("a", 60_000)
    assert not hold("b", 60_000)
    assert not hold("b", 0)
    client.pexpire(key, 50_000)
    assert hold("a", 60_000)
    assert 50_000 < client.pttl(key) <= 60_000
    assert hold("a", 0)
    assert client.get(key) is None
    assert hold("b", 60_000)
    client.delete(key)
    client.hset(key, "a", "b")
    assert not hold("b", 0)
    assert hold("b", 60_000), "what a stranger made of it is no holder"
    assert not hold("a", 60_000)
    for lasts_ms in (None, 10**11):
        client.set(key, "stranger", px=lasts_ms)
        assert hold("a", 60_000), "no holder takes a lease for so long"
        assert client.pttl(key) <= 60_000

"""A server that evicts keys is recognised by what every role may read."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import redis

from promptq.shared.queue.maxmemory_policy import MaxmemoryLog, maxmemory_warning
from promptq.shared.queue.request_queue import RequestQueue
from promptq.shared.server.acl import ROLES
from tests.support.roles import as_role
from tests.support.servers import embedded_server, redis_server


@pytest.fixture(scope="module", params=["embedded", "redis-server"])
def url(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server whose memory no other test needs."""
    if request.param == "redis-server":
        yield from redis_server(tmp_path_factory)
    else:
        with embedded_server() as url:
            yield url


@pytest.mark.parametrize("maxmemory", ["0", "1gb"])
@pytest.mark.parametrize(
    ("policy", "lost"),
    [
        *((f"allkeys-{how}", "waiting and running requests") for how in ("lru", "lfu", "random")),
        *((f"volatile-{how}", "results") for how in ("lru", "lfu", "random", "ttl")),
        ("noeviction", ""),
    ],
)
def test_each_policy(url: str, policy: str, maxmemory: str, lost: str) -> None:
    with redis.Redis.from_url(url) as server:
        server.config_set("maxmemory", maxmemory)
        server.config_set("maxmemory-policy", policy)
    with redis.Redis.from_url(as_role("producer", url)) as client:
        warning = RequestQueue(client).run(maxmemory_warning())
    if maxmemory == "0" or not lost:
        assert warning == ""
    else:
        assert f"maxmemory-policy {policy}" in warning
        assert lost in warning


def test_every_role_may_look_and_a_user_who_may_not_gets_no_warning(url: str) -> None:
    with redis.Redis.from_url(url) as server:
        server.config_set("maxmemory", "1gb")
        server.config_set("maxmemory-policy", "allkeys-lru")
        rules = ["on", "nopass", "~*", "&*", "+@all", "-info"]
        server.execute_command("ACL", "SETUSER", "blind", *rules)
    for role in ROLES.keys() - {"subscriber"}:
        with redis.Redis.from_url(as_role(role, url)) as client:
            assert RequestQueue(client).run(maxmemory_warning()), role
    parts = redis.connection.parse_url(url)
    with redis.Redis(port=parts["port"], username="blind", password="any") as client:
        assert RequestQueue(client).run([maxmemory_warning()]) == [""]


def test_the_log_repeats_it_as_long_as_it_lasts(capfd: pytest.CaptureFixture[str]) -> None:
    now = 0.0
    log = MaxmemoryLog(lambda: now)
    lines = []
    for warning in ["", *["evicts"] * 25, "", "", "evicts"]:
        log.note(warning)
        lines.append("".join(capfd.readouterr()))
        now += 5.0
    assert [at for at, line in enumerate(lines) if "warning" in line] == [1, 13, 25, 28]
    assert [at for at, line in enumerate(lines) if "no longer" in line] == [26]

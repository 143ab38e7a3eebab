"""The roles of deploy/redis.acl at work, TLS, names that reach for other keys, and secrets."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from promptq import AsyncClient, Client
from promptq.shared.errors import (
    RedisUnavailableError,
    RequestFailedError,
    RequestNotFoundError,
)
from promptq.shared.protocol.keys import QUEUES, Keys
from promptq.shared.protocol.replies import CancelStatus
from promptq.shared.protocol.request import RequestState
from tests.support.model_free import text_of
from tests.support.processes import started
from tests.support.roles import ACL_FILE, as_role
from tests.support.servers import NO_TLS, OwnServer, free_port, make_certificates, tls_settings

FAULTY = "tests.faults.worker.faulty_worker"


@dataclass
class Roles:
    server: OwnServer

    def url(self, role: str) -> str:
        return as_role(role, self.server.url)


@pytest.fixture
def kind() -> str:
    """Of the server, unless a test says another."""
    return ""


@pytest.fixture
def roles(tmp_path: Path, kind: str) -> Iterator[Roles]:
    admin = {"username": "admin", "password": "change-me-admin"}
    options = ("--aclfile", str(ACL_FILE))
    with OwnServer(tmp_path / "server", *options, connect=admin, kind=kind) as server:
        yield Roles(server)


@pytest.mark.parametrize(("kind", "pubsub"), [("embedded", "plain"), ("", "sharded")])
async def test_each_role_may_do_its_part(roles: Roles, tmp_path: Path, pubsub: str) -> None:
    with roles.server.client() as admin:
        admin.hset("promptq:{default}:config", "pubsub", pubsub)
    with (
        started(tmp_path, roles.url("worker"), "--lease-ms", "500", module=FAULTY) as worker,
        Client(roles.url("producer")) as producer,
        Client(roles.url("subscriber")) as subscriber,
    ):
        ids = [producer.enqueue("a", seed=n, max_tokens=300, tenant=f"t{n % 2}") for n in range(3)]
        ids.append(producer.enqueue("a", seed=3, max_tokens=8000, tenant="t1"))
        stream = subscriber.stream(ids[0])
        first = next(stream)
        assert producer.cancel(ids[3]) in (CancelStatus.FLAGGED, CancelStatus.CANCELLED)
        worker.process.kill()
        worker.process.wait()
        with started(tmp_path, roles.url("worker"), "--lease-ms", "500", module=FAULTY) as second:
            rest = "".join(event.text for event in stream)
            assert first.text + rest == text_of(0, 300)
            assert subscriber.result(ids[1]).text == text_of(1, 300)
            assert subscriber.result(ids[3]).finish_reason == "cancelled"
            async with (
                AsyncClient(roles.url("producer")) as putting,
                AsyncClient(roles.url("subscriber")) as reading,
            ):
                options = {"deadline_ms": 60_000, "idempotency_key": "k", "priority": -1}
                again = [await putting.enqueue("a", seed=7, max_tokens=9, **options)] * 2
                again[1] = await putting.enqueue("a", seed=7, max_tokens=9, **options)
                assert again[0] == again[1]
                assert (await reading.result(again[0])).text == text_of(7, 9)
            late = producer.enqueue("a", seed=8, max_tokens=9, delay_ms=200)
            producer.reprioritise(late, -1)
            assert subscriber.result(late).text == text_of(8, 9)
            with pytest.raises(RequestFailedError):
                subscriber.result(producer.enqueue("a", model="another"))
            assert producer.stats().model == "model-free"
            with pytest.raises(RequestNotFoundError):
                producer.result("nobody's")
            assert producer.dead_letters() == []
            second.terminate()
            assert second.wait() == 0
            for told in (worker.said, second.said):
                assert "NOPERM" not in told
                assert "change-me" not in told


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificates")
@pytest.mark.skipif(shutil.which("redis-server") is None, reason=NO_TLS)
async def test_a_server_that_asks_for_certificates_gets_the_clients(tmp_path: Path) -> None:
    make_certificates(tmp_path)
    port = free_port()
    settings = tls_settings(tmp_path, port, asks_clients=True)
    options = [it for name, value in settings.items() for it in (f"--{name}", value)]
    url = as_role("producer", f"rediss://127.0.0.1:{port}/0?ssl_ca_certs={tmp_path / 'ca.crt'}")
    shown = f"{url}&ssl_certfile={tmp_path / 'client.crt'}&ssl_keyfile={tmp_path / 'client.key'}"
    with OwnServer(tmp_path / "server", *options), Client(shown) as client:
        request_id = client.enqueue("a")
        async with AsyncClient(shown) as asynchronous:
            assert await asynchronous.state(request_id) is RequestState.WAITING
        with pytest.raises(RedisUnavailableError, match="cannot be reached by TLS"):
            Client(url)


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificates")
@pytest.mark.skipif(shutil.which("redis-server") is None, reason=NO_TLS)
async def test_workers_and_clients_speak_tls_and_check_the_certificate(tmp_path: Path) -> None:
    make_certificates(tmp_path)
    port, authority = free_port(), str(tmp_path / "ca.crt")
    settings = tls_settings(tmp_path, port)
    options = [it for name, value in settings.items() for it in (f"--{name}", value)]
    url = as_role("producer", f"rediss://127.0.0.1:{port}/0?ssl_ca_certs={authority}")
    with (
        OwnServer(tmp_path / "server", *options),
        started(tmp_path, url, module=FAULTY) as worker,
        Client(url) as client,
    ):
        assert client.generate("a", seed=1, max_tokens=50).text == text_of(1, 50)
        async with AsyncClient(url) as asynchronous:
            assert (await asynchronous.generate("a", seed=2, max_tokens=9)).text == text_of(2, 9)
        with pytest.raises(RedisUnavailableError, match="certificate verify failed"):
            Client(f"rediss://127.0.0.1:{port}/0")
        with pytest.raises(RedisUnavailableError, match="rediss://"):
            Client(f"redis://127.0.0.1:{port}/0")
        worker.terminate()
        assert worker.wait() == 0


def test_a_request_id_stays_inside_its_own_keys(roles: Roles, tmp_path: Path) -> None:
    """Whatever it looks like: no other request's key, no other queue's, no pattern."""
    strange = ["}:pending", "promptq:{other}:pending", "*", "a:tokens:b", "../../x", "x}{y", "%s"]
    with (
        started(tmp_path, roles.url("worker"), module=FAULTY),
        Client(roles.url("producer")) as client,
        roles.server.client() as admin,
    ):
        for n, request_id in enumerate(strange):
            client.enqueue("a", request_id=request_id, seed=n, max_tokens=5)
            assert client.result(request_id).text == text_of(n, 5)
            assert client.state(request_id) is RequestState.COMPLETED
        found = {key.decode() for key in admin.keys("*")}
        keys = Keys("default")
        expected = {keys.request(it) for it in strange} | {keys.tokens(it) for it in strange}
        own = {keys.prefix + name for name in ("config", "model", "outputs", "workers")} | {QUEUES}
        assert expected <= found
        of_workers = (keys.worker(""), keys.slots(""), keys.statistics, f"{keys.prefix}claimed:")
        others = {key for key in found - expected - own if not key.startswith(of_workers)}
        assert others == set()

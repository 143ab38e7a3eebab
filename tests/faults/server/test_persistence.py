"""A killed server or a failover costs what the table in docs/operations.md says."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import redis

from promptq import Client
from promptq.shared.errors import RedisSideError, RequestNotFoundError
from promptq.shared.protocol.events import TokenEvent
from promptq.shared.queue.request_queue import RequestQueue
from tests.support.model_free import text_of
from tests.support.network import Network
from tests.support.processes import started
from tests.support.requests import KINDS, check_log, num_tokens, put, read_in, result_of
from tests.support.servers import OwnServer
from tests.support.waiting import until

FAULTY = "tests.faults.worker.faulty_worker"
LONG = 2500


@contextmanager
def master_and_replica(folder: Path, *options: str) -> Iterator[tuple[OwnServer, OwnServer]]:
    with (
        OwnServer(folder / "master", *options) as master,
        OwnServer(folder / "replica", "--replicaof", f"127.0.0.1 {master.port}") as replica,
        replica.client() as client,
    ):
        until(lambda: client.info("replication")["master_link_status"] == "up")
        yield master, replica


def promote(replica: OwnServer) -> None:
    """From now on it takes writes, and gets no more of its master's."""
    with replica.client() as client:
        client.replicaof("NO", "ONE")


def test_everysec_keeps_what_was_written_when_the_server_is_killed(tmp_path: Path) -> None:
    """Nothing has to be synced for that: the kernel has it."""
    with (
        OwnServer(tmp_path / "server", "--appendfsync", "everysec") as server,
        started(tmp_path, server.url, "--lease-ms", "60000", module=FAULTY),
        Client(server.url) as client,
        server.client() as own,
    ):
        request_id = client.enqueue("a", seed=1, max_tokens=500)
        stream = client.stream(request_id)
        text = "".join(next(stream).text for _ in range(20))
        later = client.enqueue("a", seed=2, max_tokens=5, delay_ms=1000)
        until(lambda: own.info("persistence")["aof_buffer_length"] == 0)
        server.kill()
        server.start()
        text += "".join(event.text for event in stream)
        assert text == text_of(1, 500)
        log = check_log(RequestQueue(own), request_id, text)
        assert {event["attempt"] for event in log} == {1}
        assert client.result(later).text == text_of(2, 5)


@pytest.mark.parametrize("kind", KINDS)
def test_without_persistence_a_killed_server_ends_its_streams_with_an_error(
    tmp_path: Path, kind: str
) -> None:
    events: list[TokenEvent] = []
    with (
        OwnServer(tmp_path / "server", "--appendonly", "no") as server,
        started(tmp_path, server.url, module=FAULTY, STEP_SECONDS="0.01") as worker,
        Client(server.url) as client,
    ):
        request_id = client.enqueue("a", seed=1, max_tokens=LONG)

        def told(event: TokenEvent) -> None:
            events.append(event)
            if len(events) == 20:
                server.kill()
                server.start()

        with pytest.raises(RequestNotFoundError, match=request_id):
            read_in(kind, server.url, request_id, told)
        assert text_of(1, LONG).startswith("".join(event.text for event in events))
        assert not any(event.is_last for event in events)
        until(lambda: worker.logged("lease lost"))
        assert client.generate("a", seed=2, max_tokens=5).text == text_of(2, 5)


def test_what_wait_counted_on_a_replica_outlives_its_master(tmp_path: Path) -> None:
    """`WAIT` speaks of the connection's own writes, so client and caller share one. What was lost
    is enqueued again, and what was kept is the same request, by their idempotency keys."""
    with (
        master_and_replica(tmp_path) as (master, replica),
        redis.Redis.from_url(master.url, single_connection_client=True) as connection,
        Client(connection) as client,
    ):
        kept = [enqueue(client, n) for n in range(20)]
        assert connection.wait(1, 0) == 1
        promote(replica)
        lost = enqueue(client, 20)
        assert connection.wait(1, 100) == 0
        master.kill()
        with started(tmp_path, replica.url, module=FAULTY), Client(replica.url) as reader:
            assert reader.state(lost) is None
            for n, request_id in enumerate(kept):
                assert enqueue(reader, n) == request_id
                assert reader.result(request_id).text == text_of(n, 5)
            assert reader.result(enqueue(reader, 20)).text == text_of(20, 5)


def enqueue(client: Client, n: int) -> str:
    return client.enqueue("a", seed=n, max_tokens=5, idempotency_key=f"key-{n}")


def test_a_master_whose_replica_is_silent_takes_in_nothing_after_a_while(tmp_path: Path) -> None:
    options = ["--min-replicas-to-write", "1", "--min-replicas-max-lag", "1"]
    with (
        master_and_replica(tmp_path, *options) as (master, replica),
        Client(master.url) as client,
    ):
        until(lambda: refusal_of(client) == "")  # the replica's last word may be old already
        replica.freeze()
        until(lambda: refusal_of(client) != "")
        assert refusal_of(client).startswith("NOREPLICAS")
        replica.thaw()
        until(lambda: refusal_of(client) == "")


def refusal_of(client: Client) -> str:
    """Returns the server's error for a request; nothing if it takes the request."""
    try:
        client.enqueue("a")
    except RedisSideError as error:
        return str(error.__cause__)
    return ""


def test_a_finished_request_whose_end_was_lost_is_finished_once_more(tmp_path: Path) -> None:
    """In the same words, for who looks at it on the new master."""
    with (
        master_and_replica(tmp_path) as (master, replica),
        replica.client() as own,
    ):
        num = 1500  # more than come before the replica is promoted
        network = Network(master.port)
        queue = RequestQueue(own)
        options = ["--lease-ms", "1000", "--max-events-per-second", "inf", "--log-level", "debug"]
        with (
            started(tmp_path, network.url, *options, module=FAULTY) as worker,
            master.client() as at_master,
        ):
            request_id = put(RequestQueue(at_master), seed=1, max_tokens=num)
            until(lambda: num_tokens(queue, request_id) > 20)
            promote(replica)
            assert result_of(RequestQueue(at_master), request_id)["text"] == text_of(1, num)
            until(lambda: worker.logged("ended"))  # until then it would fill gaps itself
            kept = num_tokens(queue, request_id)
            assert queue.state(request_id) == "active"
            network.lead_to(replica.port)
            network.cut()
            network.mend()
            result = result_of(queue, request_id)
            assert (result["text"], result["stats"]["attempts"]) == (text_of(1, num), 2)
            log = check_log(queue, request_id, text_of(1, num))
            assert [event["attempt"] for event in log] == [1] * kept + [2] * (len(log) - kept)
        network.close()

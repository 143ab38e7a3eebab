"""The server and the network break under a worker: it goes on where it was, or stops cleanly."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from promptq import Client
from promptq.shared.queue.request_queue import RequestQueue
from tests.support.model_free import assert_texts, text_of
from tests.support.network import Network
from tests.support.processes import started
from tests.support.requests import check_log, num_tokens, put, result_of
from tests.support.roles import as_role
from tests.support.servers import OwnServer
from tests.support.waiting import until

FAULTY = "tests.faults.worker.faulty_worker"
LONG = 2500


@pytest.fixture
def server(tmp_path: Path) -> Iterator[OwnServer]:
    with OwnServer(tmp_path / "server") as server:
        yield server


@pytest.fixture
def queue(server: OwnServer) -> Iterator[RequestQueue]:
    with server.client() as client:
        yield RequestQueue(client)


@pytest.fixture
def network(server: OwnServer) -> Iterator[Network]:
    network = Network(server.port)
    yield network
    network.close()


def is_a_publish(sent: bytes) -> bool:
    """Whether a worker sends events with it; a renewal of leases has none."""
    return b"EVALSHA" in sent and b'"token_ids"' in sent


@pytest.mark.parametrize("is_last", [False, True], ids=["a-token", "the-last-event"])
def test_a_reply_that_is_lost_after_the_commit_adds_no_token_twice(
    queue: RequestQueue, network: Network, tmp_path: Path, is_last: bool
) -> None:
    def found(sent: bytes) -> bool:
        return is_a_publish(sent) and (not is_last or b'"finish_reason":"length"' in sent)

    options = ["--max-events-per-second", "inf"]
    with started(tmp_path, network.url, *options, module=FAULTY) as worker:
        request_id = put(queue, seed=1, max_tokens=200)
        if not is_last:
            until(lambda: num_tokens(queue, request_id) > 20)
        network.swallow_reply_to(found)
        result = result_of(queue, request_id)
        until(lambda: network.num_swallowed)
        assert (result["text"], result["stats"]["attempts"]) == (text_of(1, 200), 1)
        worker.terminate()
        assert worker.wait() == 0
    log = check_log(queue, request_id, text_of(1, 200))
    assert len(log) == 200


@pytest.mark.matrix(1)
@pytest.mark.parametrize("how", ["cut", "hold"])
def test_a_worker_that_is_cut_off_for_a_while_goes_on_with_what_it_has(
    queue: RequestQueue, network: Network, tmp_path: Path, how: str
) -> None:
    """Held, no connection ends: the worker must find out that nobody answers."""
    options = ["--lease-ms", "60000"]
    with started(tmp_path, network.url, *options, module=FAULTY) as worker:
        request_id = put(queue, seed=1, max_tokens=LONG)
        until(lambda: num_tokens(queue, request_id) > 20)
        (network.cut if how == "cut" else network.hold)()
        time.sleep(8)  # longer than redis-py itself tries
        network.mend()
        result = result_of(queue, request_id)
        assert (result["text"], result["stats"]["attempts"]) == (text_of(1, LONG), 1)
        worker.terminate()
        assert worker.wait() == 0
    check_log(queue, request_id, text_of(1, LONG))


def test_a_worker_whose_connections_were_forgotten_still_gets_messages(
    queue: RequestQueue, network: Network, server: OwnServer, tmp_path: Path
) -> None:
    """Its link to the control channel stays open and brings nothing any more."""
    url = f"{network.url}?socket_timeout=0.3"
    with (
        started(tmp_path, url, module=FAULTY) as worker,
        Client(as_role("operator", server.url)) as steering,
        server.client() as own,
    ):
        until(lambda: own.pubsub_numsub(queue.keys.control)[0][1] == 1)
        time.sleep(1)
        assert not worker.logged("Redis does not accept a call"), "there was only nothing to say"
        network.lose()
        own.publish(queue.keys.control, "pending")
        before = network.num_accepted
        until(lambda: network.num_accepted > before)
        network.mend()
        while worker.process.poll() is None:
            steering.drain()
            time.sleep(0.1)
        assert worker.wait() == 0


def test_a_worker_that_was_away_for_longer_than_its_leases_lets_go(
    queue: RequestQueue, network: Network, server: OwnServer, tmp_path: Path
) -> None:
    options = ["--lease-ms", "1000"]
    with (
        started(tmp_path, network.url, *options, module=FAULTY) as zombie,
    ):
        request_id = put(queue, seed=1, max_tokens=LONG)
        until(lambda: num_tokens(queue, request_id) > 20)
        network.hold()
        with started(tmp_path, server.url, *options, module=FAULTY):
            until(lambda: log_attempts(queue, request_id) == {1, 2})
            network.mend()
            assert result_of(queue, request_id)["text"] == text_of(1, LONG)
            until(lambda: zombie.logged("lease lost"))
            later = [put(queue, seed=n, max_tokens=50) for n in range(20)]
            for n, other in enumerate(later):
                assert result_of(queue, other)["text"] == text_of(n, 50)
        zombie.terminate()
        assert zombie.wait() == 0
    check_log(queue, request_id, text_of(1, LONG))


def log_attempts(queue: RequestQueue, request_id: str) -> set[int]:
    from tests.support.requests import log_of

    return {event["attempt"] for event in log_of(queue, request_id)}


def test_a_server_that_is_killed_and_comes_back_is_served_and_read_on(
    server: OwnServer, tmp_path: Path
) -> None:
    """With the log of all writes; its scripts are gone, and streams do not notice."""
    with started(tmp_path, server.url, module=FAULTY) as worker, Client(server.url) as client:
        request_id = client.enqueue("a", seed=1, max_tokens=LONG)
        stream = client.stream(request_id)
        text = "".join(next(stream).text for _ in range(20))
        for _ in range(3):
            server.kill()
            time.sleep(0.5)
            server.start()
            text += "".join(next(stream).text for _ in range(200))
        text += "".join(event.text for event in stream)
        assert text == text_of(1, LONG)
        with server.client() as own:
            queue = RequestQueue(own)
            check_log(queue, request_id, text)
        worker.terminate()
        assert worker.wait() == 0


@pytest.mark.matrix(1)
@pytest.mark.parametrize(
    ("setting", "bad", "good"),
    [("min-replicas-to-write", "1", "0"), ("save", "1 1", "")],
    ids=["NOREPLICAS", "MISCONF"],
)
def test_a_server_that_refuses_writes_for_a_while_loses_nothing(
    queue: RequestQueue, server: OwnServer, tmp_path: Path, setting: str, bad: str, good: str
) -> None:
    with (
        started(tmp_path, server.url, "--lease-ms", "60000", module=FAULTY) as worker,
        server.client() as client,
    ):
        requests = [put(queue, seed=n, max_tokens=1000) for n in range(8)]
        until(lambda: num_tokens(queue, requests[0]) > 20)
        (server.folder / "dump.rdb").mkdir()  # no snapshot can take its place
        client.config_set(setting, bad)
        until(lambda: worker.logged("Redis does not accept a call, trying again"))
        so_far = num_tokens(queue, requests[0])
        time.sleep(0.5)
        assert num_tokens(queue, requests[0]) == so_far
        assert [line["level"] for line in worker.logged("")] == ["warning"], "all parts say it once"
        client.config_set(setting, good)
        assert_texts(queue, requests, 1000)


def test_a_server_that_becomes_a_replica_for_a_while_loses_nothing(
    queue: RequestQueue, server: OwnServer, tmp_path: Path
) -> None:
    """READONLY: with every write refused, no event may go out that is not in the log."""
    with (
        OwnServer(tmp_path / "other") as other,
        started(tmp_path, server.url, "--lease-ms", "60000", module=FAULTY),
        server.client() as client,
    ):
        request_id = put(queue, seed=1, max_tokens=500)
        until(lambda: num_tokens(queue, request_id) > 20)
        other.freeze()  # so that the server keeps its data, as nothing else comes
        client.replicaof("127.0.0.1", other.port)
        time.sleep(1)
        client.replicaof("NO", "ONE")
        assert result_of(queue, request_id)["text"] == text_of(1, 500)
        other.thaw()
    check_log(queue, request_id, text_of(1, 500))


def test_an_address_that_moves_to_the_new_primary_takes_worker_and_reader_along(
    server: OwnServer, network: Network, tmp_path: Path
) -> None:
    """The old one answers READONLY on the connections that are open, as a replica of the new."""
    with (
        OwnServer(tmp_path / "other") as other,
        other.client() as new,
        server.client() as old,
        started(tmp_path, network.url, "--lease-ms", "60000", module=FAULTY) as worker,
        Client(network.url) as client,
    ):
        new.replicaof("127.0.0.1", server.port)
        until(lambda: new.info("replication")["master_link_status"] == "up")
        request_id = client.enqueue("a", seed=1, max_tokens=LONG)
        stream = client.stream(request_id)
        text = "".join(next(stream).text for _ in range(100))
        written = old.info("replication")["master_repl_offset"]
        until(lambda: new.info("replication")["slave_repl_offset"] >= written)
        new.replicaof("NO", "ONE")
        old.replicaof("127.0.0.1", other.port)
        network.lead_to(other.port)
        text += "".join(event.text for event in stream)
        assert text == text_of(1, LONG)
        log = check_log(RequestQueue(new), request_id, text)
        assert {event["attempt"] for event in log} == {1}
        later = client.enqueue("a", seed=2, max_tokens=5)
        assert client.result(later).text == text_of(2, 5)
        worker.terminate()
        assert worker.wait() == 0


@pytest.mark.matrix(1)
@pytest.mark.parametrize("fault", [None, "hang-in-preparation"])
def test_a_worker_that_is_cut_off_for_good_exits_with_an_error(
    queue: RequestQueue, network: Network, tmp_path: Path, fault: str | None
) -> None:
    """The worker waits for no preparation that hangs."""
    # It tries for the time of a lease to give its requests back.
    options = ["--redis-retry-seconds", "1", "--lease-ms", "2000"]
    environment = {"FAULT": fault, "FAULT_FOR": "3600"} if fault else {}
    with started(tmp_path, network.url, *options, module=FAULTY, **environment) as worker:
        request_id = put(queue, seed=1, max_tokens=100_000 // 16)
        until(lambda: num_tokens(queue, request_id) > 20)
        if fault:
            put(queue, prompt="!")
            until(lambda: "a fault begins" in worker.said)
        network.cut()
        assert worker.wait() == 1
        assert "promptq worker: no Redis server answers" in worker.said


def test_generation_pauses_at_the_bound_of_its_buffer_and_does_not_count_as_hung(
    queue: RequestQueue, network: Network, tmp_path: Path
) -> None:
    options = ["--stuck-seconds", "1", "--lease-ms", "60000"]
    with started(tmp_path, network.url, *options, module=FAULTY, STEP_SECONDS="0.001"):
        request_id = put(queue, seed=1, max_tokens=LONG)
        until(lambda: num_tokens(queue, request_id) > 20)
        network.hold()
        time.sleep(4)
        network.mend()
        result = result_of(queue, request_id)
        assert (result["text"], result["stats"]["attempts"]) == (text_of(1, LONG), 1)


def test_events_that_a_server_lost_are_sent_again_as_they_were(
    queue: RequestQueue, server: OwnServer, tmp_path: Path
) -> None:
    """After a failover, the log may lack events that the worker has sent and a reader has read."""
    with (
        started(tmp_path, server.url, "--lease-ms", "60000", module=FAULTY) as worker,
        Client(as_role("subscriber", server.url)) as reader,
        server.client() as client,
    ):
        request_id = put(queue, seed=1, max_tokens=1000)
        stream = reader.stream(request_id)
        text = "".join(next(stream).text for _ in range(100))
        lost = client.xrange(queue.keys.tokens(request_id))[40:]
        client.eval(LOSE_EVENTS, 1, queue.keys.tokens(request_id), 40)
        text += "".join(event.text for event in stream)
        assert text == text_of(1, 1000)
        log = check_log(queue, request_id, text)
        assert {event["attempt"] for event in log} == {1}
        entries = client.xrange(queue.keys.tokens(request_id))
        assert entries[40 : 40 + len(lost)] == lost
        assert worker.logged("the log lost events; sending them again")


LOSE_EVENTS = """
local entries = redis.call('XRANGE', KEYS[1], '-', '+')
redis.call('DEL', KEYS[1])
for i = 1, tonumber(ARGV[1]) do
  redis.call('XADD', KEYS[1], entries[i][1], unpack(entries[i][2]))
end
"""


def test_a_reader_ahead_of_a_log_that_grows_anew_gets_each_token_once(
    queue: RequestQueue, server: OwnServer
) -> None:
    """Another worker goes on from what is left, with other borders between its events."""
    from tests.producer.playing import HandWorker

    url = as_role("subscriber", server.url)
    with server.client() as client, Client(url, silence_seconds=0.2) as reader:
        hand = HandWorker(client)
        request_id = put(queue, max_tokens=20)
        claim = hand.take()
        stream = reader.stream(request_id)
        for letters in ("abc", "de", "f"):
            hand.send(claim, letters)
        events = [next(stream) for _ in range(3)]
        client.eval(LOSE_EVENTS, 1, queue.keys.tokens(request_id), 1)
        hand.adopt(claim)  # from the first three on
        hand._ends[request_id] = 3
        hand.send(claim, "d")
        hand.send(claim, "efgh")
        hand.finish(claim, "ij")
        events += list(stream)
        assert "".join(event.text for event in events) == "abcdefghij"
        assert [token for event in events for token in event.token_ids] == list(b"abcdefghij")
        assert [event.index for event in events] == [0, 3, 5, 6, 8]

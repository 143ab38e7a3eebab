"""`promptq gateway` as a user runs it: a process with options and signals."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
from concurrent.futures import ThreadPoolExecutor

import httpx2
import pytest

from promptq.shared.protocol.claims import Claim
from tests.producer.gateway.played import (
    PROMPT,
    continued,
    is_cancelled,
    opened,
    read_frames,
    texts_of,
)
from tests.producer.playing import HandWorker, Run, Start
from tests.support.servers import free_port


def url_of(process: subprocess.Popen[str]) -> str:
    """Where it listens, once it does."""
    assert process.stdout is not None
    line = process.stdout.readline()
    found = re.search(r"ready at (http://\S+), queue ", line)
    assert found is not None, line + process.communicate()[1]
    return found[1]


def test_it_serves_and_ends_cleanly(start: Start) -> None:
    process = start("gateway", "--port", "0")
    url = url_of(process)
    assert httpx2.get(f"{url}/healthz", timeout=None).json() == {"status": "ok"}
    assert httpx2.get(f"{url}/v1/models", timeout=None).json()["data"] == []
    process.terminate()
    output, logs = process.communicate()
    assert output == ""
    assert [json.loads(line)["path"] for line in logs.splitlines()] == ["/v1/models"]
    assert process.returncode == 0


def test_it_starts_without_a_server(start: Start) -> None:
    url = url_of(start("gateway", "--port", "0", "--redis", f"redis://127.0.0.1:{free_port()}/0"))
    assert httpx2.get(f"{url}/healthz", timeout=None).status_code == 200
    assert httpx2.get(f"{url}/v1/models", timeout=None).status_code == 503


def test_a_port_that_is_taken(run: Run, start: Start) -> None:
    port = url_of(start("gateway", "--port", "0")).rpartition(":")[2]
    done = run("gateway", "--port", port)
    assert done.returncode == 1
    assert done.stderr.startswith(f"promptq: cannot listen on 127.0.0.1:{port}: ")


def test_gateways_share_a_port(run: Run, start: Start) -> None:
    """The kernel spreads connections over those that name it, and nobody else gets in."""
    port = str(free_port())
    gateways = [start("gateway", "--port", port, "--share-port") for _ in range(2)]
    (url,) = {url_of(gateway) for gateway in gateways}
    for _ in range(60):
        assert httpx2.get(f"{url}/v1/models", timeout=None).status_code == 200
    assert "cannot listen" in run("gateway", "--port", port).stderr
    for gateway in gateways:
        gateway.terminate()
    answered = [gateway.communicate()[1].count("/v1/models") for gateway in gateways]
    assert min(answered) > 0
    assert sum(answered) == 60


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_streams_go_on_at_the_next_gateway(
    start: Start, own_worker: HandWorker, how: signal.Signals
) -> None:
    """However the first ends, it cancels nothing, and a client misses nothing."""

    def take() -> Claim:
        claim = own_worker.take_next()
        own_worker.send(claim, "a")
        return claim

    first = start("gateway", "--port", "0", PROMPTQ_HTTP_DRAIN_SECONDS="0")
    second = start("gateway", "--port", "0")
    body = {"prompt": "Hi", "stream": True}
    with (
        httpx2.Client(base_url=url_of(first), timeout=30) as http,
        httpx2.Client(base_url=url_of(second), timeout=30) as other,
        ThreadPoolExecutor() as beside,
    ):
        taking = beside.submit(take)
        with http.stream("POST", "/v1/completions", json=body) as response:
            claim = taking.result()
            url, frames = response.headers["X-Stream-Url"], read_frames(response)
            event_id, _ = next(frames)
            first.send_signal(how)
            first.wait()
            with pytest.raises(httpx2.RemoteProtocolError):
                next(frames)
        with continued(other, url, event_id) as again:
            assert not is_cancelled(own_worker, claim.request_id)
            own_worker.finish(claim, "b")
            assert texts_of(again.rest()) == "b"


def test_streams_that_run_at_a_stop_signal_come_to_their_end(
    start: Start, own_worker: HandWorker
) -> None:
    """Nobody else gets in meanwhile."""
    gateway = start("gateway", "--port", "0", PROMPTQ_HTTP_DRAIN_SECONDS="600")
    url = url_of(gateway)

    def takes_connections() -> bool:
        host, port = url.removeprefix("http://").split(":")
        try:
            socket.create_connection((host, int(port))).close()
        except (ConnectionRefusedError, ConnectionResetError):  # reset: it closed meanwhile
            return False
        return True

    with (
        httpx2.Client(base_url=url, timeout=None) as http,
        opened(http, own_worker, PROMPT) as (reading, claim),
    ):
        reading.next()
        gateway.terminate()
        while takes_connections():
            pass
        own_worker.send(claim, "b")
        assert reading.text(1) == "b"
        own_worker.finish(claim, "c")
        frames = reading.rest()
    assert texts_of(frames) == "c"
    assert frames[-1][1] == "[DONE]"
    assert gateway.wait() == 0

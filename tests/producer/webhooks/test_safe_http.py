"""Which addresses a webhook may be sent to, however they are written."""

from __future__ import annotations

import http.client
import socket
import threading
from typing import Any

import pytest

from promptq.producer.calls import safe_http
from promptq.producer.calls.safe_http import AddressRefusedError, is_public, post
from tests.producer.webhooks.receiving import Receiver


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1", "10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1",
        "0.0.0.0", "224.0.0.1", "255.255.255.255", "::1", "::", "fe80::1", "fe80::1%eth0",
        "fc00::1", "ff02::1", "::ffff:127.0.0.1", "64:ff9b::a00:1", "2002:7f00:1::",
        "192.0.0.8", "192.88.99.1", "198.18.0.1", "240.0.0.1", "fec0::1", "::127.0.0.1",
        "::ffff:0:127.0.0.1", "64:ff9b:1::a00:1", "100::1", "2001:db8::1", "3fff::1", "5f00::1",
    ],
)  # fmt: skip
def test_what_is_private(address: str) -> None:
    assert not is_public(address)


def test_what_is_public() -> None:
    assert is_public("93.184.216.34")
    assert is_public("2606:2800:220:1:248:1893:25c8:1946")
    assert is_public("::ffff:93.184.216.34")
    assert is_public("64:ff9b::5db8:d822")


@pytest.mark.parametrize(
    "host",
    [
        "2130706433", "0x7f000001", "0177.0.0.1", "127.1", "0", "localhost", "[::]", "[::1]",
        "[::ffff:127.0.0.1]", "93.184.216.34@127.0.0.1", "93.184.216.34\\@127.0.0.1",
        "x:y@localhost",
    ],
)  # fmt: skip
def test_other_ways_to_write_an_address(host: str, receiving: Receiver) -> None:
    with pytest.raises(AddressRefusedError, match="private network"):
        post(f"http://{host}:{receiving.port}/ok", b"", {}, timeout=1)
    assert receiving.calls == []


def test_a_name_is_resolved_once_and_checked_whole(
    receiving: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A name with a public and a private address is refused; one that changes its mind between
    two questions is asked once, and the connection goes to what was checked."""
    answers: list[list[str]] = []

    def resolve(host: str, port: int, *_: Any, **__: Any) -> list[Any]:
        assert host == "name.example"
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (it, port)) for it in answers.pop(0)]

    connected: list[tuple[str, int]] = []

    def connect(address: tuple[str, int], *_: Any) -> socket.socket:
        connected.append(address)
        raise ConnectionRefusedError

    monkeypatch.setattr(safe_http.socket, "getaddrinfo", resolve)
    monkeypatch.setattr(safe_http.socket, "create_connection", connect)
    answers[:] = [["93.184.216.34", "127.0.0.1"]]
    with pytest.raises(AddressRefusedError, match="private network"):
        post("http://name.example/", b"", {}, timeout=1)
    assert connected == []
    answers[:] = [["93.184.216.34"], ["127.0.0.1"]]
    with pytest.raises(ConnectionRefusedError):
        post("http://name.example:8080/", b"", {}, timeout=1)
    assert connected == [("93.184.216.34", 8080)]
    assert answers == [["127.0.0.1"]], "nobody asked a second time"


@pytest.mark.parametrize("url", ["http://", "http://a:x/", "http://a b/", "http://[::1/", "x://a"])
def test_what_is_no_url(url: str) -> None:
    with pytest.raises((AddressRefusedError, OSError)):
        post(url, b"", {}, timeout=1)


def test_who_sends_a_byte_now_and_then_is_cut_off() -> None:
    """Each comes in time, and there is no end of them, in the status line and behind it."""
    for beginning in (b"", b"HTTP/1.1 200 OK\r\na: "):
        is_cut = threading.Event()

        def trickle(listening: socket.socket, beginning: bytes, is_cut: threading.Event) -> None:
            connection, _ = listening.accept()
            with connection:
                try:
                    connection.sendall(beginning)
                    while True:
                        connection.sendall(b"x")
                        is_cut.wait(0.01)
                except OSError:
                    is_cut.set()

        with socket.create_server(("127.0.0.1", 0)) as listening:
            thread = threading.Thread(target=trickle, args=(listening, beginning, is_cut))
            thread.start()
            url = f"http://127.0.0.1:{listening.getsockname()[1]}/"
            with pytest.raises((OSError, http.client.HTTPException)):
                post(url, b"", {}, timeout=0.1, allow_private=True)
            is_cut.wait()
            thread.join()

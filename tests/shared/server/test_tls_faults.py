"""Faults of TLS beside the server's certificate: each message names what to change."""

from __future__ import annotations

import os
import shutil
import socket
import ssl
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from promptq import Client
from promptq.shared.errors import ConfigurationError, RedisProtocolError
from tests.support.servers import assert_refused, make_certificates

KEY = "-newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes"
COMMANDS = (
    f"req -x509 {KEY} -keyout stranger.key -out stranger.crt -days 2 -subj /CN=stranger",
    f"req {KEY} -keyout purpose.key -out purpose.csr -subj /CN=localhost",
    "x509 -req -in purpose.csr -CA ca.crt -CAkey ca.key -CAcreateserial -out purpose.crt -days 2"
    " -extfile purpose",
    "ec -in client.key -aes128 -passout pass:right -out locked.key",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    folder = tmp_path_factory.mktemp("certificates")
    make_certificates(folder)
    (folder / "purpose").write_text("subjectAltName=IP:127.0.0.1\nextendedKeyUsage=clientAuth\n")
    for command in COMMANDS:
        subprocess.run(["openssl", *command.split()], cwd=folder, check=True, capture_output=True)
    return folder


def wants_client(context: ssl.SSLContext, folder: Path) -> None:
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(folder / "ca.crt")


def speaks_old_tls(context: ssl.SSLContext, _: Path) -> None:
    context.maximum_version = ssl.TLSVersion.TLSv1_2


def shows_purpose(context: ssl.SSLContext, folder: Path) -> None:
    context.load_cert_chain(folder / "purpose.crt", folder / "purpose.key")


def meet(context: ssl.SSLContext, connection: socket.socket) -> None:
    """Greets a client. One that is refused can read the alert: nothing it sent is left unread."""
    with context.wrap_socket(
        connection, server_side=True, do_handshake_on_connect=False
    ) as encrypted:
        try:
            encrypted.do_handshake()
            encrypted.recv(1)
        except ssl.SSLError:
            socket.socket.shutdown(encrypted, socket.SHUT_WR)
            while os.read(encrypted.fileno(), 4096):
                pass


@contextmanager
def listening(folder: Path, change: Callable[[ssl.SSLContext, Path], None] | None) -> Iterator[int]:
    """The port of a server that greets in TLS, and closes."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "server.crt", folder / "server.key")
    if change is not None:
        change(context, folder)

    def greet() -> None:
        with suppress(OSError):  # the listener is closed
            while True:
                connection, _ = listener.accept()
                with suppress(OSError):
                    meet(context, connection)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=greet)
        thread.start()
        try:
            yield listener.getsockname()[1]
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()


@pytest.mark.parametrize(
    ("change", "options", "said"),
    [
        (shows_purpose, "", "a strong certificate that is made for servers"),
        (wants_client, "", "present one: ?ssl_certfile=FILE"),
        (
            wants_client,
            "&ssl_certfile={0}/stranger.crt&ssl_keyfile={0}/stranger.key",
            "the server refuses the certificate in ?ssl_certfile",
        ),
        (speaks_old_tls, "&ssl_min_version=772", "let both speak TLS 1.2 or 1.3"),
        (
            None,
            "&ssl_certfile={0}/client.crt&ssl_keyfile={0}/stranger.key",
            "?ssl_keyfile is not the key of the certificate",
        ),
        (None, "&ssl_certfile={0}/client.crt", "are PEM"),
        (None, "&ssl_certfile={0}/purpose&ssl_keyfile={0}/client.key", "are PEM"),
        (
            None,
            "&ssl_certfile={0}/client.crt&ssl_keyfile={0}/locked.key&ssl_password=wrong",
            "and ?ssl_password is the key's",
        ),
    ],
)
async def test_what_is_wrong_is_named(
    folder: Path, change: Callable[[ssl.SSLContext, Path], None] | None, options: str, said: str
) -> None:
    with listening(folder, change) as port:
        url = f"rediss://127.0.0.1:{port}/0?ssl_ca_certs={folder}/ca.crt{options.format(folder)}"
        await assert_refused(url, RedisProtocolError, said)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("ssl_keyfile={0}/client.key", "needs 'ssl_certfile'"),
        ("ssl_ca_certs={0}", "'ssl_ca_certs'.* not a file"),
        ("ssl_ca_path={0}/ca.crt", "'ssl_ca_path'.* not a folder"),
        ("ssl_ca_certs=", "'ssl_ca_certs' has no value"),
    ],
)
def test_options_that_cannot_be_right_are_refused(folder: Path, options: str, said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        Client(f"rediss://127.0.0.1:1/0?{options.format(folder)}")

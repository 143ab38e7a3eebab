"""Errors of connections say in one sentence what is wrong, and what to do."""

from __future__ import annotations

import http.server
import shutil
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from promptq import Client
from promptq.shared.errors import (
    ConfigurationError,
    RedisAuthError,
    RedisProtocolError,
    RedisTooOldError,
    RedisUnavailableError,
)
from promptq.shared.server.connection import open_async_redis
from tests.support.servers import (
    OwnServer,
    assert_refused,
    free_port,
    make_certificates,
    tls_settings,
)


class Guarded(OwnServer):
    """A server that speaks TLS at the port `tls`, and Redis without TLS at `port`."""

    def __init__(self, folder: Path, certificate: Path | None = None) -> None:
        self.tls = free_port()
        settings = tls_settings(folder, self.tls)
        if certificate is not None:
            settings["tls-cert-file"] = str(certificate)
            settings["tls-key-file"] = str(certificate.with_suffix(".key"))
        options = [word for name, value in settings.items() for word in (f"--{name}", value)]
        super().__init__(folder / "server", *options)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    for program in ("openssl", "redis-server"):  # the embedded server speaks no TLS
        if shutil.which(program) is None:
            pytest.skip(f"{program} is not installed")
    folder = tmp_path_factory.mktemp("certificates")
    make_certificates(folder)
    return folder


@pytest.fixture(scope="module")
def guarded(folder: Path) -> Iterator[Guarded]:
    with Guarded(folder) as server:
        yield server


@pytest.mark.parametrize(
    ("options", "kind", "said"),
    [
        ("", RedisProtocolError, ["TLS", "self-signed", "?ssl_ca_certs=FILE"]),
        ("?ssl_ca_certs={folder}/client.crt", RedisProtocolError, ["certificate verify failed"]),
        ("?ssl_ca_certs={folder}/none", ConfigurationError, ["'ssl_ca_certs'", "can be read"]),
        ("?ssl_keyfile={folder}/none", ConfigurationError, ["'ssl_keyfile'", "can be read"]),
        ("?ssl_ca_certs={folder}/ca.key", RedisProtocolError, ["TLS", "no certificate"]),
        ("?ssl_ciphers=none", RedisProtocolError, ["TLS", "cipher"]),
        ("?ssl_min_version=9", ConfigurationError, ["'ssl_min_version'", "771"]),
        ("?ssl_cert_reqs=maybe", ConfigurationError, ["maybe"]),
    ],
)
async def test_tls(
    folder: Path, guarded: Guarded, options: str, kind: type[Exception], said: list[str]
) -> None:
    url = f"rediss://127.0.0.1:{guarded.tls}/0{options.format(folder=folder)}"
    await assert_refused(url, kind, *said)
    Client(f"rediss://127.0.0.1:{guarded.tls}/0?ssl_ca_certs={folder / 'ca.crt'}").close()


def make_wrong_certificate(folder: Path, name: str, days: int) -> None:
    (folder / "wrong").write_text(f"subjectAltName={name}\n")
    for command in (
        "req -newkey rsa:2048 -nodes -keyout it.key -out it.csr -subj /CN=it",
        f"x509 -req -in it.csr -signkey it.key -out it.crt -days {days} -extfile wrong",
    ):
        subprocess.run(["openssl", *command.split()], cwd=folder, check=True, capture_output=True)


@pytest.mark.parametrize(
    ("name", "days", "said"),
    [("DNS:elsewhere", 2, "use a name that the certificate has"), ("IP:127.0.0.1", -1, "renew")],
)
async def test_a_certificate_that_is_not_right(
    folder: Path, tmp_path: Path, name: str, days: int, said: str
) -> None:
    make_wrong_certificate(tmp_path, name, days)
    make_certificates(tmp_path)
    with Guarded(tmp_path, tmp_path / "it.crt") as server:
        url = f"rediss://127.0.0.1:{server.tls}/0?ssl_ca_certs={tmp_path / 'it.crt'}"
        await assert_refused(url, RedisProtocolError, "certificate", said)


async def test_tls_and_none_are_mixed_up(guarded: Guarded) -> None:
    url = f"rediss://127.0.0.1:{guarded.port}?socket_timeout=0.3&socket_connect_timeout=0.3"
    await assert_refused(
        url, RedisUnavailableError, "a server without TLS does not answer rediss://"
    )
    url = f"redis://127.0.0.1:{guarded.tls}"
    await assert_refused(url, RedisUnavailableError, "a server with TLS needs rediss://")


async def test_a_port_that_speaks_http() -> None:
    with http.server.HTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler) as served:
        threading.Thread(target=served.serve_forever, daemon=True).start()
        place = f"127.0.0.1:{served.server_port}"
        await assert_refused(f"redis://{place}", RedisProtocolError, "not as a Redis server does")
        await assert_refused(
            f"rediss://{place}", RedisProtocolError, "give redis:// instead of rediss://"
        )
        served.shutdown()


@pytest.mark.parametrize("how", ["-info", "renamed"])
async def test_without_info_it_goes_on(tmp_path: Path, how: str) -> None:
    options = ["--rename-command", "INFO", ""] if how == "renamed" else []
    with OwnServer(tmp_path, *options) as server, server.client() as by_hand:
        rules = ["on", "nopass", "~*", "&*", "+@all", *([] if options else ["-info"])]
        by_hand.execute_command("ACL", "SETUSER", "blind", *rules)
        url = f"redis://blind:any@127.0.0.1:{server.port}/0"
        with Client(url) as client:
            request_id = client.enqueue("Hi")
            assert client.stats().waiting == 1
            client.cancel(request_id)
        await (await open_async_redis(url)).aclose()


async def test_a_renamed_hello_is_no_sign_of_age_alone(tmp_path: Path) -> None:
    with OwnServer(tmp_path, "--rename-command", "HELLO", "", connect={"protocol": 2}) as server:
        for url in (server.url, f"{server.url}?protocol=3"):
            await assert_refused(url, RedisTooOldError, "or the command was renamed", "protocol=2")
        with Client(f"{server.url}?protocol=2") as client:
            client.enqueue("Hi")
            assert client.stats().waiting == 1


@pytest.mark.parametrize("login", ["worker:wrong@", "nobody:any@", "off:any@", ""])
async def test_credentials(tmp_path: Path, login: str) -> None:
    with OwnServer(tmp_path) as server, server.client() as by_hand:
        by_hand.execute_command("ACL", "SETUSER", "off", "off", "nopass")
        by_hand.execute_command("ACL", "SETUSER", "default", "resetpass", ">secret")
        said = "refused the credentials" if login else "wants a user and a password"
        await assert_refused(f"redis://{login}127.0.0.1:{server.port}/0", RedisAuthError, said)


async def test_a_server_that_is_not_there() -> None:
    url = f"redis://me:secret@127.0.0.1:{free_port()}/0"
    await assert_refused(url, RedisUnavailableError, "no Redis server answers")


@pytest.mark.parametrize("kind", ["absent", "file", "folder"])
async def test_a_unix_socket_that_is_none(tmp_path: Path, kind: str) -> None:
    place: Any = tmp_path if kind == "folder" else tmp_path / "it.sock"
    if kind == "file":
        place.write_text("")
    await assert_refused(f"unix://{place}", RedisUnavailableError, f"at unix://{place}")

"""The embedded server is its user's alone, and nobody gets what was meant for it."""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
import redis
import redis.asyncio
import redis.asyncio.retry
from redis.backoff import NoBackoff
from redis.retry import Retry

from promptq import AsyncClient, Client
from promptq.shared.errors import ConfigurationError, RedisUnavailableError
from promptq.shared.server import embedded
from promptq.shared.server.advertised import advertised, is_free
from promptq.shared.server.connection import open_async_redis, open_redis
from promptq.shared.server.embedded import EmbeddedServer
from tests.producer.playing import PROMPTQ
from tests.support import processes
from tests.support.processes import family_of, read_line, running
from tests.support.servers import free_port
from tests.support.waiting import until

NOBODY = 65534
OWNER = """
import sys
from promptq.shared.server.embedded import EmbeddedServer
server = EmbeddedServer(is_advertised=True)
print(server.url, flush=True)
sys.stdin.read()
"""
only_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can be another user")


@pytest.fixture(autouse=True)
def no_settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Without anybody's running `promptq up`, for the test and for what it starts."""
    for name in [name for name in os.environ if name.startswith("PROMPTQ_")]:
        monkeypatch.delenv(name)
    (tmp_path / "runtime").mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "runtime"))


@pytest.fixture
def killed_url() -> str:
    """The address of a server whose owner was killed before it could say so."""
    return _start_and(lambda owner, _: owner.kill())


def _start_and(end: Callable[[subprocess.Popen[str], str], object]) -> str:
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with running(sys.executable, "-c", OWNER, **pipes, text=True) as owner:
        url = read_line(owner).strip()
        assert advertised() == url
        end(owner, url)
        # The kernel closes the port of a killed process a moment before it releases the lock.
        until(lambda: is_free(_port(url)) and advertised() is None)
    return url


def _port(url: str) -> int:
    return int(url.rpartition(":")[2].partition("/")[0])


class Impostor:
    """Listens where a server was, answers everything with `+OK` and remembers what it was told.

    `connections` counts those that are over.
    """

    def __init__(self, port: int) -> None:
        self.heard = b""
        self.connections = 0
        self._listener = socket.create_server(("127.0.0.1", port))
        threading.Thread(target=self._serve, daemon=True).start()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            with connection:
                while said := connection.recv(65536):
                    self.heard += said
                    connection.sendall(b"+OK\r\n")
            self.connections += 1


def run(*args: str, **env: str) -> subprocess.CompletedProcess[str]:
    return processes.run(*PROMPTQ, *args, env={**os.environ, **env})


def test_nothing_goes_without_the_password() -> None:
    once = Retry(NoBackoff(), 0)
    commands = [
        ["PING"],
        ["SET", "key", "value"],
        ["EVAL", "return 1", "0"],
        ["CONFIG", "SET", "requirepass", "mine"],
        ["ACL", "SETUSER", "me", "on", "nopass", "+@all"],
        ["DEBUG", "SLEEP", "0"],
        ["MODULE", "LIST"],
        ["SUBSCRIBE", "promptq:{default}:events:x"],
        ["MONITOR"],
        ["SHUTDOWN"],
    ]
    with EmbeddedServer() as server:
        with redis.Redis(port=server.port, retry=once) as stranger:
            for command in commands:
                with pytest.raises(redis.AuthenticationError):
                    stranger.execute_command(*command)
        with (
            redis.Redis(port=server.port, password="guess", retry=once) as stranger,
            pytest.raises(redis.AuthenticationError),
        ):
            stranger.ping()
        with redis.Redis.from_url(server.url) as owner:
            assert owner.ping()
            assert owner.client_list()[0]["laddr"].startswith("127.0.0.1:")


def test_each_start_has_a_new_password(tmp_path: Path) -> None:
    data = tmp_path / "data"
    with EmbeddedServer(data_dir=data) as first:
        pass
    with EmbeddedServer(first.port, data) as second:
        assert second.password != first.password
        assert min(len(it.password) for it in (first, second)) >= 32
        once = Retry(NoBackoff(), 0)
        with (
            redis.Redis.from_url(first.url, retry=once) as client,
            pytest.raises(redis.AuthenticationError),
        ):
            client.ping()


def test_the_password_is_on_no_command_line_and_in_no_file_that_stays(tmp_path: Path) -> None:
    with EmbeddedServer(data_dir=tmp_path / "data", is_advertised=True) as server:
        for pid in family_of(os.getpid()):
            assert server.password not in Path(f"/proc/{pid}/cmdline").read_text()
        for file in (tmp_path / "data").rglob("*"):
            assert file.is_dir() or server.password.encode() not in file.read_bytes()


def test_what_it_writes_is_its_users_alone(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        with (
            EmbeddedServer(data_dir=tmp_path / "data", is_advertised=True) as server,
            EmbeddedServer() as temporary,
        ):
            with redis.Redis.from_url(server.url) as client:
                client.set("key", "value")
                client.save()
            with redis.Redis.from_url(temporary.url) as client:
                client.save()
                folder = Path(client.config_get("dir")["dir"])
            for where in (tmp_path / "data", tmp_path / "runtime" / "promptq", folder):
                found = {where, *where.rglob("*")}
                assert len(found) > 1
                assert {stat.S_IMODE(it.stat().st_mode) for it in found} <= {0o700, 0o600}
                assert {it.stat().st_uid for it in found} == {os.getuid()}
            names = {it.name for it in (tmp_path / "data").rglob("*")}
            assert names > {"dump.rdb", "server.log", "lock", "appendonlydir"}
    finally:
        os.umask(before)


@only_root
def test_another_user_can_read_none_of_it(tmp_path: Path) -> None:
    for folder in [tmp_path, *tmp_path.parents][:-1]:
        folder.chmod(folder.stat().st_mode | 0o055)
    with EmbeddedServer(data_dir=tmp_path / "data", is_advertised=True):
        files = [it for it in tmp_path.rglob("*") if it.is_file()]
        assert len(files) > 4
        for file in files:
            done = subprocess.run(
                ["cat", str(file)], user=NOBODY, group=NOBODY, extra_groups=[], capture_output=True
            )
            assert done.returncode != 0, file
            assert b"Permission denied" in done.stderr


def test_an_open_folder_with_data_of_an_earlier_server_is_shut(tmp_path: Path) -> None:
    data = tmp_path / "data"
    with EmbeddedServer(data_dir=data) as server, redis.Redis.from_url(server.url) as client:
        client.set("key", "value")
    data.chmod(0o755)
    for file in data.rglob("*"):
        file.chmod(0o755 if file.is_dir() else 0o644)
    with EmbeddedServer(data_dir=data) as server, redis.Redis.from_url(server.url) as client:
        assert client.get("key") == b"value"
        assert {stat.S_IMODE(it.stat().st_mode) for it in data.rglob("*")} == {0o700, 0o600}
        assert stat.S_IMODE(data.stat().st_mode) == 0o700


@pytest.mark.parametrize(("mode", "name"), [(0o770, "dump.rdb"), (0o707, ""), (0o755, "letter")])
def test_a_folder_for_others_too_is_refused_and_left_alone(
    mode: int, name: str, tmp_path: Path
) -> None:
    data = tmp_path / "data"
    data.mkdir()
    if name:
        (data / name).write_text("")
    data.chmod(mode)
    with pytest.raises(ConfigurationError, match=r"--data: .*/data is open to other users; `chmod"):
        EmbeddedServer(data_dir=data)
    assert stat.S_IMODE(data.stat().st_mode) == mode


@only_root
@pytest.mark.parametrize("owned", [".", "dump.rdb"])
def test_what_another_user_owns_is_refused(owned: str, tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir(mode=0o700)
    (data / "dump.rdb").write_text("")
    os.chown(data / owned, NOBODY, NOBODY)
    with pytest.raises(ConfigurationError, match=r"--data: .* belongs to another user; `chown` it"):
        EmbeddedServer(data_dir=data)


def test_a_stranger_on_the_port_gets_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_port()
    monkeypatch.setattr(embedded, "is_free", lambda _: True)
    with (
        closing(Impostor(port)) as impostor,
        pytest.raises(RedisUnavailableError, match="did not start"),
    ):
        EmbeddedServer(port)
    assert (impostor.connections, impostor.heard) == (0, b"")


@pytest.mark.parametrize("args", [("submit", "a secret"), ("url",)])
def test_a_command_sends_nothing_to_an_impostor(killed_url: str, args: tuple[str, ...]) -> None:
    with closing(Impostor(_port(killed_url))) as impostor:
        done = run(*args)
    assert done.returncode == 1
    assert "there is no Redis server to talk to" in done.stderr
    assert (impostor.connections, impostor.heard) == (0, b"")


def _kill_server(_: object, url: str) -> None:
    with redis.Redis.from_url(url) as client:
        os.kill(client.info("server")["process_id"], signal.SIGKILL)


def _stop(owner: subprocess.Popen[str], _: str) -> None:
    owner.terminate()


@pytest.mark.parametrize("end", [lambda owner, _: owner.kill(), _kill_server, _stop])
async def test_a_connection_that_was_lost_is_not_opened_to_an_impostor(
    end: Callable[[subprocess.Popen[str], str], object],
) -> None:
    """Nor is a new one, by whoever was told the address before."""
    made: list[redis.Redis] = []

    def connect_and_end(owner: subprocess.Popen[str], url: str) -> None:
        made.append(open_redis(url))
        end(owner, url)

    url = _start_and(connect_and_end)
    [before] = made
    with closing(Impostor(_port(url))) as impostor:
        before.set_retry(Retry(NoBackoff(), 0))
        with before, pytest.raises(redis.ConnectionError, match=r"has ended|closed|reset"):
            before.set("key", "a secret")
        with before, pytest.raises(redis.ConnectionError, match="has ended"):
            before.set("key", "a secret")
        until(lambda: impostor.connections > 0)
    assert impostor.heard == b""


async def test_nothing_is_sent_to_a_kept_address_after_its_server_has_ended() -> None:
    """However its server ended and whoever asks, with the address written in another way too."""
    with EmbeddedServer(is_advertised=True) as server:
        url = server.url
    respelled = url.replace("127.0.0.1", "localhost").replace("default", "").removesuffix("/0")
    with closing(Impostor(server.port)) as impostor:
        for address in (url, respelled + "/0?protocol=2"):
            with pytest.raises(RedisUnavailableError, match="has ended"), Client(address) as client:
                client.enqueue("a secret")
            with pytest.raises(RedisUnavailableError, match="has ended"):
                async with AsyncClient(address) as async_client:
                    await async_client.enqueue("a secret")
        for command in (("stats",), ("submit", "a secret"), ("keys", "list")):
            done = run(*command, "--redis", url)
            assert done.returncode == 1
            assert "embedded server there has ended" in done.stderr
            assert "start `promptq up`" in done.stderr
        worker = run("worker", "--model", "model-free", PROMPTQ_REDIS_URL=url)
        assert worker.returncode == 1
        assert "embedded server there has ended" in worker.stderr
    assert impostor.heard == b""


@pytest.mark.parametrize("elsewhere", ["home", "user", "machine", "container", "nowhere"])
async def test_an_address_is_not_judged_where_its_file_cannot_be_seen(
    elsewhere: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server may well live, so the password suffices."""
    runtime = tmp_path / "runtime"
    with EmbeddedServer(is_advertised=True) as server:
        if elsewhere == "home":  # with a server there, whose file can be seen
            monkeypatch.setenv("XDG_RUNTIME_DIR", "")
            monkeypatch.setenv("HOME", str(tmp_path / "home"))
            monkeypatch.delenv("XDG_STATE_HOME", raising=False)
            EmbeddedServer(is_advertised=True).stop()
        elif elsewhere == "user":
            monkeypatch.setattr(os, "getuid", lambda: NOBODY)
        elif elsewhere == "machine":
            name = os.uname_result(["Linux", "another", "", "", ""])
            monkeypatch.setattr(os, "uname", lambda: name)
        elif elsewhere == "container":  # of the same user, with the same paths
            runtime.rename(tmp_path / "outside")
            (runtime / "promptq").mkdir(mode=0o700, parents=True)
        else:
            monkeypatch.setenv("XDG_RUNTIME_DIR", "")
            monkeypatch.setenv("XDG_STATE_HOME", os.devnull)
        with Client(server.url) as client:
            assert client.stats().waiting == 0
        async with AsyncClient(server.url) as async_client:
            assert (await async_client.stats()).waiting == 0


def test_a_server_that_cannot_be_advertised_is_used_by_its_address(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", "")
    monkeypatch.setenv("XDG_STATE_HOME", os.devnull)
    with EmbeddedServer(is_advertised=True) as server:
        assert advertised() is None
        open_redis(server.url).close()


async def test_an_address_is_checked_by_whoever_connects(tmp_path: Path) -> None:
    """With both kinds of client, while the file is still there and after it was deleted."""
    with EmbeddedServer(is_advertised=True) as server:
        [file] = (tmp_path / "runtime" / "promptq").iterdir()
        kept = file.read_text()
        with open_redis(server.url) as client:
            assert client.ping()
            client.set_retry(Retry(NoBackoff(), 0))
            client.connection_pool.disconnect()
            assert client.ping()
            async_client = await open_async_redis(server.url)
            async with async_client:
                async_client.set_retry(redis.asyncio.retry.Retry(NoBackoff(), 0))
                await async_client.connection_pool.disconnect()
                assert await async_client.ping()
                file.unlink()
                for text in (None, kept):
                    if text is not None:  # again, but locked by nobody
                        file.write_text(text)
                        file.chmod(0o600)
                    client.connection_pool.disconnect()
                    await async_client.connection_pool.disconnect()
                    with pytest.raises(redis.ConnectionError, match="has ended"):
                        client.ping()
                    with pytest.raises(redis.ConnectionError, match="has ended"):
                        await async_client.ping()


@pytest.mark.parametrize("planted", ["open", "link", "pipe", "other"])
def test_a_file_that_somebody_planted_is_not_believed(planted: str, tmp_path: Path) -> None:
    with EmbeddedServer(is_advertised=True) as server:
        folder = tmp_path / "runtime" / "promptq"
        [file] = folder.iterdir()
    with EmbeddedServer() as server:
        real = tmp_path / "real"
        real.write_text(server.url)
        real.chmod(0o600)
        with real.open() as opened:
            fcntl.flock(opened, fcntl.LOCK_EX)  # as if a server held it
            if planted == "pipe":
                os.mkfifo(file, 0o600)
            elif planted == "link":
                file.symlink_to(real)
            else:
                file.hardlink_to(real)
                assert advertised() == server.url, "it is all that it must be"
                if planted == "open":
                    real.chmod(0o604)
                elif os.getuid() == 0:
                    os.chown(real, NOBODY, NOBODY)
                else:
                    pytest.skip("only root can be another user")
            assert advertised() is None


def test_promptq_url_prints_what_commands_use() -> None:
    with EmbeddedServer(is_advertised=True) as first, EmbeddedServer(is_advertised=True) as second:
        assert run("url").stdout == f"{second.url}\n"
        assert run("url", "--port", str(first.port)).stdout == f"{first.url}\n"
        assert run("url", "--password").stdout == f"{second.password}\n"
        given = run("url", PROMPTQ_REDIS_URL="redis://:a%2Fb@host:1/2").stdout
        assert given == "redis://default:a%2Fb@host:1/2\n"
        secret = run("url", "--password", "--redis", "redis://me:a%2Fb@host").stdout
        assert secret == "a/b\n"
        none = run("url", "--port", str(free_port()))
        assert none.returncode == 1
        assert none.stderr.startswith("promptq: --port: no embedded server of yours listens on ")
        none = run("url", "--password", "--redis", "redis://host")
        assert none.stderr == "promptq: the server's address has no password\n"


@pytest.mark.skipif(shutil.which("redis-cli") is None, reason="redis-cli is not installed")
def test_redis_cli_takes_the_address() -> None:
    with EmbeddedServer(is_advertised=True) as server:
        url, secret = (run(*args).stdout.strip() for args in (["url"], ["url", "--password"]))
        done = subprocess.run(["redis-cli", "-u", url, "ping"], capture_output=True, text=True)
        assert done.stdout == "PONG\n"
        by_port = ["redis-cli", "-p", str(server.port), "ping"]
        env = {**os.environ, "REDISCLI_AUTH": secret}
        done = subprocess.run(by_port, capture_output=True, text=True, env=env)
        assert (done.stdout, done.stderr) == ("PONG\n", "")
        assert "NOAUTH" in subprocess.run(by_port, capture_output=True, text=True).stdout

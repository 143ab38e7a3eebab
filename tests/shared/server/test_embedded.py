"""The embedded server lives exactly as long as its owner."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import redis

from promptq.shared.errors import ConfigurationError
from promptq.shared.server.advertised import advertised
from promptq.shared.server.embedded import EmbeddedServer
from tests.support.processes import read_line, running
from tests.support.waiting import until

OWNER = """
import sys, time
from promptq.shared.server.embedded import EmbeddedServer
server = EmbeddedServer()
print(server.url, flush=True)
time.sleep(600)
"""


def answers(url: str) -> bool:
    try:
        with redis.Redis.from_url(url) as client:
            return bool(client.ping())
    except redis.ConnectionError:
        return False


def test_runs_until_it_is_stopped_and_leaves_nothing() -> None:
    with EmbeddedServer() as server:
        assert answers(server.url)
        assert server.is_running
        with redis.Redis.from_url(server.url) as client:
            folder = Path(client.config_get("dir")["dir"])
            assert client.info("server")["valkey_version"]
    assert not answers(server.url)
    assert not server.is_running
    assert not folder.exists()
    server.stop()


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM])
def test_stops_with_its_owner_however_that_dies(end: signal.Signals) -> None:
    with running(sys.executable, "-c", OWNER, stdout=subprocess.PIPE, text=True) as owner:
        url = read_line(owner).strip()
        with redis.Redis.from_url(url) as client:
            folder = client.config_get("dir")["dir"]
        owner.send_signal(end)
        owner.wait()
        until(lambda: not Path(folder).exists())
        assert not answers(url), "the folder goes last"


def test_several_run_side_by_side() -> None:
    with EmbeddedServer() as one, EmbeddedServer() as two:
        assert one.port != two.port
        assert answers(one.url)
        assert answers(two.url)


def test_says_that_a_port_is_taken() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigurationError, match=f"port {port} .* taken"):
            EmbeddedServer(port=port)


def test_keeps_its_data_where_a_folder_is_given(tmp_path: Path) -> None:
    with (
        EmbeddedServer(data_dir=tmp_path) as server,
        redis.Redis.from_url(server.url) as client,
    ):
        client.set("kept", "yes")
    with (
        EmbeddedServer(data_dir=tmp_path) as server,
        redis.Redis.from_url(server.url) as client,
    ):
        assert client.get("kept") == b"yes"


def test_takes_a_relative_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with EmbeddedServer(data_dir=Path("./deep/data")) as server:
        assert answers(server.url)
    assert "Ready to accept" in (tmp_path / "deep" / "data" / "server.log").read_text()


def test_a_dump_of_another_server_is_restored_and_kept(tmp_path: Path) -> None:
    with EmbeddedServer(data_dir=tmp_path / "first") as server:
        with redis.Redis.from_url(server.url) as client:
            client.set("key", "value")
            client.save()
        (tmp_path / "second").mkdir()
        (tmp_path / "first" / "dump.rdb").rename(tmp_path / "second" / "dump.rdb")
    for value in (b"value", b"later"):
        with (
            EmbeddedServer(data_dir=tmp_path / "second") as server,
            redis.Redis.from_url(server.url) as client,
        ):
            assert client.get("key") == value
            client.set("key", "later")


def test_a_folder_belongs_to_one_server_at_a_time(tmp_path: Path) -> None:
    with (
        EmbeddedServer(data_dir=tmp_path),
        pytest.raises(ConfigurationError, match=r"another server keeps its data in"),
    ):
        EmbeddedServer(data_dir=tmp_path)
    EmbeddedServer(data_dir=tmp_path).stop()


def test_says_that_a_folder_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigurationError, match=r"--data: cannot write to .*file"):
        EmbeddedServer(data_dir=tmp_path / "file")


def test_later_commands_of_the_same_user_find_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert advertised() is None
    with EmbeddedServer(), EmbeddedServer(is_advertised=True) as server:
        assert advertised() == server.url
        assert advertised(server.port) == server.url
        assert advertised(1) is None
    assert advertised() is None
    assert not list((tmp_path / "promptq").iterdir())


def test_of_several_servers_the_latest_that_runs_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    with EmbeddedServer(is_advertised=True) as first:
        with EmbeddedServer(is_advertised=True) as second:
            assert advertised() == second.url
            assert advertised(first.port) == first.url
        assert advertised() == first.url


def test_a_runtime_folder_that_is_not_there_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "nowhere"))
    monkeypatch.setenv("HOME", str(tmp_path))
    with EmbeddedServer(is_advertised=True) as server:
        assert advertised() == server.url
        monkeypatch.setenv("HOME", str(tmp_path / "somebody-else"))
        assert advertised() is None, "another home, another user's"


@pytest.mark.parametrize("mode", [0o770, 0o707])
def test_a_folder_that_others_may_write_to_is_not_believed(
    mode: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    with EmbeddedServer(is_advertised=True) as server:
        (tmp_path / "promptq").chmod(mode)
        assert advertised() is None
        with EmbeddedServer(is_advertised=True):
            assert len(list((tmp_path / "promptq").iterdir())) == 1, "nothing is written there"
        (tmp_path / "promptq").chmod(0o700)
        assert advertised() == server.url

"""Each command of each role on each kind of key, held against the table in docs/security.md."""

from __future__ import annotations

import itertools
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

from promptq import Client
from promptq.shared.errors import RedisAuthError
from promptq.shared.protocol.keys import Keys
from promptq.shared.server.acl import FAMILIES, ROLES, user_rules
from tests.producer.playing import KEYS, Run
from tests.support.model_free import text_of
from tests.support.paths import ROOT
from tests.support.processes import started
from tests.support.roles import ACL_FILE, as_role, password_of
from tests.support.servers import PROGRAMS, OwnServer, in_database

DOCS = ROOT / "docs" / "security.md"
FAULTY = "tests.faults.worker.faulty_worker"

ARGUMENTS: dict[str, tuple[str, ...]] = {
    "blmove": ("KEY", "KEY", "LEFT", "RIGHT", "no time"),
    "evalsha": ("0" * 40, "1", "KEY"),
    "expire": ("KEY", "1000"),
    "get": ("KEY",),
    "hdel": ("KEY", "f"),
    "hexists": ("KEY", "f"),
    "hget": ("KEY", "f"),
    "hincrby": ("KEY", "f", "1"),
    "hincrbyfloat": ("KEY", "f", "1"),
    "hmget": ("KEY", "f"),
    "hrandfield": ("KEY", "1"),
    "hset": ("KEY", "f", "1"),
    "hsetnx": ("KEY", "f", "1"),
    "hstrlen": ("KEY", "f"),
    "lmove": ("KEY", "KEY", "LEFT", "RIGHT"),
    "lpush": ("KEY", "1"),
    "lrange": ("KEY", "0", "1"),
    "lrem": ("KEY", "1", "1"),
    "ltrim": ("KEY", "0", "1"),
    "pexpire": ("KEY", "100000"),
    "rpush": ("KEY", "1"),
    "sadd": ("KEY", "1"),
    "set": ("KEY", "1"),
    "srandmember": ("KEY", "1"),
    "srem": ("KEY", "1"),
    "xadd": ("KEY", "*", "f", "1"),
    "xrange": ("KEY", "-", "+"),
    "xread": ("STREAMS", "KEY", "0"),
    "xrevrange": ("KEY", "+", "-"),
    "zadd": ("KEY", "1", "1"),
    "zcount": ("KEY", "0", "1"),
    "zintercard": ("1", "KEY"),
    "zmscore": ("KEY", "1"),
    "zrange": ("KEY", "0", "1"),
    "zrangebyscore": ("KEY", "0", "1"),
    "zrank": ("KEY", "1"),
    "zrem": ("KEY", "1"),
    "zremrangebyscore": ("KEY", "0", "1"),
    "zscore": ("KEY", "1"),
}
"""Of commands about a key; of those that are not here, the key alone."""

CHANNEL_COMMANDS = {
    "publish": "publish",
    "spublish": "publish",
    "subscribe": "subscribe",
    "ssubscribe": "subscribe",
}
OF_NO_KEY = {
    *("info", "time", "cluster|slots", "multi", "exec", "discard", "unwatch", "scan", "dbsize"),
    *("script|load", "unsubscribe", "sunsubscribe", "select", "hello", "ping"),
    *("auth", "quit", "reset", "client|getname", "client|id", "client|setinfo", "client|setname"),
    *CHANNEL_COMMANDS,
}

WRITES_BY_NATURE = {
    *("blmove", "del", "evalsha", "expire", "hdel", "hincrby", "hincrbyfloat", "hset", "hsetnx"),
    *("lmove", "lpush", "lrem", "ltrim", "persist", "pexpire", "rpush", "sadd", "set"),
    *("srem", "xadd", "zadd", "zrem", "zremrangebyscore"),
}

OTHERS = {
    "keys of another queue": ("promptq:{other}:config", "promptq:{other}:request:1"),
    "`promptq:queues` (belongs to no queue)": ("promptq:queues",),
    "`promptq:aliases` (belongs to no queue)": ("promptq:aliases",),
    "[RQ](jobs.md)'s keys for the queue": (
        *("rq:queue:promptq-default-upkeep", "rq:job:promptq-default-upkeep-reap"),
        *("rq:worker:promptq-1", "rq:finished:promptq-default-upkeep", "rq:workers", "rq:queues"),
    ),
    "RQ's keys for other software": ("rq:queue:default", "rq:job:other", "rq:worker:1", "rq:wip:x"),
    "all other keys": ("session:1", "promptq", "promptq:default:pending"),
}
"""Keys that are not the queue's, by their rows in the docs."""

DATABASES = (KEYS, Keys("default", 1), Keys("default", 15))

CHANNELS = {
    "`control`": tuple(keys.control for keys in DATABASES),
    "`drain`": tuple(keys.drain for keys in DATABASES),
    "`events:*`": tuple(keys.events("sample") for keys in DATABASES),
    "all other channels": (
        *(Keys("other", keys.database).control for keys in DATABASES),
        *("promptq:{default}:0:drain", "promptq:{default}:x:drain", "promptq:{default}:x:events:1"),
    ),
}
"""The names in several databases."""

READ, WRITE = "read", "write"
"""Cells of the table. `write` includes reading."""


@pytest.fixture(scope="module", params=PROGRAMS)
def lasting_server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[OwnServer]:
    admin = {"username": "admin", "password": password_of("admin")}
    folder = tmp_path_factory.mktemp("server") / "own"
    options = ("--aclfile", str(ACL_FILE))
    with OwnServer(folder, *options, connect=admin, kind=request.param) as server:
        yield server


@pytest.fixture
def server(lasting_server: OwnServer) -> OwnServer:
    """An empty one, with the users of deploy/redis.acl."""
    with lasting_server.client() as admin:
        admin.flushall()
    return lasting_server


def table(heading: str) -> dict[str, dict[str, str]]:
    """The table of the docs below this heading: what stands in a row, by the role of its column."""
    _, _, rest = DOCS.read_text().partition(f"\n### {heading}\n")
    lines = [line for line in rest.partition("\n#")[0].splitlines() if line.startswith("|")]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    names = rows[0][1:]
    return {row[0]: dict(zip(names, row[1:], strict=True)) for row in rows[2:]}


def may(client: Any, *command: str) -> bool:
    try:
        client.execute_command(*command)
    except redis.exceptions.NoPermissionError:
        return False
    except redis.exceptions.ResponseError:  # it was let in, and is of another type, or no script
        return True
    return True


def commands_of(role: str) -> list[str]:
    rules = ROLES[role].rules("default")
    return [it[1:] for it in rules if it.startswith("+") and not it.startswith("+@")]


def keys_of(row: str) -> tuple[str, ...]:
    if row in OTHERS:
        return OTHERS[row]
    names = re.findall(r"`([^`]+)`", row)
    return tuple(KEYS.prefix + name.replace("*", "sample") for name in names)


def test_the_docs_have_each_kind_of_key_and_each_role() -> None:
    told = table("Keys")
    names = {f"`{name}`" for patterns in FAMILIES.values() for name in patterns}
    of_queues = told.keys() - OTHERS.keys()
    assert {it for row in of_queues for it in re.findall(r"`[^`]+`", row)} == names
    assert told.keys() >= OTHERS.keys()
    assert table("Channels").keys() == CHANNELS.keys()
    for cells in (*told.values(), *table("Channels").values()):
        assert cells.keys() == ROLES.keys()


@pytest.mark.parametrize("role", ROLES)
def test_each_command_of_a_role_reaches_the_keys_that_the_docs_say(
    server: OwnServer, role: str
) -> None:
    wrong = []
    commands = [it for it in commands_of(role) if it not in OF_NO_KEY]
    with redis.Redis.from_url(as_role(role, server.url)) as client:
        for row, cells in table("Keys").items():
            assert cells[role] in ("", READ, WRITE)
            for key, command in itertools.product(keys_of(row), commands):
                is_write = command in WRITES_BY_NATURE
                expected = cells[role] == WRITE or (cells[role] == READ and not is_write)
                arguments = [key if it == "KEY" else it for it in ARGUMENTS.get(command, ("KEY",))]
                if may(client, command, *arguments) != expected:
                    wrong.append(f"{command} {key}: the docs say {cells[role]!r}")
    assert not wrong


@pytest.mark.parametrize("role", ROLES)
def test_each_role_hears_and_speaks_on_the_channels_that_the_docs_say(
    server: OwnServer, role: str
) -> None:
    wrong = []
    for row, cells in table("Channels").items():
        for channel, (command, word) in itertools.product(CHANNELS[row], CHANNEL_COMMANDS.items()):
            arguments = (channel, *(("x",) if word == "publish" else ()))
            # In RESP3 the answer to SUBSCRIBE would come beside the answers to commands.
            with redis.Redis.from_url(as_role(role, server.url), protocol=2) as client:
                expected = word in cells[role].split(", ") and command in commands_of(role)
                if may(client, command, *arguments) != expected:
                    wrong.append(f"{command} {channel}: the docs say {cells[role]!r}")
    assert not wrong


def test_a_role_reaches_every_database_unless_valkey_holds_it_to_one(embedded_url: str) -> None:
    urls = [in_database(as_role("", embedded_url), db).replace("//", "//kept:p@") for db in (0, 1)]
    with redis.Redis.from_url(embedded_url) as admin:
        try:
            for rules, reached in ((), [True, True]), (("resetdbs", "db=1"), [False, True]):
                made = user_rules("producer", "default", "p")
                admin.execute_command("ACL", "SETUSER", "kept", *made, *rules)
                for url, is_reached in zip(urls, reached, strict=True):
                    with redis.Redis.from_url(url) as client:
                        assert may(client, "HGET", KEYS.request("a"), "payload") is is_reached
        finally:
            admin.acl_deluser("kept")


@pytest.mark.parametrize("role", ROLES)
def test_no_role_may_touch_the_server_itself(server: OwnServer, role: str) -> None:
    refused = (
        *("flushall", "flushdb", "config|get|*", "eval|return 1|0", "keys|*"),
        *("monitor", "module|list", "shutdown|nosave", "replicaof|no|one", "save", "bgsave"),
        *("script|kill", "script|flush", "function|list", "migrate|h|1|k|0|1", "acl|list"),
        *("acl|setuser|x", "client|list", "client|kill|1.1.1.1:1", "restore|k|0|x", "sort|k"),
        *("copy|a|b", "rename|a|b", "object|encoding|k", "swapdb|0|1", "slowlog|get"),
        *("client|tracking|on", "client|pause|1", "client|caching|yes"),
        *("client|unblock|1", "client|no-evict|on"),
    )
    with redis.Redis.from_url(as_role(role, server.url)) as client:
        assert [it for it in refused if may(client, *it.split("|"))] == []


def test_the_file_that_is_shipped_is_what_the_command_prints(run: Run) -> None:
    """But for the passwords, which are new each time."""

    def without_passwords(text: str) -> str:
        return re.sub(r" >\S+", " >***", text)

    printed = [run("acl", url="").stdout for _ in range(2)]
    assert without_passwords(printed[0]) == without_passwords(ACL_FILE.read_text())
    assert printed[0] != printed[1]
    assert min(map(len, re.findall(r" >(\S+)", printed[0]))) >= 24
    assert "~promptq:{*}:pending " in run("acl", "*", url="").stdout
    for names, error in ((["a:b"], ""), (["*", "gold"], "'*' is all queues; give it alone")):
        refused = run("acl", *names, url="")
        assert (refused.returncode, refused.stdout) == (1, "")
        assert refused.stderr.startswith(f"promptq: queue: {error}")


def test_the_example_of_the_docs_makes_urls_of_the_file(run: Run, tmp_path: Path) -> None:
    docs = DOCS.read_text()
    (function,) = re.findall(r"^url_of\(\) .*$", docs, re.MULTILINE)
    file = tmp_path / "users.acl"
    file.write_text(run("acl", "default", "gold", url="").stdout)
    admin = {
        "username": "admin",
        "password": re.findall(r"^user admin .*?>(\S+)", file.read_text(), re.MULTILINE)[0],
    }
    with OwnServer(tmp_path / "server", "--aclfile", str(file), connect=admin) as server:
        for user in ("admin", "operator", "worker", "worker-gold"):
            done = subprocess.run(
                ["bash", "-c", f"{function}\nurl_of {user}"],
                cwd=tmp_path,
                capture_output=True,
                text=True,
            )
            url = done.stdout.strip().replace(":6379/", f":{server.port}/")
            with redis.Redis.from_url(url) as client:
                assert client.execute_command("PING"), user


def test_a_wrong_role_is_named_and_the_right_one_too(server: OwnServer, run: Run) -> None:
    """Be it refused a command by itself, in a script, or what a whole process does."""
    url = as_role("producer", server.url)
    done = run("keys", "create", "x", url=url)
    assert "the user 'producer' may not do this (docs/operations.md, Access, says" in done.stderr
    for role in ("producer", "subscriber"):
        done = run("worker", "--model", "model-free", url=as_role(role, server.url))
        assert done.returncode == 1
        assert f"the user '{role}' may not do what a worker does" in done.stderr
        assert "give it the URL of the user 'worker' (promptq acl)" in done.stderr


def test_a_server_starts_with_users_of_several_queues(run: Run, tmp_path: Path) -> None:
    """Also where a queue is named twice, of which the server would not take two users."""
    file = tmp_path / "users.acl"
    file.write_text(run("acl", "default", "gold", "default", url="").stdout)
    passwords = dict(re.findall(r"^user (\S+) .*?>(\S+)", file.read_text(), re.MULTILINE))
    assert {"admin", "worker", "worker-gold"} < set(passwords)
    admin = {"username": "admin", "password": passwords["admin"]}
    with (
        OwnServer(tmp_path / "server", "--aclfile", str(file), connect=admin) as server,
        server.client() as client,
    ):
        assert set(client.acl_users()) == {"default", *passwords}


def test_a_producer_ends_no_worker_and_an_operator_does(server: OwnServer, tmp_path: Path) -> None:
    with (
        started(tmp_path, as_role("worker", server.url), module=FAULTY) as worker,
        Client(as_role("producer", server.url)) as producer,
        Client(as_role("operator", server.url)) as operator,
    ):
        with redis.Redis.from_url(as_role("producer", server.url)) as forging:
            for message in ("drain", "drain:x"):
                assert forging.publish(KEYS.control, message) == 1
        with pytest.raises(RedisAuthError):
            producer.drain()
        with pytest.raises(RedisAuthError):
            producer.pause()
        assert producer.generate("a", seed=1, max_tokens=20).text == text_of(1, 20)
        assert worker.process.poll() is None
        assert len(operator.drain()) == 1
        assert worker.wait() == 0


def test_a_subscriber_streams_what_runs_and_sees_no_prompt(
    server: OwnServer, tmp_path: Path
) -> None:
    with (
        Client(as_role("producer", server.url)) as producer,
        Client(as_role("subscriber", server.url)) as subscriber,
    ):
        request_id = producer.enqueue("my secret", seed=3, max_tokens=50)
        stream = subscriber.stream(request_id)
        with pytest.raises(RedisAuthError):
            subscriber.state(request_id)
        with started(tmp_path, as_role("worker", server.url), module=FAULTY):
            assert "".join(event.text for event in stream) == text_of(3, 50)
        again = "".join(event.text for event in subscriber.stream(request_id))
        assert again == text_of(3, 50), "as long as its log is kept"

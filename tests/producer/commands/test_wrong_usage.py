"""Commands name an error in one sentence, and print help."""

from __future__ import annotations

import inspect
import json
import re
from typing import Any

import pytest
from typer.core import TyperGroup
from typer.main import get_command
from typer.testing import CliRunner

from promptq import Client
from promptq.producer.admin.api_keys import ApiKey
from promptq.producer.commands.app import app
from promptq.shared.errors import ConfigurationError
from promptq.shared.server.embedded import EmbeddedServer
from tests.producer.playing import Run, old_server
from tests.support.roles import as_role
from tests.support.servers import free_port


def test_stats(run: Run) -> None:
    """Counts, for people and for programs."""
    run("submit", "--detach", "Hi")
    found = json.loads(run("stats", "--json").stdout)
    assert (found["waiting"], found["active"], found["workers"]) == (1, 0, [])
    table = run("stats").stdout
    assert "waiting" in table
    assert re.search(r"\nNo worker is alive \(.*\); start one with `promptq worker`\.\n", table)
    table = " ".join(run("stats", "--queue", "another").stdout.split())
    assert "start one with `promptq worker --queue another`." in table
    long = "q" * 60
    run("pause", "--queue", long)
    assert run("stats", "--queue", long).stdout.startswith(f"queue {long}, paused\n")


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["submit", "Hi", "--temperature", "9"], "temperature: .*less than or equal to 2.* 9.0"),
        (["submit", "Hi", "--param", "nonsense=1"], "nonsense: is not a field of a request"),
        (["submit", "Hi", "--param", "stop=x"], "stop: 'x' is not JSON"),
        (["submit", "Hi", "--param", "stop"], "--param: 'stop' is not FIELD=JSON"),
        (["submit", "Hi", "--param", 'prompt="Ho"'], "--param prompt: another option or argument"),
        (["submit", "Hi", "--param", "messages=[]"], "--param messages: another option or arg"),
        (["submit", "--chat", "--param", "messages=[]"], "--param messages: another option or"),
        (["submit", "--system", "Be", "--param", "prompt=[1]"], "--param prompt: another option"),
        (["submit", "Hi", "--seed", "1", "--param", "seed=2"], "--param seed: another option or"),
        (["submit", "Hi", "--param", "top_k=1", "--param", "top_k=2"], "--param top_k: another"),
        (["submit", "Hi", "--param", 'request_id="a"'], "--param request_id: another option or"),
        (["fork", "one", "--at", "1", "--param", "at=2"], "--param at: another option or arg"),
        (["fork", "one", "--seed", "1", "--param", "seed=2"], "--param seed: another option or"),
        (["embed", "Hi", "--param", 'prompt="Ho"'], "--param prompt: another option or argument"),
        (["embed", "Hi", "--param", 'pooling="last"'], "--param pooling: another option or arg"),
        (["drain", "--worker", "nobody"], "no worker 'nobody' is alive; these are: none"),
        (["submit", "Hi", "--id", "two words"], "id: 'two words' is not"),
        (["submit", "Hi", "--id", ""], "id: '' is not 1 to 200 printable"),
        (["url", "--redis", "redis://localhost/prod"], "the database 'prod' is not a number"),
        (["gateway", "--queue", "no such"], "queue: 'no such' is not"),
        (["up", "--queue", "no such"], "queue: 'no such' is not"),
        (["supervise", "--", "no-such-program"], "-- no-such-program: there is no such program"),
        (["batch", "run", "/", "-o", "out"], "/ is not a file"),
        (["batch", "run", "nothing", "-o", "out"], "nothing does not exist"),
        (["submit", "Hi", "--queue", "no such"], "queue: 'no such' is not"),
        (["watch", "nobody"], "no request 'nobody' is known"),
        (["cancel", "nobody"], "no request 'nobody' is known.* in the queue 'default'"),
        (["reprioritise", "nobody", "--priority", "1"], "no request 'nobody' is known"),
        (["stats", "--redis", "nowhere"], "'nowhere' is not a Redis URL"),
    ],
)
def test_what_is_wrong_is_said_in_one_sentence(run: Run, args: list[str], said: str) -> None:
    """Exit code 1, one line on standard error, nothing on standard output."""
    done = run(*args)
    assert (done.returncode, done.stdout) == (1, "")
    assert re.fullmatch(f"promptq: .*{said}.*\n", done.stderr)


def test_wrong_usage(run: Run) -> None:
    """Exit code 2, with a hint."""
    done = run("submit", "--nonsense")
    assert done.returncode == 2
    assert "--nonsense" in done.stderr
    assert run("nonsense").returncode == 2
    done = run("worker", "--model", "model-free", "stray")
    assert done.returncode == 2
    assert "unexpected extra argument (stray)" in done.stderr


@pytest.mark.parametrize(
    "args",
    [
        ["keys", "create", "a", "--requests-per-minute", str(2**53 + 1)],
        ["keys", "create", "a", "--tokens-per-minute", "9" * 400],
        ["keys", "create", "a", "--weight", "nan"],
        ["scaling", "--target", "nan"],
        ["scaling", "--target", "inf"],
        ["dead", "list", "--limit", str(2**63)],
        ["url", "--wait", "nan"],
    ],
)
def test_a_number_that_no_command_can_use_is_wrong_usage(run: Run, args: list[str]) -> None:
    done = run(*args)
    assert (done.returncode, done.stdout) == (2, "")
    assert args[-2] in done.stderr
    assert "Traceback" not in done.stderr


def test_a_key_of_a_client_has_no_limit_that_scripts_cannot_count(redis_url: str) -> None:
    with Client(redis_url) as client, pytest.raises(ConfigurationError, match="is above"):
        client.create_api_key(ApiKey(name="a", tokens_per_minute=2**53 + 1))


def test_what_stands_behind_two_dashes_is_for_the_workers_server(run: Run) -> None:
    """The argument reaches the worker, which says here that it starts no server."""
    done = run("worker", "--model", "model-free", "--", "--swap-space", "0")
    assert done.returncode == 1
    assert "-- ARGUMENTS: belongs to an inference server" in done.stderr


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("", "there is no Redis server.*promptq up.*"),
        ("redis://:secret@127.0.0.1:{port}/0", "no Redis server answers at .*"),
    ],
)
def test_no_server(run: Run, url: str, said: str) -> None:
    """One sentence says how to get a server, or where none is. It does not show the password."""
    done = run("stats", url=url.format(port=free_port()))
    assert done.returncode == 1
    assert re.fullmatch(f"promptq: {said}\n", done.stderr)
    assert "secret" not in done.stderr


def test_wrong_credentials(run: Run) -> None:
    """Told apart from a server that is not there."""
    with EmbeddedServer() as server:
        for url, said in (
            (as_role("", server.url), "wants a user and a password, but the address has none"),
            (as_role("", server.url) + "?protocol=2", "but the address has none"),
            (server.url.replace(server.password, "wrong"), "refused the credentials"),
        ):
            done = run("stats", url=url)
            assert done.returncode == 1
            assert re.fullmatch(f"promptq: .*{said}.*\n", done.stderr)
            assert "wrong@" not in done.stderr


def test_a_server_too_old(run: Run) -> None:
    """Its version is named."""
    with old_server("6.2.14") as url:
        done = run("stats", url=url)
    assert done.returncode == 1
    assert re.fullmatch(r"promptq: .*Redis 6\.2\.14; promptq needs Redis 7.*\n", done.stderr)


@pytest.mark.parametrize(
    "command",
    [
        *("up", "worker", "gateway", "server", "submit", "watch", "cancel", "stats", "pause"),
        *("resume", "drain", "reprioritise", "dead list", "dead show", "dead requeue"),
        "dead purge",
    ],
)
def test_help_shows_examples(run: Run, command: str) -> None:
    """Each command's help has an example to paste."""
    shown = run(*command.split(), "--help").stdout
    assert re.search(rf"Examples:\s+promptq {command}", shown)


def commands_by_words() -> dict[tuple[str, ...], Any]:
    """Returns all commands by their words, such as `("dead", "list")`."""
    commands: dict[tuple[str, ...], Any] = {}
    groups: list[tuple[tuple[str, ...], Any]] = [((), get_command(app))]
    for words, group in groups:
        for name in group.list_commands(None):
            command = group.get_command(None, name)
            if isinstance(command, TyperGroup):
                groups.append(((*words, name), command))
            else:
                commands[(*words, name)] = command
    assert len(commands) > 30
    return commands


def test_help_is_not_broken_twice() -> None:
    """Lines after the first paragraph are shown as they are, so they fit a terminal."""
    for words, command in commands_by_words().items():
        _, *paragraphs = (inspect.getdoc(command.callback) or "").split("\n\n")
        lines = [line for paragraph in paragraphs for line in paragraph.splitlines()]
        assert all(len(line) <= 78 for line in lines), words


def test_help_fits_a_terminal() -> None:
    """At 80 columns, nothing is cut off, and no option shows a type of Python's."""
    for words in commands_by_words():
        if words != ("worker",):  # which prints its help by itself
            shown = CliRunner().invoke(app, [*words, "--help"], env={"COLUMNS": "80"}).output
            assert "Show this message and exit." in " ".join(shown.replace("│", "").split())
            assert "…" not in shown, words
            assert "list[" not in shown.partition("─ Options")[2], words


@pytest.mark.parametrize(
    ("command", "number"),
    [
        *(("server --port", "70000"), ("up --port", "70000"), ("up --redis-port", "0")),
        *(("gateway --port", "99999"), ("gateway --port", "-1"), ("url --port", "70000")),
        *(("submit Hi --priority", "1001"), ("embed Hi --priority", "-1001")),
        *(("reprioritise one --priority", "1001"), ("fork one --priority", "1001")),
    ],
)
def test_a_number_outside_its_range(run: Run, command: str, number: str) -> None:
    done = run(*command.split(), number, url="")
    assert done.returncode == 2
    assert f"Invalid value for '{command.split()[-1]}'" in done.stderr
    assert "Traceback" not in done.stderr

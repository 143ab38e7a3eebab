"""A process reads its own settings, and `promptq settings` lists those of all processes."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Callable
from functools import partial
from inspect import get_annotations

import pytest

from promptq.producer.settings.files import FilesSettings
from promptq.producer.settings.gateway import GatewaySettings
from promptq.producer.settings.jobs import JobsSettings
from promptq.shared.errors import ConfigurationError
from promptq.shared.settings.common import (
    ReaperSettings,
    Settings,
    read_settings,
    read_settings_of,
)
from promptq.shared.settings.worker import WorkerSettings, read_worker_settings
from promptq.worker.command import command
from tests.producer.playing import Run

CLASSES = (
    *(Settings, ReaperSettings, WorkerSettings),
    *(FilesSettings, GatewaySettings, JobsSettings),
)
NAMES = [name for kind in CLASSES for name in get_annotations(kind)]
HEADINGS = [
    *("Common to all processes:", "Worker, jobs:", "Worker:"),
    *("Gateway, jobs:", "Gateway:", "Jobs:"),
]


def test_each_setting_is_in_one_class() -> None:
    """Before another one is added, look for one that becomes unnecessary."""
    counts = {kind: len(kind.model_fields) for kind in CLASSES}
    assert counts == {
        Settings: 5,
        ReaperSettings: 5 + 4,
        WorkerSettings: 5 + 4 + 43,
        FilesSettings: 5 + 1,
        GatewaySettings: 5 + 1 + 20,
        JobsSettings: 5 + 4 + 1 + 11,
    }
    assert len(NAMES) == len({*NAMES}) == 84


@pytest.mark.parametrize(
    "read",
    [
        read_settings,
        read_worker_settings,
        partial(read_settings_of, FilesSettings),
        partial(read_settings_of, GatewaySettings),
        partial(read_settings_of, JobsSettings),
    ],
)
def test_a_process_ignores_settings_of_others(
    read: Callable[[], Settings], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A setting that no process has is ignored, too."""
    before = read()
    for name in {*NAMES, "max_num_seks"} - type(before).model_fields.keys():
        monkeypatch.setenv(f"PROMPTQ_{name.upper()}", "nonsense")
    assert read() == before


@pytest.mark.parametrize("kind", [WorkerSettings, GatewaySettings, JobsSettings])
def test_a_wrong_setting_stops_the_process_that_reads_it(
    kind: type[Settings], monkeypatch: pytest.MonkeyPatch
) -> None:
    readers = {
        WorkerSettings: (read_worker_settings, "max_num_seqs", r"--max-num-seqs"),
        GatewaySettings: (partial(read_settings_of, GatewaySettings), "http_port", "http_port"),
        JobsSettings: (partial(read_settings_of, JobsSettings), "batch_workers", "batch_workers"),
    }
    read, name, shown = readers[kind]
    variable = f"PROMPTQ_{name.upper()}"
    monkeypatch.setenv(variable, "nonsense")
    with pytest.raises(ConfigurationError, match=rf"^{shown} \({variable}\): .*'nonsense'$"):
        read()


OF_WORKERS_AND_JOBS = {
    f"PROMPTQ_{name.upper()}": "soon" for name in get_annotations(ReaperSettings)
}


def test_a_wrong_setting_of_workers_stops_only_workers(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A gateway gets as far as its port, jobs as far as their server."""
    monkeypatch.setenv("PROMPTQ_DTYPE", "wrong")
    said = r"--dtype \(PROMPTQ_DTYPE\): Input should be 'auto', .*, got 'wrong'"
    with pytest.raises(ConfigurationError, match=f"^{said}$"):
        command().main(["--model", "model-free"], standalone_mode=False)
    assert re.fullmatch(f"promptq: {said}\n", run("up", PROMPTQ_DTYPE="wrong").stderr)
    assert run("stats", PROMPTQ_DTYPE="wrong", **OF_WORKERS_AND_JOBS).returncode == 0
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        reached = {
            ("gateway", "--port", port): f"promptq: cannot listen on 127.0.0.1:{port}",
            ("up", "--workers", "0", "--port", port): f"promptq: --port: {port} on 127.0.0.1",
            ("jobs",): "promptq: no Redis server answers at unix:///nowhere",
        }
        for args, told in reached.items():
            env = {"PROMPTQ_JOBS_REDIS_URL": "unix:///nowhere", "PROMPTQ_DTYPE": "wrong"}
            if args != ("jobs",):
                env |= OF_WORKERS_AND_JOBS
            assert run(*args, **env).stderr.startswith(told)


def test_a_wrong_common_setting(run: Run) -> None:
    """The variable is named."""
    done = run("stats", PROMPTQ_LOG_LEVEL="loud")
    assert done.returncode == 1
    assert "PROMPTQ_LOG_LEVEL" in done.stderr
    assert "Traceback" not in done.stderr


def test_all_settings_are_listed_by_process(run: Run) -> None:
    """Each one has its value, default and meaning; no secret is shown."""
    env = {
        "PROMPTQ_MAX_NUM_SEQS": "7",
        "PROMPTQ_REDIS_URL": "redis://me:hush@host:1/0",
        "PROMPTQ_JOBS_REDIS_URL": "redis://me:hush@host:2/0",
        "PROMPTQ_OTLP_ENDPOINT": "http://me:hush@host:4318",
        "PROMPTQ_UPSTREAM": "http://me:hush@host:8000",
        "PROMPTQ_UPSTREAM_KEY": "hush",
        "PROMPTQ_WEBHOOK_MASTER_SECRET": "whsec_hush",
        "PROMPTQ_WEBHOOK_SECRET": "whsec_hush",
    }
    listed = run("settings", "--json", **env).stdout
    rows = {row["variable"]: row for row in json.loads(listed)}
    assert [*rows] == [f"PROMPTQ_{name.upper()}" for name in NAMES]
    slots = rows["PROMPTQ_MAX_NUM_SEQS"]
    assert (slots["value"], slots["default"], slots["option"]) == (7, 64, "--max-num-seqs")
    assert rows["PROMPTQ_REDIS_URL"]["value"] == "redis://me:***@host:1/0"
    assert rows["PROMPTQ_JOBS_REDIS_URL"]["value"] == "redis://me:***@host:2/0"
    assert rows["PROMPTQ_UPSTREAM_KEY"]["value"] == "***"
    processes = {
        "QUEUE": None,
        **dict.fromkeys(("LEASE_MS", "REDIS_WAIT"), "worker, jobs"),
        **dict.fromkeys(("MODEL", "DTYPE"), "worker"),
        "FILES_DIR": "gateway, jobs",
        "HTTP_PORT": "gateway",
        "BATCH_WORKERS": "jobs",
    }
    assert {name: rows[f"PROMPTQ_{name}"]["process"] for name in processes} == processes
    for width in (80, 120):
        shown = run("settings", COLUMNS=str(width), **env).stdout
        lines = shown.splitlines()
        assert [line for line in lines if re.match("[A-Z][a-z]", line)] == HEADINGS
        assert [line.split()[0] for line in lines if line.startswith("PROMPTQ_")] == [*rows]
        assert "hush" not in listed + shown
        assert "PROMPTQ_MAX_NUM_SEQS  7  (default 64)\n" in shown
        assert "PROMPTQ_LEASE_MS  10000\n" in shown
        assert "PROMPTQ_TRUST_REMOTE_CODE  false\n" in shown
        assert "PROMPTQ_ENGINE_ARGUMENTS  []\n" in shown
        assert max(map(len, lines)) <= width
        words = " ".join(shown.split())
        assert all(row["description"] in words for row in rows.values()), "no word is broken"

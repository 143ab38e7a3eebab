"""The systemd units, read by systemd itself, and held against the commands that they start.

`python -m tests.deploy.test_units UNIT COMMAND` runs a command within a unit's system calls. All
else that a unit forbids needs systemd, which does not run where tests do.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import os
import re
import shutil
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from promptq import Client
from promptq.shared.settings.worker import WorkerSettings
from tests.producer.playing import PROMPTQ
from tests.support.paths import ROOT
from tests.support.processes import running
from tests.support.roles import as_role
from tests.support.servers import embedded_server, free_port

UNITS = sorted((ROOT / "deploy" / "systemd").glob("*.service"))


def settings(unit: Path, name: str) -> list[str]:
    """The values of all lines with this name."""
    return re.findall(rf"^{name}=(.*)$", unit.read_text(), re.MULTILINE)


_ALLOW, _ERROR = 0x7FFF0000, 0x00050000
_PR_SET_MDWE, _REFUSE_EXECUTABLE = 65, 1


def calls_of(group: str) -> set[str]:
    """The system calls of a group's name, such as @system-service, as systemd lists them."""
    if not group.startswith("@"):
        return {group}
    listed = subprocess.run(
        ["systemd-analyze", "syscall-filter", group], capture_output=True, text=True, check=True
    )
    [_, *lines] = (line.strip() for line in listed.stdout.splitlines())
    return {call for line in lines if line and line[0] != "#" for call in calls_of(line)}


def allowed_calls(unit: Path) -> set[str]:
    allowed: set[str] = set()
    for group in settings(unit, "SystemCallFilter"):
        if group.startswith("~"):
            allowed -= calls_of(group[1:])
        else:
            allowed |= calls_of(group)
    return allowed


def confine(unit: Path) -> None:
    """Hold this process and what it starts to the unit's calls; the others fail with EPERM."""
    assert settings(unit, "SystemCallErrorNumber") == ["EPERM"]
    seccomp = ctypes.CDLL("libseccomp.so.2")
    seccomp.seccomp_init.restype = ctypes.c_void_p
    rules = ctypes.c_void_p(seccomp.seccomp_init(ctypes.c_uint32(_ERROR | errno.EPERM)))
    for call in sorted(allowed_calls(unit)):
        number = seccomp.seccomp_syscall_resolve_name(call.encode())
        if number != -1:  # a newer systemd may list calls that an older library does not know
            seccomp.seccomp_rule_add(rules, ctypes.c_uint32(_ALLOW), number, 0)
    assert seccomp.seccomp_load(rules) == 0
    if settings(unit, "MemoryDenyWriteExecute") == ["yes"]:
        ctypes.CDLL(None).prctl(_PR_SET_MDWE, _REFUSE_EXECUTABLE, 0, 0, 0)  # since Linux 6.3


PROGRAM = "/opt/promptq/bin/promptq"


def setting(unit: Path, name: str) -> str:
    [value] = settings(unit, name)
    return value


def needs_systemd() -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed")


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
def test_systemd_has_nothing_to_say_of_a_unit(unit: Path, tmp_path: Path) -> None:
    needs_systemd()
    # It looks whether there is such a program.
    text = unit.read_text().replace(PROGRAM, "/bin/true")
    copy = tmp_path / unit.name.replace("@", "@1")
    copy.write_text(text)
    read = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", copy], capture_output=True, text=True, check=False
    )
    assert (read.stderr, read.returncode) == ("", 0)


def test_each_process_has_a_unit() -> None:
    started = {setting(unit, "ExecStart").split()[1] for unit in UNITS}
    assert started == {"worker", "gateway", "jobs"}


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
def test_a_unit_waits_for_longer_than_its_process_takes_to_drain(unit: Path) -> None:
    drain = WorkerSettings.model_fields["drain_seconds"].default
    assert float(setting(unit, "TimeoutStopSec")) > drain
    assert setting(unit, "KillMode") == "mixed"  # the main process alone hears SIGTERM


def test_a_worker_is_watched() -> None:
    [worker] = [unit for unit in UNITS if "worker" in unit.name]
    assert setting(worker, "Type") == "notify"
    # Less, and systemd would kill a worker that its own watchdog still lets compute.
    stuck = WorkerSettings.model_fields["stuck_seconds"].default
    assert float(setting(worker, "WatchdogSec")) > stuck


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
def test_a_unit_may_do_little(unit: Path) -> None:
    needs_systemd()
    # The threshold is in tenths.
    analyse = ("systemd-analyze", "security", "--offline=true", "--no-pager", "--threshold=19")
    done = subprocess.run([*analyse, unit], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    assert "Overall exposure level" in done.stdout


def test_processes_work_within_the_system_calls_of_their_units(tmp_path: Path) -> None:
    """A worker with a real model, a gateway and jobs; only real processes have such a filter."""
    needs_systemd()
    port = free_port()
    options = {"gateway": ("--port", str(port))}
    environment = {**os.environ, "PROMPTQ_FILES_DIR": str(tmp_path)}
    with embedded_server() as server, contextlib.ExitStack() as stack:
        lines = {}
        for unit in UNITS:
            name = setting(unit, "ExecStart").split()[1]
            process = stack.enter_context(
                running(
                    *(sys.executable, "-m", "tests.deploy.test_units", unit),
                    *(*PROMPTQ, name, *options.get(name, ())),
                    cwd=ROOT,
                    env={**environment, "PROMPTQ_REDIS_URL": as_role(name, server)},
                    stdout=subprocess.PIPE,
                    text=True,
                )
            )
            lines[name] = process.stdout
        first = {name: lines[name].readline() for name in ("worker", "jobs", "gateway")}
        assert first["worker"].startswith("ready after")
        assert first["jobs"].startswith("ready")
        with Client(as_role("producer", server)) as client:
            text = client.generate("Once upon a time", max_tokens=20, temperature=0).text
        body = {"prompt": "Once upon a time", "max_tokens": 20, "temperature": 0}
        request = urllib.request.Request(
            f"http://127.0.0.1:{port}/v1/completions", json.dumps(body).encode()
        )
        with urllib.request.urlopen(request) as reply:
            assert json.load(reply)["choices"][0]["text"] == text


if __name__ == "__main__":
    confine(Path(sys.argv[1]))
    os.execvp(sys.argv[2], sys.argv[2:])  # noqa: S606

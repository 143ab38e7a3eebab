"""compose.yaml, read by Docker's own compose."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from promptq.shared.runtime.settings import Settings
from tests.paths import ROOT

FOLDER = ROOT / "deploy" / "compose"


def compose(folder: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [str(Path(sys.executable).parent / "docker-compose"), *arguments]
    environment = {"PATH": os.environ["PATH"], "HOME": str(folder), **variables}
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False
    )


def read(folder: Path) -> dict[str, Any]:
    """The services as compose understands them, with the example's settings and a password."""
    shutil.copytree(FOLDER, folder, dirs_exist_ok=True)
    example = (FOLDER / "env.example").read_text()
    (folder / ".env").write_text(example.replace("REDIS_PASSWORD=", "REDIS_PASSWORD=secret"))
    told = compose(folder, "--profile", "monitoring", "config", "--format", "json")
    assert (told.stderr, told.returncode) == ("", 0)
    found: dict[str, Any] = json.loads(told.stdout)["services"]
    return found


def test_compose_has_nothing_to_say_of_it(tmp_path: Path) -> None:
    services = read(tmp_path)
    quiet = compose(tmp_path, "config", "-q")
    assert (quiet.stdout, quiet.stderr, quiet.returncode) == ("", "", 0)
    assert services.keys() == {*("server", "worker", "gateway", "jobs"), "prometheus", "grafana"}


def test_it_starts_only_with_a_password(tmp_path: Path) -> None:
    shutil.copytree(FOLDER, tmp_path, dirs_exist_ok=True)
    told = compose(tmp_path, "config", "-q")
    assert told.returncode != 0
    assert "set REDIS_PASSWORD in .env" in told.stderr


def test_our_services_may_do_little_and_have_time_to_drain(tmp_path: Path) -> None:
    services = read(tmp_path)
    drain = Settings.model_fields["drain_seconds"].default
    for name in ("worker", "gateway", "jobs"):
        service = services[name]
        assert service["read_only"]
        assert service["cap_drop"] == ["ALL"]
        assert service["security_opt"] == ["no-new-privileges:true"]
        assert service["environment"]["PROMPTQ_REDIS_URL"] == "redis://:secret@server:6379/0"
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

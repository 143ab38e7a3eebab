"""A program that only enqueues imports little."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import import_module

import pytest

from promptq.producer import admin

SHOW = """
import json, sys
sys.modules["opentelemetry"] = None  # which redis-py would load, where it is installed
before = set(sys.modules)
exec(sys.argv[1])
print(json.dumps(sorted(set(sys.modules) - before)))
"""
ALLOWED = {
    *("annotated_types", "hiredis", "promptq", "pydantic", "pydantic_core", "redis"),
    *("typing_extensions", "typing_inspection"),
    *(() if sys.version_info >= (3, 11, 3) else ("async_timeout",)),  # redis-py needs it there
}


def loaded(program: str) -> list[str]:
    """The modules that a program loads, but for those of Python itself."""
    command = [sys.executable, "-P", "-c", SHOW, program]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    names: list[str] = json.loads(said)
    return [name for name in names if not _is_of_python(name.partition(".")[0])]


def _is_of_python(package: str) -> bool:
    return package in sys.stdlib_module_names or package.startswith("_sysconfigdata")


@pytest.mark.parametrize("name", ["Client", "AsyncClient"])
def test_a_client_loads_no_more_than_it_needs(name: str) -> None:
    found = loaded(f"from promptq import {name}")
    assert {module.partition(".")[0] for module in found} == ALLOWED
    ours = {".".join(module.split(".")[1:3]) for module in found if module.startswith("promptq.")}
    assert ours == {
        *("producer", "producer.admin", "producer.clients"),
        *("shared", "shared.errors", "shared.protocol", "shared.queue", "shared.runtime"),
        "shared.server",
    }
    of_admin = [module for module in found if module.startswith("promptq.producer.admin.")]
    assert of_admin == ["promptq.producer.admin.autoscaling_defaults"]


def test_a_batch_needs_no_extra() -> None:
    packages = {module.partition(".")[0] for module in loaded("from promptq import run_batch")}
    assert packages <= ALLOWED | {"dotenv", "pydantic_settings"}


def test_the_package_alone_loads_nothing() -> None:
    assert loaded("import promptq") == ["promptq"]
    assert loaded("import promptq; promptq.__version__; dir(promptq)") == ["promptq"]


def test_a_name_that_it_has_not_is_an_error() -> None:
    with pytest.raises(subprocess.CalledProcessError) as failed:
        loaded("from promptq import Cleint")
    assert failed.value.returncode == 1


def test_a_package_that_an_admin_module_lacks_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "promptq.producer.admin.queue_stats"
    monkeypatch.setattr(admin, "queue_stats", import_module(name))  # restores it at the end
    monkeypatch.delattr(admin, "queue_stats")
    monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "pydantic", None)
    with pytest.raises(ModuleNotFoundError, match="pydantic"):
        _ = admin.queue_stats
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = admin.nothing

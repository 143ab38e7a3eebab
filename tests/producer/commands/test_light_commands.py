"""A command loads no more than it needs, so that it starts fast."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

RUN = """
import json, os, runpy, sys
os.execv = lambda *_: sys.exit()  # here `promptq worker` becomes another program
module, sys.argv = sys.argv[1], ["promptq", *sys.argv[2:]]
try:
    runpy.run_module(module, run_name="__main__")
except SystemExit:
    pass
print()
print(json.dumps(sorted(sys.modules)))
"""
CLI, WORKER = "promptq.producer.cli", "promptq.worker"
FLEET = "promptq.producer.commands.local_fleet"
CALL_READER = "promptq.producer.apis.call_reader_process"
HTTP = {"fastapi", "starlette", "uvicorn", "promptq.producer.http"}
OTHERS = {  # of other commands, or of none
    "opentelemetry.sdk.metrics",
    *("aiohttp", "fastapi", "httpx", "jinja2", "numpy", "prometheus_client", "rq"),
    *("structlog", "tokenizers", "torch", "transformers", "uvicorn"),
    *("promptq.producer.gateway.server", "promptq.producer.commands.local_fleet.autoscaler"),
    *(f"promptq.producer.admin.{it}" for it in ("autoscaling", "queue_views", "timeline")),
}
HEAVY = {"fastapi", "httpx", "numpy", "rq", "torch", "transformers"}
BEYOND_WORKERS = OTHERS - {"jinja2", "numpy", "prometheus_client", "structlog"}


@pytest.mark.matrix(6)
@pytest.mark.parametrize(
    ("module", "arguments", "needed", "unneeded"),
    [
        (CLI, ["--version"], {"typer"}, {*OTHERS, "pydantic_settings", "redis"}),
        (CLI, ["stats", "--redis", "unix:///nowhere"], {"redis"}, {*OTHERS, "rich"}),
        (CLI, ["cancel", "x", "--redis", "unix:///nowhere"], {"redis"}, {*OTHERS, "rich"}),
        (CLI, ["keys", "list", "--redis", "unix:///nowhere"], {"redis"}, OTHERS),
        (
            CLI,
            ["batch", "run", "/nowhere", "-o", "/nowhere.out"],
            {"promptq.producer.apis.completions.write", "promptq.producer.calls.queues"},
            HTTP,
        ),
        (CALL_READER, ["info", "text"], {"promptq.producer.apis.responses.read"}, HTTP),
        (CLI, ["worker"], {"typer"}, {*OTHERS, "pydantic_settings", "redis"}),
        (CLI, ["--help"], {"promptq.producer.gateway.server"}, HEAVY),
        (CLI, ["submit", "--help"], {"typer"}, HEAVY),
        *(
            (f"promptq.producer.commands.local_fleet.{module}", [], set(), HEAVY)
            for module in ("demo", "up")
        ),
        (
            WORKER,
            ["--model", "model-free", "--redis", "unix:///nowhere"],
            {"numpy"},
            BEYOND_WORKERS,
        ),
    ],
)
def test_what_a_command_loads(
    module: str, arguments: list[str], needed: set[str], unneeded: set[str]
) -> None:
    loaded = loaded_by(module, *arguments)
    assert needed <= loaded
    assert not unneeded & loaded


def test_statistics_in_json_need_no_tables(redis_url: str) -> None:
    as_json = loaded_by(CLI, "stats", "--json", "--redis", redis_url)
    assert not {*OTHERS, "rich"} & as_json
    shown = loaded_by(CLI, "stats", "--redis", redis_url)
    assert not {*OTHERS, "rich.markdown"} & shown
    assert "rich.table" in shown


def loaded_by(module: str, *arguments: str) -> set[str]:
    """The modules that are loaded once the module has run with these arguments."""
    said = subprocess.run(
        [sys.executable, "-P", "-c", RUN, module, *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,  # the reader of calls prints nothing else to its output
        text=True,
        check=True,
    ).stdout
    return set(json.loads(said.splitlines()[-1]))

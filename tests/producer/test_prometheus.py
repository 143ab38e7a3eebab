"""The real Prometheus scrapes a worker and a gateway, and the board has something to show."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest
import redis
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from promptq import Client
from promptq.shared.protocol.keys import Keys
from tests.producer.playing import Start
from tests.support.paths import expressions
from tests.support.processes import running
from tests.support.roles import as_role
from tests.support.servers import free_port

CONFIG = """
global: {{scrape_interval: 250ms, scrape_timeout: 250ms}}
scrape_configs:
  - job_name: promptq
    static_configs: [{{targets: [{targets}]}}]
"""
BACKLOG = {"prompt": "Once", "max_tokens": 1000, "priority": 9}
VARIABLES = {"$model_name": ".*", "$__rate_interval": "1m"}

pytestmark = pytest.mark.skipif(
    shutil.which("prometheus") is None, reason="prometheus is not installed"
)


@contextmanager
def prometheus(folder: Path, *urls: str) -> Iterator[str]:
    """The address of one that scrapes these."""
    targets = ", ".join(url.removeprefix("http://").removesuffix("/metrics") for url in urls)
    (folder / "prometheus.yml").write_text(CONFIG.format(targets=targets))
    address = f"127.0.0.1:{free_port()}"
    command = ["prometheus", f"--config.file={folder}/prometheus.yml"]
    command += [f"--storage.tsdb.path={folder}/data", f"--web.listen-address={address}"]
    with (folder / "log").open("w") as log, running(*command, stderr=log):
        yield f"http://{address}"


def values(http: httpx2.Client, expression: str) -> list[float]:
    """Returns the present value of each series; none while Prometheus is not ready."""
    try:
        answer = http.get("/api/v1/query", params={"query": expression})
    except httpx2.ConnectError:
        return []
    if answer.status_code == 503:
        return []
    answer.raise_for_status()
    return [float(series["value"][1]) for series in answer.json()["data"]["result"]]


def has_data(found: list[float]) -> bool:
    return any(value == value for value in found)  # one that is no NaN


@pytest.mark.long
def test_prometheus_scrapes_what_the_board_shows(
    start: Start, redis_url: str, tmp_path: Path
) -> None:
    """Some of it is known only once requests have waited for some seconds."""
    worker = start("worker", "--model", "model-free", "--max-num-seqs", "2", "--metrics-port", "0")
    gateway = start("gateway", "--port", "0")
    assert worker.stdout is not None
    assert gateway.stdout is not None
    urls = [re.findall(r"http://\S+/metrics", worker.stdout.readline())[0]]
    api = re.findall(r"ready at (http://[\d.:]+)", gateway.stdout.readline())[0]
    urls.append(f"{api}/metrics")
    asked = expressions()
    for name, value in VARIABLES.items():
        asked = [expression.replace(name, value) for expression in asked]
    assert len(asked) > 50
    assert not [expression for expression in asked if "$" in expression]
    with (
        prometheus(tmp_path, *urls) as address,
        httpx2.Client(base_url=address, timeout=None) as watcher,
        httpx2.Client(base_url=api, timeout=None) as http,
        Client(as_role("producer", redis_url)) as backlog,
        redis.Redis.from_url(as_role("operator", redis_url)) as operator,
    ):
        operator.hset(Keys("default").config, "affinity_ms", 10)
        prompt = {"prompt": "Once upon a time", "max_tokens": 20, "priority": 3, "session": "one"}
        without = asked
        while without:
            if backlog.stats().waiting < 100:
                backlog.enqueue_many([BACKLOG] * 500)
            http.post("/v1/completions", json=prompt).raise_for_status()
            without = [it for it in without if not has_data(values(watcher, it))]
        names = watcher.get("/api/v1/label/__name__/values").json()["data"]
        types: dict[str, Any] = watcher.get("/api/v1/metadata").json()["data"]
        for url in urls:
            check_exposition(httpx2.get(url, headers={"accept": OPENMETRICS}, timeout=None).text)
            check_with_promtool(httpx2.get(url, timeout=None).text)
    ours = [name for name in names if name.startswith("promptq")]
    assert len(ours) > 70
    assert not [name for name in ours if ":" in name]
    untyped = [name for name, told in types.items() if told[0]["type"] == "unknown"]
    assert not [name for name in untyped if name.startswith("promptq")]


OPENMETRICS = "application/openmetrics-text; version=1.0.0"


def check_exposition(text: str) -> None:
    """OpenMetrics' parser must read the text: no name clashes, and each has its type."""
    families = list(text_string_to_metric_families(text))
    assert [it for it in families if it.name.startswith("promptq_")]
    assert not [it.name for it in families if it.type == "unknown"]


def check_with_promtool(text: str) -> None:
    told = subprocess.run(
        ["promtool", "check", "metrics"], input=text, capture_output=True, text=True, check=False
    )
    assert (told.returncode, told.stdout, told.stderr) == (0, "", "")

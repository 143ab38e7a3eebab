"""rq-dashboard with -j beside the jobs of the gateway, after a batch has run."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import time
import urllib.error
import urllib.request
import uuid
from typing import Any

import trying
from trying import attempt, same

BATCH_FIELDS: Any = {"endpoint": "/v1/completions", "completion_window": "24h"}


def upload(line: Any) -> str:
    mark = uuid.uuid4().hex
    form = (
        f'--{mark}\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
        f'--{mark}\r\nContent-Disposition: form-data; name="file"; filename="in.jsonl"\r\n\r\n'
        f"{json.dumps(line)}\r\n--{mark}--\r\n"
    )
    request = urllib.request.Request(
        f"{os.environ['COMPAT_GATEWAY']}/v1/files",
        form.encode(),
        {
            "Authorization": f"Bearer {trying.KEY}",
            "Content-Type": f"multipart/form-data; boundary={mark}",
        },
    )
    with urllib.request.urlopen(request) as answer:
        return str(json.load(answer)["id"])


body = {"model": trying.MODEL, "prompt": trying.PROMPT, "max_tokens": 4}
line = {"custom_id": "1", "method": "POST", "url": "/v1/completions", "body": body}
batch = trying.plain("/v1/batches", {"input_file_id": upload(line), **BATCH_FIELDS})
while batch["status"] not in ("completed", "failed"):
    time.sleep(0.2)
    batch = trying.plain(f"/v1/batches/{batch['id']}")

with socket.socket() as probe:
    probe.bind(("127.0.0.1", 0))
    port = probe.getsockname()[1]
address = ["-b", "127.0.0.1", "-p", str(port), "-u", os.environ["COMPAT_REDIS"], "-j"]
dashboard = subprocess.Popen(["rq-dashboard", *address])


def page(path: str) -> str:
    for _ in range(100):
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}") as answer:
                return str(answer.read().decode())
        except urllib.error.HTTPError:
            raise
        except OSError:
            time.sleep(0.1)
    raise AssertionError("it does not answer")


def read(path: str) -> Any:
    return json.loads(page(path))


@attempt("pages of queues, workers and jobs")
def _() -> str:
    for path in ("/", "/0/view/queues", "/0/view/workers", "/0/view/jobs"):
        assert "<html" in page(path), path
    return "pages"


@attempt("the queues of the jobs")
def _() -> str:
    names = [it["name"] for it in read("/0/data/queues.json")["queues"]]
    assert any("batches" in name for name in names), names
    return str(names)


@attempt("the workers of the jobs")
def _() -> str:
    workers = read("/0/data/workers.json")["workers"]
    assert workers
    return f"{len(workers)} workers"


@attempt("a finished batch and its page")
def _() -> str:
    same("batch", batch["status"], "completed")
    seen = []
    for queue in read("/0/data/queues.json")["queues"]:
        for registry in ("queued", "started", "finished", "failed", "deferred", "scheduled"):
            path = f"/0/data/jobs/{queue['name']}/{registry}/100/desc/1.json"
            for job in read(path)["jobs"]:
                shown = read(f"/0/data/job/{job['id']}.json")
                seen.append((registry, shown.get("description") or shown.get("status")))
    assert seen, "no job in any registry"
    return str(seen)


dashboard.terminate()
dashboard.wait()

"""aiperf (NVIDIA): measures chats, completions, responses and embeddings."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import trying
from trying import attempt, same

NUM_REQUESTS = 6
os.environ.pop("HF_HUB_OFFLINE", None)  # with it, it takes a folder for a name on the hub


def profile(kind: str, *options: str) -> Any:
    folder = Path(os.environ["HOME"], f"aiperf-{kind}-{len(options)}")
    command = ["aiperf", "profile", "--model", trying.MODEL, "--url", trying.ROOT_URL]
    command += ["--endpoint-type", kind, "--tokenizer", os.environ["COMPAT_MODEL_FOLDER"]]
    command += ["--api-key", trying.KEY, "--request-count", str(NUM_REQUESTS), "--concurrency", "2"]
    command += ["--synthetic-input-tokens-mean", "30"]
    if kind != "embeddings":
        command += ["--output-tokens-mean", "12"]
    command += ["--artifact-dir", str(folder), "--ui-type", "none", *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=150)
    said = (done.stdout + done.stderr).strip()
    print(said)
    found = list(folder.rglob("profile_export_aiperf.json"))
    errors = [line.partition(" ")[2] for line in said.splitlines() if " ERROR " in line]
    assert found, (errors or [said[-400:]])[0]
    told = json.loads(found[0].read_text())
    same("requests that went well", told["request_count"]["avg"], NUM_REQUESTS)
    return told


@attempt("streamed chats: time to the first token, and between tokens")
def _() -> str:
    told = profile("chat", "--streaming")
    for name in ("time_to_first_token", "inter_token_latency", "output_token_throughput"):
        assert told[name]["avg"] > 0, name
    return "measured"


@attempt("chats that are not streamed")
def _() -> str:
    assert profile("chat")["request_latency"]["avg"] > 0
    return "measured"


@attempt("streamed completions")
def _() -> str:
    assert profile("completions", "--streaming")["time_to_first_token"]["avg"] > 0
    return "measured"


@attempt("streamed responses")
def _() -> str:
    assert profile("responses", "--streaming")["time_to_first_token"]["avg"] > 0
    return "measured"


@attempt("embeddings")
def _() -> str:
    assert profile("embeddings")["request_latency"]["avg"] > 0
    return "measured"

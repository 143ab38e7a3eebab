"""guidellm: measures chats, completions, responses and embeddings."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import trying
from trying import attempt, same

NUM_REQUESTS = 6
OUTPUT_TOKENS = 12


def benchmark(path: str, *, validates: bool = False) -> Any:
    """Measure `path`. Returns the figures of successful requests. With `validates`, guidellm checks
    the server's health first."""
    report = Path(os.environ["HOME"], f"{path.replace('/', '-')}.json")
    backend = f"kind=openai_http,target={trying.ROOT_URL},model={trying.MODEL}"
    options = {
        "backend": f"{backend},api_key={trying.KEY},request_format={path},"
        f"validate_backend={str(validates).lower()}",
        "profile": "kind=synchronous",
        "constraint": f"kind=max_requests,count={NUM_REQUESTS}",
        "tokenizer": f"kind=hf_auto,model={os.environ['COMPAT_MODEL_FOLDER']}",
        "data": f"kind=synthetic_text,prompt_tokens=30,output_tokens={OUTPUT_TOKENS}",
        "output": f"kind=json,path={report}",
    }
    command = ["guidellm", "run", "--disable-console"]
    for name, value in options.items():
        command += [f"--{name}", value]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=150)
    said = (done.stdout + done.stderr).strip()
    print(said)
    assert report.exists(), said.splitlines()[-1]
    [told] = json.loads(report.read_text())["benchmarks"]
    metrics = told["metrics"]
    same("requests that went well", metrics["request_totals"]["successful"], NUM_REQUESTS)
    return metrics


@attempt("it asks /health first, as it does by default")
def _() -> str:
    assert benchmark("/v1/completions", validates=True)
    return "measured"


def try_path(path: str) -> None:
    @attempt(path)
    def _() -> str:
        """Also checks that each answer has the requested number of tokens: guidellm sends
        ignore_eos."""
        metrics = benchmark(path)
        assert metrics["time_to_first_token_ms"]["successful"]["mean"] > 0
        same("tokens", metrics["output_token_count"]["successful"]["mean"], OUTPUT_TOKENS)
        return "measured"


for each in ("/v1/chat/completions", "/v1/completions", "/v1/responses"):
    try_path(each)


@attempt("/v1/embeddings")
def _() -> str:
    assert benchmark("/v1/embeddings")["request_latency"]["successful"]["mean"] > 0
    return "measured"

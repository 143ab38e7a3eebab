"""Compares lm-eval's scores through the gateway with its scores by transformers.

lm-eval (https://github.com/EleutherAI/lm-evaluation-harness) scores texts by the log-probabilities
of prompts. Its backend `local-completions` requests the log-probabilities from the gateway. Its
backend `hf` computes them with transformers. Both backends use the shipped model in fp32. All
scores must agree. lm-eval runs in a separate environment, and calls only the gateway.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

from promptq.worker.shipped import MODEL_DIR
from tests.producer.gateway.living import live_gateway
from tests.support.paths import ROOT
from tests.support.processes import started
from tests.support.roles import as_role
from tests.support.servers import embedded_server

LM_EVAL = "lm_eval[api]==0.4.13"
TASKS = Path(__file__).parent / "tasks"
MOST_APART = 1e-3
MAX_LENGTH = 256
"""Shorter than a text of the tasks, which is then scored in several windows."""

_OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}

Scores = dict[tuple[str, int], list[list[float]]]
"""By the name of a task and the number of its item: for each text the log-likelihood and, if it is
known, 1 if greedy choice generates the text, else 0."""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests scoring", description=__doc__)
    parser.add_argument(
        "--python", type=Path, help="interpreter of an environment that has lm-eval already"
    )
    python = parser.parse_args().python or build(ROOT / ".cache" / "lm-eval")
    with tempfile.TemporaryDirectory(prefix="promptq-scoring-") as name:
        folder = Path(name)
        model = f"pretrained={MODEL_DIR},dtype=float32,max_length={MAX_LENGTH}"
        expected = measured(python, folder / "hf", "hf", model, "--device", "cpu")
        with embedded_server() as default:
            url = as_role("producer", default)
            with started(folder, url, "--dtype", "float32"), live_gateway(url) as gateway:
                found = measured(
                    python,
                    folder / "gateway",
                    "local-completions",
                    f"base_url={gateway.base_url}/completions,model=promptq-stories"
                    f",tokenizer={MODEL_DIR},tokenizer_backend=huggingface"
                    # Its windows are two tokens shorter than this.
                    f",num_concurrent=4,max_length={MAX_LENGTH + 2}",
                )
    compare(expected, found)


def build(folder: Path) -> Path:
    """Returns the interpreter of an environment with lm-eval. The environment is kept for the next
    run."""
    python, mark = folder / "bin/python", folder / "built"
    if not mark.exists():
        install = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
        subprocess.run([*install, f"torch=={version('torch').partition('+')[0]}"], check=True)
        others = [f"{name}=={version(name)}" for name in ("transformers", "tokenizers")]
        subprocess.run([*install, LM_EVAL, "accelerate", *others], check=True)
        mark.touch()
    return python


def measured(python: Path, folder: Path, backend: str, arguments: str, *options: str) -> Scores:
    """Run lm-eval with one backend. Returns the results of all tasks."""
    folder.mkdir()
    tasks = sorted(path.stem for path in TASKS.glob("*.yaml"))
    command = [python, "-m", "lm_eval", "run", "--model", backend, "--model_args", arguments]
    command += ["--tasks", ",".join(tasks), "--include_path", TASKS, "--batch_size", "2"]
    command += ["--log_samples", "--output_path", folder, *options]
    environment = {**_OFFLINE, "HOME": str(folder), "PATH": os.environ["PATH"]}
    said = subprocess.run(
        command, cwd=TASKS, env=environment, capture_output=True, text=True, check=False
    )
    if said.returncode:
        sys.exit(f"lm-eval with {backend} ended with {said.returncode}:\n{said.stderr[-4000:]}")
    print(backend, said.stdout, sep="\n")
    scores: Scores = {}
    for task in tasks:
        [path] = folder.rglob(f"samples_{task}_*.jsonl")
        for line in path.read_text().splitlines():
            item = json.loads(line)
            scores[task, item["doc_id"]] = [_numbers(it[0]) for it in item["resps"]]
    return scores


def _numbers(told: Any) -> list[float]:
    """Returns the numbers of one answer: a log-likelihood, perhaps with whether it is greedy."""
    return [
        float(it == "True") if it in ("True", "False") else float(it)
        for it in (told if isinstance(told, list) else [told])
    ]


def compare(expected: Scores, found: Scores) -> None:
    """Print the largest difference of each task. Exits with status 1 if a difference is too
    large."""
    if expected.keys() != found.keys():
        sys.exit(f"other items: {sorted(expected)} and {sorted(found)}")
    largest: dict[str, float] = {}
    num_texts: dict[str, int] = {}
    for (task, number), theirs in expected.items():
        for a, b in zip(theirs, found[task, number], strict=True):
            apart = max(abs(x - y) for x, y in zip(a, b, strict=True))
            largest[task] = max(largest.get(task, 0.0), apart)
            num_texts[task] = num_texts.get(task, 0) + 1
    for task, apart in largest.items():
        print(f"{task}: {num_texts[task]} texts, log-likelihoods at most {apart:.2g} apart")
    if max(largest.values()) > MOST_APART:
        sys.exit(f"some are more than {MOST_APART} apart")


if __name__ == "__main__":
    main()

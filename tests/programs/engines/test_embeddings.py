"""Real servers that were started for pooling give the vectors of transformers through a queue."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModel, AutoTokenizer

from promptq import Client
from promptq.worker.shipped import MODEL_DIR
from tests.programs.engines.real_servers import real_server, why_missing
from tests.support.processes import started
from tests.support.roles import as_role

TEXTS = ("Once upon a time", "The old king", "One day a fox")


ARGUMENTS = {
    "vllm": ("--runner", "pooling", "--convert", "embed", "--enforce-eager"),
    "llama.cpp": ("--embeddings", "--pooling", "last"),
}


@pytest.mark.parametrize(
    ("engine", "name"), [("vllm", "vllm"), ("openai", "vllm"), ("llama.cpp", "llama.cpp")]
)
def test_vectors_are_those_of_transformers(
    redis_url: str, tmp_path: Path, engine: str, name: str
) -> None:
    if why := why_missing(name):
        pytest.skip(why)
    model = AutoModel.from_pretrained(MODEL_DIR, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(MODEL_DIR)
    with real_server(name, tmp_path / "server", arguments=ARGUMENTS[name]) as server:
        options = ("--engine", engine, "--upstream", server.url, "--model", str(MODEL_DIR))
        with (
            started(tmp_path, redis_url, *options),
            Client(as_role("operator", redis_url)) as client,
        ):
            for normalize in (True,) if engine == "openai" else (True, False):
                found = client.embed([*TEXTS], normalize=normalize).vectors
                for text, vector in zip(TEXTS, found, strict=True):
                    states = model(tokenizer(text, return_tensors="pt").input_ids)[0]
                    wanted = states[0, -1]
                    if normalize:
                        wanted = wanted / wanted.norm()
                    assert vector == pytest.approx(wanted.tolist(), rel=1e-3, abs=1e-4)

"""Real servers that were started for pooling return the vectors and the scores of transformers
through a queue."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from transformers import AutoModel, AutoModelForSequenceClassification, AutoTokenizer

from promptq import Client
from promptq.shared.errors import RequestFailedError
from promptq.worker.shipped import MODEL_DIR
from tests.programs.engines.real_servers import real_server, why_missing
from tests.support.processes import started
from tests.support.roles import as_role

QUERY = "Once upon a time"
TEXTS = (QUERY, "The old king", "One day a fox")
DOCUMENTS = ("The old king", "One day a fox", "In a quiet village")
ARGUMENTS = {
    "vllm": ("--runner", "pooling", "--convert", "embed", "--enforce-eager"),
    "llama.cpp": ("--embeddings", "--pooling", "last"),
}


@contextmanager
def client_before(
    name: str, arguments: Sequence[str], engine: str, model: Path, folder: Path, redis_url: str
) -> Iterator[Client]:
    """Run a server, and a worker that forwards to it. Yields a client of the worker's queue."""
    with real_server(name, folder / "server", model=model, arguments=arguments) as server:
        options = ("--engine", engine, "--upstream", server.url, "--model", str(model))
        with started(folder, redis_url, *options), Client(as_role("operator", redis_url)) as client:
            yield client


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
    with client_before(name, ARGUMENTS[name], engine, MODEL_DIR, tmp_path, redis_url) as client:
        for normalize in (True,) if engine == "openai" else (True, False):
            found = client.embed([*TEXTS], normalize=normalize).vectors
            for text, vector in zip(TEXTS, found, strict=True):
                states = model(tokenizer(text, return_tensors="pt").input_ids)[0]
                wanted = states[0, -1]
                if normalize:
                    wanted = wanted / wanted.norm()
                assert vector == pytest.approx(wanted.tolist(), rel=1e-3, abs=1e-4)


def test_a_text_above_the_ubatch_size_of_llama_cpp_is_refused(
    redis_url: str, tmp_path: Path
) -> None:
    """llama.cpp must compute the mean over all tokens in one step, and answers a longer text with
    status 500."""
    if why := why_missing(name := "llama.cpp"):
        pytest.skip(why)
    arguments = ("--embeddings", "--pooling", "mean")
    with client_before(name, arguments, name, MODEL_DIR, tmp_path, redis_url) as client:
        with pytest.raises(RequestFailedError, match=r"--ubatch-size .*input \(600 tokens\)"):
            client.embed([[5] * 600])
        assert len(client.embed([[5] * 512]).vectors) == 1


def test_scores_are_those_of_transformers(redis_url: str, tmp_path: Path) -> None:
    if why := why_missing(name := "llama.cpp"):
        pytest.skip(why)
    torch.manual_seed(1)
    model = AutoModelForSequenceClassification.from_pretrained(
        MODEL_DIR, num_labels=2, pad_token_id=0, dtype=torch.float32
    ).eval()
    tokenizer = AutoTokenizer.from_pretrained(MODEL_DIR)
    folder = tmp_path / "scorer"
    for part in (model, tokenizer):
        part.save_pretrained(folder)
    with client_before(name, ("--reranking",), name, folder, tmp_path, redis_url) as client:
        scores = client.rerank(QUERY, DOCUMENTS)
    texts = [f"{QUERY} {document}" for document in DOCUMENTS]
    tokens = [tokenizer(text, add_special_tokens=False, return_tensors="pt") for text in texts]
    wanted = [model(each.input_ids).logits.softmax(-1)[0, 0].item() for each in tokens]
    assert scores == pytest.approx(wanted, rel=1e-3)
    assert len({round(score, 4) for score in scores}) == len(scores)

"""A real llama.cpp that was started for reranking gives the scores of transformers through a
queue."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from promptq import Client
from promptq.worker.shipped import MODEL_DIR
from tests.programs.engines.real_servers import real_server, why_missing
from tests.support.processes import started
from tests.support.roles import as_role

QUERY, DOCUMENTS = "Once upon a time", ("The old king", "One day a fox", "In a quiet village")


def test_scores_are_those_of_transformers(redis_url: str, tmp_path: Path) -> None:
    if why := why_missing("llama.cpp"):
        pytest.skip(why)
    torch.manual_seed(1)
    model = AutoModelForSequenceClassification.from_pretrained(
        MODEL_DIR, num_labels=2, pad_token_id=0, dtype=torch.float32
    ).eval()
    tokenizer = AutoTokenizer.from_pretrained(MODEL_DIR)
    folder = tmp_path / "scorer"
    for part in (model, tokenizer):
        part.save_pretrained(folder)
    with real_server(
        "llama.cpp", tmp_path / "server", model=folder, arguments=("--reranking",)
    ) as server:
        options = ("--engine", "llama.cpp", "--upstream", server.url, "--model", str(folder))
        with (
            started(tmp_path, redis_url, *options),
            Client(as_role("operator", redis_url)) as client,
        ):
            scores = client.rerank(QUERY, DOCUMENTS)
    texts = [f"{QUERY} {document}" for document in DOCUMENTS]
    tokens = [tokenizer(text, add_special_tokens=False, return_tensors="pt") for text in texts]
    wanted = [model(each.input_ids).logits.softmax(-1)[0, 0].item() for each in tokens]
    assert scores == pytest.approx(wanted, rel=1e-3)
    assert len({round(score, 4) for score in scores}) == len(scores)

"""Which tokens end an output: those of the model's configuration and the tokenizer's."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from promptq.shared.protocol.request import FinishReason
from promptq.shared.settings.worker import WorkerSettings
from promptq.worker.serve.build import Served, build
from promptq.worker.shipped import MODEL_DIR
from tests.worker.engine.tiny_models import save_model
from tests.worker.text.grammars.structured import prepare, run

END_OF_TEXT, IM_START, IM_END = 0, 1, 2


def served(folder: Path, eos_token: Any) -> Served:
    """A model whose configuration has another end token than its tokenizer."""
    save_model(folder, "llama", vocab_size=2048, eos_token_id=END_OF_TEXT)
    (folder / "generation_config.json").unlink(missing_ok=True)
    shutil.copy(MODEL_DIR / "tokenizer.json", folder)
    config = json.loads((MODEL_DIR / "tokenizer_config.json").read_text())
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps({**config, "eos_token": eos_token}))
    return build(
        WorkerSettings(model=str(folder), kv_cache_memory="4M", max_num_seqs=4, device="cpu")
    )


AS_OBJECT = {"__type": "AddedToken", "content": "<|im_end|>", "special": True, "lstrip": False}


@pytest.mark.parametrize(
    ("eos_token", "ends"),
    [
        ("<|im_end|>", {END_OF_TEXT, IM_END}),
        (AS_OBJECT, {END_OF_TEXT, IM_END}),
        ("<|endoftext|>", {END_OF_TEXT}),
        (None, {END_OF_TEXT}),
        ("<|beyond the vocabulary|>", {END_OF_TEXT}),
    ],
)
def test_the_tokenizers_end_token_counts_too(
    tmp_path: Path, eos_token: Any, ends: set[int]
) -> None:
    assert served(tmp_path, eos_token).end_token_ids == ends


def test_the_tokenizers_end_token_and_stop_strings_that_are_tokens_end_an_output(
    tmp_path: Path,
) -> None:
    model = served(tmp_path, "<|im_end|>")
    biased = {"logit_bias": {str(IM_END): 100.0}, "temperature": 0.0, "max_tokens": 8}
    schema = {"type": "json_schema", "json_schema": {"schema": {"const": 7}}}
    ended, ignoring, later, in_json = run(
        model,
        prepare(model, **biased),
        prepare(model, **biased, ignore_eos=True),
        prepare(model, **biased, min_tokens=3),
        prepare(model, **biased, response_format=schema),
    )
    assert (ended.token_ids, ended.finish_reason) == ([IM_END], FinishReason.STOP)
    assert (ignoring.token_ids, ignoring.finish_reason) == ([IM_END] * 8, FinishReason.LENGTH)
    assert later.token_ids.index(IM_END) == 3
    assert model.tokenizer.decode(in_json.token_ids) == "7"
    biased["logit_bias"] = {str(IM_START): 100.0}
    stop = ["zebra", "<|im_start|>"]
    ended, later = run(
        model,
        prepare(model, **biased, stop=stop, ignore_eos=True),
        prepare(model, **biased, stop=stop, min_tokens=3),
    )
    assert (ended.token_ids, ended.finish_reason) == ([IM_START], FinishReason.STOP)
    assert later.token_ids.index(IM_START) == 3
    assert model.grammars is not None
    model.grammars.close()

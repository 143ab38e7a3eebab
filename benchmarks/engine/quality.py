"""Measures what quantization costs: perplexity, and greedy tokens that change.

The engine reads the same texts in each format. Perplexity is computed over all tokens of the texts.
At each position, the greedy token is the likeliest one. "same" is the share of positions where the
greedy token is the one of bf16. The shipped model reads documents that its training did not see,
and a random model reads texts that it wrote in bf16 at temperature 1.
"""

from __future__ import annotations

import argparse
import math
import random
from typing import Any

import numpy as np
import numpy.typing as npt
from transformers import AutoTokenizer

from benchmarks.lib.models import CACHE, MODELS, VOCAB_SIZE, model_dir
from promptq.shared.protocol.request import SamplingParams
from promptq.worker.engine.api.messages import EngineRequest, PromptLogprobs
from promptq.worker.engine.core.llm_engine import LLMEngine
from promptq.worker.engine.model.loading import LoadOptions
from promptq.worker.engine.runner.load_runner import load_runner
from promptq.worker.engine.runner.model_runner import ModelRunner
from promptq.worker.shipped import MODEL_DIR
from training.corpus import document

_BASE: dict[str, Any] = {"device": "cpu", "dtype": "bfloat16", "kv_cache_memory": 2**28}
_WITH_EMBEDDINGS = "embedding and head too"
FORMATS: dict[str, dict[str, Any]] = {
    "bf16": {},
    "int8, layers only": {"quantization": "int8", "quantize_embeddings": False},
    f"int8, {_WITH_EMBEDDINGS}": {"quantization": "int8"},
    "int4 in groups of 32, layers only": {"quantization": "int4", "quantize_embeddings": False},
    f"int4 in groups of 32, {_WITH_EMBEDDINGS}": {"quantization": "int4"},
    f"int4 in groups of 128, {_WITH_EMBEDDINGS}": {
        "quantization": "int4",
        "quantization_group": 128,
    },
    "bf16, KV cache in int8": {"kv_cache_dtype": "int8"},
    "int8, KV cache in int8": {"quantization": "int8", "kv_cache_dtype": "int8"},
}

Read = tuple[npt.NDArray[np.float32], npt.NDArray[np.int64]]
"""Log-probabilities of the tokens of all texts, and the likeliest token at each position."""


def read(runner: ModelRunner, texts: list[list[int]]) -> Read:
    engine = LLMEngine(runner, max_num_seqs=16, max_num_batched_tokens=2048)
    params = SamplingParams(temperature=0.0, prompt_logprobs=1)
    for index, text in enumerate(texts):
        engine.add(EngineRequest(index, text, params, seed=0, max_tokens=1))
    pieces: list[list[PromptLogprobs]] = [[] for _ in texts]
    while engine.has_work:
        for output in engine.step().outputs:
            pieces[output.sequence_id] += output.prompt_logprobs or ()
    ordered = [piece for of_text in pieces for piece in of_text]
    likeliest = [piece.top_ids[:, 0] for piece in ordered]
    return np.concatenate([piece.logprobs for piece in ordered]), np.concatenate(likeliest)


def documents(seed: int, count: int, folder: str) -> list[list[int]]:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    rng = random.Random(f"{seed} quality")
    return [list(tokenizer(document(rng))["input_ids"]) for _ in range(count)]


def written(runner: ModelRunner, seed: int, count: int) -> list[list[int]]:
    """Returns texts that the model wrote, 256 tokens each."""
    rng = random.Random(seed)
    engine = LLMEngine(runner, max_num_seqs=16, max_num_batched_tokens=2048)
    texts = [[rng.randrange(3, VOCAB_SIZE)] for _ in range(count)]
    for index, text in enumerate(texts):
        params = SamplingParams(temperature=1.0, ignore_eos=True)
        engine.add(EngineRequest(index, [*text], params, seed=rng.getrandbits(32), max_tokens=256))
    while engine.has_work:
        for output in engine.step().outputs:
            texts[output.sequence_id] += output.token_ids
    return texts


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks quality", description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--texts", type=int, default=200, help="number of documents for the shipped model"
    )
    options = parser.parse_args()
    print(f"seed {options.seed}")
    random_model = str(model_dir(MODELS["54m"], CACHE))
    for name, folder in (("shipped", str(MODEL_DIR)), ("random, 54M", random_model)):
        texts: list[list[int]] = []
        expected: Read | None = None
        for title, quantization in FORMATS.items():
            runner = load_runner(folder, LoadOptions(**_BASE, **quantization))
            if not texts and name == "shipped":
                texts = documents(options.seed, options.texts, folder)
            elif not texts:
                texts = written(runner, options.seed, 32)
            logprobs, likeliest = found = read(runner, texts)
            expected = expected or found
            perplexity = math.exp(-float(logprobs.mean()))
            off = perplexity / math.exp(-float(expected[0].mean())) - 1
            same = float((likeliest == expected[1]).mean())
            print(
                f"{name}: {title}: perplexity {perplexity:,.3f} ({off:+.2%}), same {same:.1%}"
                f" of {len(logprobs):,} tokens",
                flush=True,
            )


if __name__ == "__main__":
    main()

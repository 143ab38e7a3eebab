"""Measures the time that grammars add to a step.

The vocabulary has 150,000 made-up tokens, and the batch has 64 sequences with a grammar each. Only
the thread that computes masks runs here. In a worker the model runs at the same time, and the
sampler waits only if the thread needs longer than the model.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from promptq.shared.protocol.output_format import JsonOutput
from promptq.shared.protocol.request import SamplingParams
from promptq.worker.engine.api.messages import EngineRequest
from promptq.worker.engine.core.sequence import Sequence
from promptq.worker.engine.sampling.mask_thread import Masks
from promptq.worker.text.grammars.schema_masks import Grammars
from promptq.worker.text.tokenizer import HuggingFaceTokenizer

VOCAB_SIZE = 150_000
BATCH = 64
STEPS = 60
SEED = 1
SCHEMAS: dict[str, dict[str, Any]] = {
    "any object": {"type": "object"},
    "record": {
        "type": "object",
        "properties": {
            "name": {"type": "string"},
            "age": {"type": "integer", "minimum": 0, "maximum": 150},
            "tags": {"type": "array", "items": {"type": "string"}, "maxItems": 4},
            "kind": {"enum": ["a", "b", "c"]},
        },
        "required": ["name", "age", "tags", "kind"],
        "additionalProperties": False,
    },
    "patterns": {
        "type": "object",
        "properties": {
            "id": {"type": "string", "pattern": "^[a-z]{2,5}-[0-9]{3}$"},
            "at": {"type": "string", "format": "date-time"},
        },
        "required": ["id", "at"],
        "additionalProperties": False,
    },
    "short strings": {"type": "array", "items": {"type": "string", "maxLength": 5}},
}


def make_tokenizer(rng: random.Random) -> HuggingFaceTokenizer:
    """Makes tokens: words with and without a space in front, digits, punctuation, other scripts."""
    syllables = [a + b for a in "bcdfghjklmnprstvwz" for b in "aeiou"] + ["ing", "er", "on", "st"]
    marks = '{}[]":,.;-_()/\\<>=+*&#@!?'
    words = dict.fromkeys(sorted(pre_tokenizers.ByteLevel.alphabet()))
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    while len(words) < VOCAB_SIZE - 1:
        kind = rng.random()
        if kind < 0.8:
            word = "".join(rng.choice(syllables) for _ in range(rng.randint(1, 4)))
            word = rng.choice(["", " "]) + rng.choice([word, word.capitalize()])
        elif kind < 0.85:
            word = "".join(rng.choice(marks) for _ in range(rng.randint(2, 4)))
        else:
            word = "".join(chr(rng.randint(0x4E00, 0x9FFF)) for _ in range(rng.randint(1, 3)))
        words[byte_level.pre_tokenize_str(word)[0][0]] = None
    tokenizer = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, []))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>"])
    return HuggingFaceTokenizer(PreTrainedTokenizerFast(tokenizer_object=tokenizer))


def milliseconds(action: Callable[[], Any], into: list[float]) -> Any:
    began = time.perf_counter()
    result = action()
    into.append((time.perf_counter() - began) * 1000)
    return result


def main() -> None:
    rng = random.Random(SEED)
    end = VOCAB_SIZE - 1
    grammars = Grammars(make_tokenizer(rng), VOCAB_SIZE, frozenset({end}))
    once: list[float] = []
    milliseconds(lambda: grammars.start(JsonOutput({"type": "null"}, True), frozenset()), once)
    print(f"vocabulary passed to the library, once a worker: {once[0]:.0f} ms")
    print(
        f"{'64 rows, ms':16} {'start':>6} {'thread':>14} {'apply':>6} {'accept':>6} {'compile':>8}"
    )
    for name, schema in SCHEMAS.items():
        measure(name, schema, grammars, end, rng)


def measure(
    name: str, schema: dict[str, Any], grammars: Grammars, end: int, rng: random.Random
) -> None:
    compiled: list[float] = []
    wanted, ends = JsonOutput(schema, True), frozenset({end})
    milliseconds(lambda: grammars.start(wanted, ends), compiled)

    def sequence(n: int) -> Sequence:
        params = SamplingParams.model_validate({})
        grammar = grammars.start(wanted, ends)
        return Sequence.of(EngineRequest(n, [1], params, seed=n, max_tokens=STEPS, grammar=grammar))

    sequences = [sequence(n) for n in range(BATCH)]
    masks = Masks(torch.device("cpu"))
    logits = torch.zeros(BATCH, VOCAB_SIZE)
    started: list[float] = []
    threaded: list[float] = []
    applied: list[float] = []
    accepted: list[float] = []
    for _ in range(STEPS):
        pending = milliseconds(lambda: masks.start(sequences), started)
        milliseconds(pending.words.result, threaded)
        logits.zero_()
        milliseconds(lambda pending=pending: pending.apply(logits), applied)
        chosen = [rng.choice(row.isfinite().nonzero().flatten().tolist()) for row in logits]
        ended = {row for row, token_id in enumerate(chosen) if token_id == end}

        def accept(chosen: list[int] = chosen, ended: set[int] = ended) -> None:
            for row, token_id in enumerate(chosen):
                grammar = sequences[row].request.grammar
                if row not in ended and grammar is not None:
                    grammar.accept(token_id)
                    if grammar.is_complete:
                        ended.add(row)

        milliseconds(accept, accepted)
        for row in ended:
            sequences[row] = sequence(row)
    median = statistics.median
    tail = statistics.quantiles(threaded, n=20)[-1]
    print(
        f"{name:16} {median(started):6.2f} {median(threaded):6.2f} p95 {tail:4.1f}"
        f" {median(applied):6.2f} {median(accepted):6.2f} {compiled[0]:8.2f}"
    )


if __name__ == "__main__":
    main()

"""Measures drafts in repetitive texts, in other texts, and by a model's head.

The engine runs alone, with and without drafts in turns. No two pairs share a prompt. The shipped
model writes stories, and drafts with a head if its folder has one; the suite's 54M model runs all
other workloads. A model with random weights soon repeats itself in a greedy answer. So if a prompt
ends with the first tokens of its greedy answer, the rest of the answer repeats the prompt.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from dataclasses import dataclass
from pathlib import Path

from rich.table import Table

from benchmarks.lib.models import CACHE, MODELS, VOCAB_SIZE, model_dir
from promptq.producer.commands.screens.terminal import console_for_list
from promptq.shared.protocol.request import SamplingParams
from promptq.shared.settings.worker import read_worker_settings
from promptq.worker.engine.api.messages import EngineRequest
from promptq.worker.serve.build import Served, build

PROMPT, OUTPUT = 128, 256
FEW_TOKENS = {str(token): 100.0 for token in range(1000, 1032)}
"""A `logit_bias` that leaves 32 tokens. In a random text of these, most pairs occurred before, but
the token that followed them predicts nothing."""


@dataclass(frozen=True, slots=True)
class Case:
    """One workload: `batch` requests at once."""

    title: str
    batch: int
    params: SamplingParams
    repeats: bool = False
    """Whether the prompts end with a text that the model will repeat."""
    tells: bool = False
    """Whether the requests are stories of the shipped model. Otherwise the 54M model runs them."""


GREEDY = SamplingParams(temperature=0.0)
RANDOM = SamplingParams(temperature=1.0)
MISLEADING = SamplingParams(temperature=2.0, logit_bias=FEW_TOKENS)
STORY = SamplingParams(temperature=0.8)
OPENINGS = ("Once upon a time", "One day, a little fox", "In the forest there was a bear")
CASES = [
    Case("stories, 1 at once", 1, STORY, tells=True),
    Case("stories, 4 at once", 4, STORY, tells=True),
    Case("repeats its prompt, 1 at once", 1, GREEDY, repeats=True),
    Case("repeats its prompt, 4 at once", 4, GREEDY, repeats=True),
    Case("repeats its prompt, 8 at once", 8, GREEDY, repeats=True),
    Case("random, 1 at once", 1, RANDOM),
    Case("random, 32 at once", 32, RANDOM),
    Case("misleading, 1 at once", 1, MISLEADING),
    Case("misleading, 4 at once", 4, MISLEADING),
    Case("misleading, 8 at once", 8, MISLEADING),
]


@dataclass(frozen=True, slots=True)
class Measured:
    """The figures of one run. `seconds` begin at the first token, after the prompts are
    computed."""

    outputs: dict[int, list[int]]
    seconds: float
    drafted: int
    accepted: int


class Bench:
    """An engine and its requests."""

    def __init__(self, served: Served, seed: int) -> None:
        self._engine = served.engine
        self._tokenizer = served.tokenizer
        self._chance = random.Random(seed)
        self._next_id = 1

    def prompts(self, case: Case) -> list[list[int]]:
        if case.tells:
            texts = self._chance.choices(OPENINGS, k=case.batch)
            return [self._tokenizer.encode_output(text) for text in texts]
        drawn = [
            [self._chance.randrange(1, VOCAB_SIZE) for _ in range(PROMPT)]
            for _ in range(case.batch)
        ]
        if not case.repeats:
            return drawn
        answers = self.run(drawn, case.params, speculative_tokens=0, num_output=64).outputs
        return [prompt + answer for prompt, answer in zip(drawn, answers.values(), strict=True)]

    def run(
        self,
        prompts: list[list[int]],
        params: SamplingParams,
        *,
        speculative_tokens: int,
        num_output: int = OUTPUT,
    ) -> Measured:
        engine, before = self._engine, self._engine.stats
        outputs: dict[int, list[int]] = {}
        for prompt in prompts:
            outputs[self._next_id] = []
            request = EngineRequest(
                self._next_id,
                prompt,
                params.model_copy(update={"speculative_tokens": speculative_tokens}),
                seed=self._next_id,
                max_tokens=num_output,
                cache_salt=str(self._next_id),
            )
            engine.add(request)
            self._next_id += 1
        started_at = 0.0
        while engine.has_work:
            for output in engine.step().outputs:
                outputs[output.sequence_id] += output.token_ids
            if not started_at and all(outputs.values()):
                started_at = time.perf_counter()
        after = engine.stats
        return Measured(
            outputs,
            time.perf_counter() - started_at,
            after.drafted_tokens - before.drafted_tokens,
            after.accepted_tokens - before.accepted_tokens,
        )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks drafting", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--speculative-tokens", type=int, default=7, help="most drafts in a step")
    parser.add_argument(
        "--model", type=Path, help="model directory instead of the 54M model; 32,000 tokens"
    )
    arguments = parser.parse_args()
    model = arguments.model or model_dir(MODELS["54m"], CACHE)
    settings = read_worker_settings(
        model=str(model), dtype=arguments.dtype, max_model_len=1024, kv_cache_memory="1G"
    )
    shipped = read_worker_settings(dtype=arguments.dtype, kv_cache_memory="100M")
    benches = [Bench(build(each), arguments.seed) for each in (settings, shipped)]

    table = Table(title=f"tokens/s in {arguments.dtype}, medians of {arguments.rounds} rounds")
    for column in ("text", "without", "with", "ratio", "drafted", "accepted"):
        table.add_column(column, justify="left" if column == "text" else "right")
    pairs: dict[str, list[tuple[Measured, Measured]]] = {case.title: [] for case in CASES}
    for round_number in range(-1, arguments.rounds):  # the first one warms up
        for case in CASES:
            bench = benches[case.tells]
            prompts = bench.prompts(case)
            order = [0, arguments.speculative_tokens][:: 1 if round_number % 2 else -1]
            both = {
                count: bench.run(prompts, case.params, speculative_tokens=count) for count in order
            }
            if round_number >= 0:
                pair = both[0], both[arguments.speculative_tokens]
                pairs[case.title].append(pair)
    for case in CASES:
        table.add_row(case.title, *_figures(case, pairs[case.title]))
    console_for_list().print(table)


def _figures(case: Case, pairs: list[tuple[Measured, Measured]]) -> list[str]:
    num_tokens = case.batch * (OUTPUT - 1)
    without, drafted = zip(*pairs, strict=True)
    rates = [
        num_tokens / statistics.median(it.seconds for it in side) for side in (without, drafted)
    ]
    ratio = statistics.median(a.seconds / b.seconds for a, b in pairs)
    return [
        *(f"{rate:,.0f}" for rate in rates),
        f"{ratio:.2f}",
        f"{statistics.median(it.drafted for it in drafted):,.0f}",
        f"{statistics.median(it.accepted for it in drafted):,.0f}",
    ]


if __name__ == "__main__":
    main()

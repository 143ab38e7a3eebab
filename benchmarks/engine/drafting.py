"""Measures drafts in repetitive texts, in other texts, and by a model's head.

Two engines, with and without drafts, compute their steps in turns, so other load of the machine
affects both. With one thread (OMP_NUM_THREADS=1), the figures are CPU time, which other load
affects little. Each pair of runs has new prompts. The shipped model writes stories and answers, and
drafts with a head if its folder has one; the suite's 54M model runs all other workloads. A model
with random weights soon repeats itself in a greedy answer. So if a prompt ends with the first
tokens of its greedy answer, the rest of the answer repeats the prompt.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.table import Table

from benchmarks.lib.models import CACHE, MODELS, VOCAB_SIZE, model_dir
from promptq.producer.commands.screens.terminal import console_for_list
from promptq.shared.protocol.request import SamplingParams
from promptq.shared.settings.worker import WorkerSettings, read_worker_settings
from promptq.worker.engine.api.messages import EngineRequest
from promptq.worker.serve.build import build

CLOCK = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
PROMPT, OUTPUT = 128, 256
FEW_TOKENS = {str(token): 100.0 for token in range(1000, 1032)}
"""A `logit_bias` that leaves 32 tokens. In a random text of these, most pairs occurred before, but
the token that followed them predicts nothing."""


@dataclass(frozen=True, slots=True)
class Case:
    """One workload: `batch` requests that run at the same time."""

    title: str
    batch: int
    params: SamplingParams
    repeats: bool = False
    """Whether the prompts end with a text that the model will repeat."""
    tells: bool = False
    """Whether the requests are for the shipped model. Otherwise the 54M model runs them."""
    chats: bool = False
    """Whether the prompts are chats and other texts. Otherwise all are beginnings of stories."""


GREEDY = SamplingParams(temperature=0.0)
RANDOM = SamplingParams(temperature=1.0)
MISLEADING = SamplingParams(temperature=2.0, logit_bias=FEW_TOKENS)
STORY = SamplingParams(temperature=0.8)
OPENINGS = ("Once upon a time", "One day, a little fox", "In the forest there was a bear")
QUESTIONS = (
    "Tell me a story about a fox.",
    "Hello, who are you?",
    "What is the colour of the sky?",
)
CHATS = (
    *(f"<|im_start|>user\n{each}<|im_end|>\n<|im_start|>assistant\n" for each in QUESTIONS),
    *("The 17 quick", "xq zv 93 ]]"),
)
CASES = [
    Case("stories, 1 at once", 1, STORY, tells=True),
    Case("stories, 4 at once", 4, STORY, tells=True),
    Case("stories, 8 at once", 8, STORY, tells=True),
    Case("chats, 1 at once", 1, STORY, tells=True, chats=True),
    Case("chats, 4 at once", 4, STORY, tells=True, chats=True),
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
    """The figures of one engine. `seconds` is the time of all steps after the prompts were
    computed."""

    outputs: dict[int, list[int]]
    seconds: float
    drafted: int
    accepted: int


class Bench:
    """Two engines of one model, which run the same requests with and without drafts."""

    def __init__(self, settings: WorkerSettings, seed: int) -> None:
        both = [build(settings) for _ in range(2)]
        self._engines = [served.engine for served in both]
        self._tokenizer = both[0].tokenizer
        self._chance = random.Random(seed)
        self._next_id = 1

    def prompts(self, case: Case) -> list[list[int]]:
        if case.tells:
            openings = CHATS if case.chats else OPENINGS
            texts = self._chance.choices(openings, k=case.batch)
            return [self._tokenizer.encode_output(text) for text in texts]
        drawn = [
            [self._chance.randrange(1, VOCAB_SIZE) for _ in range(PROMPT)]
            for _ in range(case.batch)
        ]
        if not case.repeats:
            return drawn
        [answers] = self.run(drawn, case.params, [0], num_output=64)
        texts = answers.outputs.values()
        return [prompt + answer for prompt, answer in zip(drawn, texts, strict=True)]

    def run(
        self,
        prompts: list[list[int]],
        params: SamplingParams,
        most_drafted: list[int],
        num_output: int = OUTPUT,
    ) -> list[Measured]:
        """Run the prompts on one engine for each number in `most_drafted`, the most drafts in a
        step. Returns the figures of each engine."""
        engines = self._engines[: len(most_drafted)]
        before = [engine.stats for engine in engines]
        first_id, self._next_id = self._next_id, self._next_id + len(prompts)
        for engine, count in zip(engines, most_drafted, strict=True):
            drafts = params.model_copy(update={"speculative_tokens": count})
            for number, prompt in enumerate(prompts, first_id):
                options = {"seed": number, "max_tokens": num_output, "cache_salt": str(number)}
                engine.add(EngineRequest(number, prompt, drafts, **options))
        outputs = [{first_id + i: list[int]() for i in range(len(prompts))} for _ in engines]
        seconds = [0.0] * len(engines)
        while any(engine.has_work for engine in engines):
            for index, engine in enumerate(engines):
                decodes = all(outputs[index].values())
                started_at = CLOCK()
                step = engine.step()
                seconds[index] += decodes * (CLOCK() - started_at)
                for output in step.outputs:
                    outputs[index][output.sequence_id] += output.token_ids
        return [
            Measured(
                outputs[index],
                seconds[index],
                engine.stats.drafted_tokens - before[index].drafted_tokens,
                engine.stats.accepted_tokens - before[index].accepted_tokens,
            )
            for index, engine in enumerate(engines)
        ]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks drafting", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--speculative-tokens", type=int, default=7, help="most drafts in a step")
    parser.add_argument(
        "--model", type=Path, help="model directory instead of the 54M model; 32,000 tokens"
    )
    parser.add_argument("--only", default="", help="measure only texts whose name has this")
    arguments = parser.parse_args()
    cases = [case for case in CASES if arguments.only in case.title]
    model = arguments.model or model_dir(MODELS["54m"], CACHE)
    settings = read_worker_settings(
        model=str(model), dtype=arguments.dtype, max_model_len=1024, kv_cache_memory="1G"
    )
    shipped = read_worker_settings(dtype=arguments.dtype, kv_cache_memory="100M")
    benches = [Bench(each, arguments.seed) for each in (settings, shipped)]

    table = Table(title=f"tokens/s in {arguments.dtype}, medians of {arguments.rounds} rounds")
    for column in ("text", "without", "with", "ratio (middle half)", "drafted", "accepted"):
        table.add_column(column, justify="left" if column == "text" else "right")
    pairs: dict[str, list[tuple[Measured, Measured]]] = {case.title: [] for case in cases}
    for round_number in range(-1, arguments.rounds):  # the first one warms up
        for case in cases:
            bench = benches[case.tells]
            prompts = bench.prompts(case)
            pair = bench.run(prompts, case.params, [0, arguments.speculative_tokens])
            if round_number >= 0:
                pairs[case.title].append((pair[0], pair[1]))
    for case in cases:
        table.add_row(case.title, *_figures(case, pairs[case.title]))
    console_for_list().print(table)


def _figures(case: Case, pairs: list[tuple[Measured, Measured]]) -> list[str]:
    num_tokens = case.batch * (OUTPUT - 1)
    without, drafted = zip(*pairs, strict=True)
    rates = [
        num_tokens / statistics.median(it.seconds for it in side) for side in (without, drafted)
    ]
    ratios = sorted(a.seconds / b.seconds for a, b in pairs)
    quarter = len(ratios) // 4
    return [
        *(f"{rate:,.0f}" for rate in rates),
        f"{statistics.median(ratios):.2f} ({ratios[quarter]:.2f} to {ratios[-1 - quarter]:.2f})",
        f"{statistics.median(it.drafted for it in drafted):,.0f}",
        f"{statistics.median(it.accepted for it in drafted):,.0f}",
    ]


if __name__ == "__main__":
    main()

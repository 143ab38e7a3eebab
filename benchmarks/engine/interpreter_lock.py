"""Measures how much the publisher slows the engine by holding the interpreter lock.

The engine decodes a full batch of the suite's 54M model. After each step, a thread of the same
process, another process, or nobody turns the step's tokens into events, as a worker does. Thread
and process do the same work on the same cores, so their rates differ only by the interpreter's
lock. A worker whose engine were a separate process could not gain more than this difference.
"""

from __future__ import annotations

import argparse
import multiprocessing
import random
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from rich.table import Table

from benchmarks.lib.models import CACHE, MODELS, VOCAB_SIZE, model_dir
from benchmarks.table.jobs import Request
from benchmarks.table.rows.engine import engine_request
from promptq.producer.commands.screens.terminal import console_for_list
from promptq.shared.protocol.events import token_event_json
from promptq.shared.settings.worker import read_worker_settings
from promptq.worker.engine.api.port import Engine
from promptq.worker.serve.build import build

PROMPT, OUTPUT = 32, 200
WORKER_MICROSECONDS = 20.0
"""CPU time that a worker needs for a token outside of the engine, measured through Redis."""

Tell = Callable[[int], object]
"""A callback that gets the number of tokens of each step."""


def work(num_tokens: int) -> None:
    """Make events for `num_tokens` tokens, for as long as a worker would be busy with them."""
    until = time.thread_time() + num_tokens * WORKER_MICROSECONDS / 1e6
    while time.thread_time() < until:
        token_event_json(7, [12345], " word", None, 1)


def _serve(inbox: Any) -> None:
    while (num_tokens := inbox.get()) is not None:
        work(num_tokens)


@contextmanager
def nobody() -> Iterator[Tell]:
    yield lambda num_tokens: None


@contextmanager
def thread() -> Iterator[Tell]:
    inbox: SimpleQueue[int | None] = SimpleQueue()
    worker = threading.Thread(target=_serve, args=(inbox,))
    worker.start()
    yield inbox.put
    inbox.put(None)
    worker.join()


@contextmanager
def process() -> Iterator[Tell]:
    context = multiprocessing.get_context("spawn")
    inbox = context.SimpleQueue()
    worker = context.Process(target=_serve, args=(inbox,))
    worker.start()
    yield inbox.put
    inbox.put(None)
    worker.join()


SIDES = {"nobody": nobody, "a thread": thread, "a process": process}


def rate(engine: Engine, first_id: int, batch: int, tell: Tell) -> float:
    """Returns the tokens per second of a full batch that decodes. Calls `tell` with the number of
    tokens of each step."""
    draw = random.Random(first_id)
    for place in range(batch):
        prompt = [draw.randint(1, VOCAB_SIZE - 2) for _ in range(PROMPT)]
        engine.add(engine_request(Request(prompt, OUTPUT), first_id + place))
    num_tokens, started = 0, 0.0
    while engine.has_work:
        came = sum(len(output.token_ids) for output in engine.step().outputs)
        if not started:  # with the prompts done
            started = time.perf_counter()
            continue
        num_tokens += came
        tell(came)
    return num_tokens / (time.perf_counter() - started)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks lock", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="figures are medians over rounds")
    parser.add_argument("--cache", type=Path, default=CACHE)
    options = parser.parse_args()
    shape = MODELS["54m"]
    settings = read_worker_settings(
        model=str(model_dir(shape, options.cache)),
        dtype="bfloat16",
        max_num_seqs=shape.batch,
        max_model_len=PROMPT + OUTPUT,
        speculative_tokens=0,
    )
    engine = build(settings).engine
    rates: dict[str, list[float]] = {name: [] for name in SIDES}
    first_id = 1
    for number in range(options.rounds + 1):  # the first warms up
        for name, side in SIDES.items():
            with side() as tell:
                found = rate(engine, first_id, shape.batch, tell)
            first_id += shape.batch
            if number:
                rates[name].append(found)
    table = Table("beside the engine", "tokens/s", "of the engine alone")
    for name, found_rates in rates.items():
        shares = [one / alone for one, alone in zip(found_rates, rates["nobody"], strict=True)]
        median = statistics.median(found_rates)
        table.add_row(name, f"{median:,.0f}", f"{statistics.median(shares):.3f}")
    console_for_list().print(table)


if __name__ == "__main__":
    main()

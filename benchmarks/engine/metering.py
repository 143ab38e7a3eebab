"""Measures the time that metrics add to a token.

A batch of 64 decodes. A worker's meter, which is updated once a step, is compared with a histogram
of prometheus_client that observes each token.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import cast

from prometheus_client import CollectorRegistry
from prometheus_client import Histogram as LibraryHistogram

from promptq.shared.protocol.claims import Claim
from promptq.shared.protocol.request import Request
from promptq.shared.runtime.metrics import BETWEEN_TOKENS
from promptq.worker.engine.api.messages import (
    EngineRequest,
    EngineStats,
    SequenceOutput,
    StepOutput,
)
from promptq.worker.leases.meter import Meter
from promptq.worker.leases.rows import PreparedRequest
from promptq.worker.text.detokenizer import TextStream

ROWS, STEPS, ROUNDS = 64, 2000, 5
SECONDS_BETWEEN = 0.02


def held_request(number: int) -> PreparedRequest:
    request = Request.build({"prompt": [1], "max_tokens": STEPS})
    claim = Claim(f"r{number}", b"", "1-x", 1, 0.0, 0, 0, 0, 1, 1)
    return PreparedRequest(
        claim=claim,
        request=request,
        engine_request=EngineRequest(number, [1], request, 0, STEPS),
        text=cast(TextStream, None),
        token_ids=[],
        texts=[],
        logprobs=[],
    )


def nanoseconds_a_token(step: Callable[[float], None]) -> float:
    """Returns the CPU nanoseconds for each token, as the median over the rounds."""
    measured = []
    for _ in range(ROUNDS):
        started = time.thread_time()
        for number in range(STEPS):
            step(number * SECONDS_BETWEEN)
        measured.append((time.thread_time() - started) / STEPS / ROWS * 1e9)
    return statistics.median(measured)


def main() -> None:
    """Print both figures."""
    meter, batch = Meter(), [held_request(number) for number in range(ROWS)]
    outputs = [SequenceOutput(number, [1]) for number in range(ROWS)]
    stats = EngineStats()

    def ours(at: float) -> None:
        stats.generation_tokens += ROWS
        for held in batch:
            meter.note_output(held, at)
        meter.note_step(StepOutput(outputs, stats, at))

    library = LibraryHistogram(
        "between", "", registry=CollectorRegistry(), buckets=BETWEEN_TOKENS.buckets
    )

    def theirs(at: float) -> None:
        for _ in outputs:
            library.observe(SECONDS_BETWEEN)

    print(f"noted by step: {nanoseconds_a_token(ours):.0f} ns a token")
    print(f"a library's histogram by token: {nanoseconds_a_token(theirs):.0f} ns a token")


if __name__ == "__main__":
    main()

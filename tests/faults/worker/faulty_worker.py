"""`promptq worker` with a fault; run it as a module.

FAULT in the environment names the fault. Those of `_faulty_model` hit a real model; the others hit
the model-free engine when a prompt has a `!`. FAULT_FOR is how long some last, in seconds.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from promptq.shared.protocol.request import Request
from promptq.shared.settings.worker import WorkerSettings
from promptq.worker.__main__ import main
from promptq.worker.engine.api.port import Progress
from promptq.worker.engine.core.llm_engine import LLMEngine
from promptq.worker.engine.core.runner import SampledToken
from promptq.worker.engine.core.sequence import Batch
from promptq.worker.serve import process
from promptq.worker.serve.build import Served
from tests.support.model_free import ModelFreeRunner, ModelFreeStep, served_model_free

FAULT = os.environ.get("FAULT", "")
SECONDS = float(os.environ.get("FAULT_FOR", "0"))
STEP_SECONDS = float(os.environ.get("STEP_SECONDS", "0.002"))
EXIT_CODE = 66
"""Of the fault "dies"."""


class FaultyRunner(ModelFreeRunner):
    is_broken = False
    short_since: float | None = None

    def launch(self, batch: Batch, after: ModelFreeStep | None = None) -> ModelFreeStep:
        guilty = any(ord("!") in share.sequence.token_ids for share in batch.scheduled)
        self.is_broken = self.is_broken or guilty
        if FAULT == "dies" and guilty:  # as a fault of a driver does
            os._exit(EXIT_CODE)
        if FAULT == "hang" and guilty:
            print("a fault begins", file=sys.stderr, flush=True)
            time.sleep(SECONDS)
        if FAULT == "hang-with-lock" and guilty:
            re.match("(a+)+$", "a" * 64 + "b")
        if FAULT == "fails" and guilty:
            raise RuntimeError("bad sampling state")
        if FAULT == "breaks" and self.is_broken:
            raise RuntimeError("device-side assert")
        if FAULT == "memory" and batch.num_tokens > 40:
            raise RuntimeError(_OUT_OF_MEMORY)
        if FAULT == "memory-for-one" and _is_in_mid_stream(batch):
            raise RuntimeError(_OUT_OF_MEMORY)
        if FAULT == "memory-for-all" and self.short_since is None and _is_in_mid_stream(batch):
            self.short_since = time.monotonic()
        if self.short_since is not None and time.monotonic() < self.short_since + SECONDS:
            raise RuntimeError(_OUT_OF_MEMORY)
        return super().launch(batch, after)

    def collect(self, launched: ModelFreeStep) -> list[list[SampledToken]]:
        if FAULT != "nan":
            return super().collect(launched)
        return [
            [replace(token, error="no finite logits") for token in tokens]
            if ord("!") in share.sequence.token_ids
            else tokens
            for share, tokens in zip(
                launched.batch.sampling, super().collect(launched), strict=True
            )
        ]


_OUT_OF_MEMORY = "CUDA out of memory. Tried to allocate 2.00 GiB"


def _is_in_mid_stream(batch: Batch) -> bool:
    """Whether there is a guilty one, with three tokens or more."""
    sequences = [share.sequence for share in batch.scheduled]
    return any(ord("!") in it.token_ids and it.num_output_tokens > 2 for it in sequences)


class FaultyTokenizer:
    """Fails with the third token behind a prompt `!`, or hangs over that prompt."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def encode_prompt(self, request: Request) -> list[int]:
        if FAULT == "hang-in-preparation" and _text(request).strip() == "!":
            print("a fault begins", file=sys.stderr, flush=True)
            time.sleep(SECONDS)
        tokens: list[int] = self._tokenizer.encode_prompt(request)
        return tokens

    def decode(self, token_ids: list[int]) -> str:
        if FAULT == "detokenise" and token_ids[:1] == [ord("!")] and len(token_ids) > 3:
            raise RuntimeError("a stop string bug")
        text: str = self._tokenizer.decode(token_ids)
        return text

    def decoder(self, _marks: Sequence[str]) -> Callable[[list[int]], str]:
        return self.decode


def _text(request: Request) -> str:
    return request.prompt if isinstance(request.prompt, str) else ""


def build(settings: WorkerSettings, progress: Progress, known: object) -> Served:
    runner = FaultyRunner(num_blocks=1024, step_seconds=STEP_SECONDS)
    engine = LLMEngine(
        runner,
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=settings.max_num_batched_tokens,
    )
    served = served_model_free()
    return replace(served, engine=engine, tokenizer=FaultyTokenizer(served.tokenizer))


def _faulty_model() -> type | None:
    """Returns the runner of a real model with the fault; None for faults of the other engine."""
    if FAULT not in ("killed-in-prefill", "short-of-memory"):
        return None
    import torch

    from promptq.worker.engine.runner.model_runner import ModelRunner, ModelStep

    class FaultyModelRunner(ModelRunner):
        is_short = False

        def launch(self, batch: Batch, after: ModelStep | None = None) -> ModelStep:
            sequences = [share.sequence for share in batch.scheduled]
            computed = max(each.num_computed_tokens for each in sequences)
            if FAULT == "killed-in-prefill" and computed >= 500:
                os.kill(os.getpid(), signal.SIGKILL)
            enough = min(each.num_output_tokens for each in sequences) >= 20
            self.is_short = self.is_short or enough  # for good
            if FAULT == "short-of-memory" and self.is_short:
                raise torch.OutOfMemoryError(_OUT_OF_MEMORY)
            return super().launch(batch, after)

    return FaultyModelRunner


if __name__ == "__main__":
    if (runner := _faulty_model()) is not None:
        from promptq.worker.engine.runner import load_runner

        load_runner.ModelRunner = runner  # type: ignore[misc]  # a class in the place of another
    else:
        process.build = build
    main()

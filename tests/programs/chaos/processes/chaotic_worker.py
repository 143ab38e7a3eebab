"""The worker command, with a slow model-free engine that some requests kill.

The worker records its claims for the audit, and sends the scripts of a mutant if the environment
names one. The command has the options of `promptq worker`.
"""

from __future__ import annotations

import os
from typing import Any

from promptq.shared.protocol.claims import Claims, Room
from promptq.shared.queue.request_queue import AsyncRequestQueue
from promptq.shared.runtime.logs import get_logger
from promptq.shared.settings.worker import WorkerSettings
from promptq.worker.__main__ import main as run_command
from promptq.worker.engine.core.llm_engine import LLMEngine
from promptq.worker.engine.core.sequence import Batch
from promptq.worker.serve import process, worker
from promptq.worker.serve.build import Served, build
from promptq.worker.serve.model_identity import MODEL_FREE
from tests.programs.states.mutants import break_scripts
from tests.programs.traces.append_only import record_scripts
from tests.support.model_free import END_TOKEN_ID, ModelFreeRunner, ModelFreeStep

POISON = 7
"""A prompt with this byte kills its worker."""

POISONED_TOKENS = 40
"""Number of an attempt's tokens before the worker dies. Other running requests get as many."""

POISONED_CODE = 42
"""An exit code that has no other cause."""

STEP_SECONDS = 0.02
_NUM_BLOCKS = 56  # so few that a full batch preempts
_BLOCK_SIZE = 16


class PoisonableRunner(ModelFreeRunner):
    """Kills its process in the step in which a poisoned sequence gets its last token."""

    def launch(self, batch: Batch, after: ModelFreeStep | None = None) -> ModelFreeStep:
        for share in batch.sampling:
            request = share.sequence.request
            gained = share.sequence.num_output_tokens - len(request.output_token_ids)
            if gained >= POISONED_TOKENS and POISON in request.prompt_token_ids:
                os._exit(POISONED_CODE)
        return super().launch(batch, after)


class NotingQueue(AsyncRequestQueue):
    """Logs each claim, and the number of the request's tokens before the claim."""

    async def take_batch(self, room: Room) -> Claims:
        claims = await super().take_batch(room)
        for claim in claims:
            noted = {"request_id": claim.request_id, "attempt": claim.attempt}
            get_logger().info("claimed", **noted, num_tokens=claim.num_logged)
        return claims


def build_chaotic(settings: WorkerSettings, *rest: Any) -> Served:
    """Builds the model-free engine, in place of `promptq.worker.serve.build.build`."""
    if settings.model != MODEL_FREE:
        return build(settings, *rest)
    runner = PoisonableRunner(_NUM_BLOCKS, _BLOCK_SIZE, step_seconds=STEP_SECONDS)
    engine = LLMEngine(
        runner,
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        prefill_chunk=32,
    )
    plain = build(settings)
    return Served(
        engine, plain.tokenizer, plain.identity, frozenset({END_TOKEN_ID}), "none", "none"
    )


def main() -> None:
    """Run the command, with `sys.argv` as its arguments."""
    process.build = build_chaotic
    worker.AsyncRequestQueue = NotingQueue
    break_scripts()
    record_scripts()
    run_command()


if __name__ == "__main__":
    main()

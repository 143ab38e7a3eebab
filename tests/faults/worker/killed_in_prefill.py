"""`promptq worker` that is killed in the middle of a long prompt. Run it as a module."""

from __future__ import annotations

import os
import signal

from promptq.worker.__main__ import main
from promptq.worker.engine.core.sequence import Batch
from promptq.worker.engine.runner import model_runner
from promptq.worker.engine.runner.model_runner import ModelRunner, ModelStep

TOKENS_BEFORE = 500
"""Of the prompt that are computed."""


class KilledRunner(ModelRunner):
    def launch(self, batch: Batch, after: ModelStep | None = None) -> ModelStep:
        computed = [share.sequence.num_computed_tokens for share in batch.scheduled]
        if max(computed) >= TOKENS_BEFORE:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().launch(batch, after)


if __name__ == "__main__":
    model_runner.ModelRunner = KilledRunner  # type: ignore[misc]  # a class in the place of another
    main()

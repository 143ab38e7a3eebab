"""`promptq worker` whose model finds no memory any more in the middle of its streams, for good.

Run it as a module.
"""

from __future__ import annotations

import torch

from promptq.worker.__main__ import main
from promptq.worker.engine.core.sequence import Batch
from promptq.worker.engine.runner import model_runner
from promptq.worker.engine.runner.model_runner import ModelRunner, ModelStep

_TOKENS_BEFORE = 20
"""Of each of those that are served together."""


class ShortRunner(ModelRunner):
    is_short = False

    def launch(self, batch: Batch, after: ModelStep | None = None) -> ModelStep:
        lengths = [share.sequence.num_output_tokens for share in batch.scheduled]
        self.is_short = self.is_short or min(lengths) >= _TOKENS_BEFORE
        if self.is_short:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB")
        return super().launch(batch, after)


if __name__ == "__main__":
    model_runner.ModelRunner = ShortRunner  # type: ignore[misc]  # a class in the place of another
    main()

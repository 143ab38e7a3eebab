"""`promptq worker` whose model finds no memory any more in the middle of its streams, for good.

Run it as a module.
"""

from __future__ import annotations

import torch

import worker.__main__ as command
from worker.engine import model_runner
from worker.engine.model_runner import Launched, ModelRunner
from worker.engine.sequence import Batch

_TOKENS_BEFORE = 20
"""Of each of those that are served together."""


class ShortRunner(ModelRunner):
    is_short = False

    def launch(self, batch: Batch, after: Launched | None = None) -> Launched:
        lengths = [share.sequence.num_output_tokens for share in batch.scheduled]
        self.is_short = self.is_short or min(lengths) >= _TOKENS_BEFORE
        if self.is_short:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB")
        return super().launch(batch, after)


if __name__ == "__main__":
    model_runner.ModelRunner = ShortRunner  # type: ignore[misc]  # a class in the place of another
    command.main()

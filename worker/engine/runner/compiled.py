"""Runs the decoder layers through torch.compile, which fuses their small operations.

Each layer is compiled separately, as one graph, in which attention is one operator. Layers of the
same kind share the compiled code. So a model of any depth needs two graphs for each kind of layer.
One graph is for any number of rows. The other is for a single row, because the compiler always
treats this number separately.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from promptq.worker.engine.attention.kv_cache import KVCache
from promptq.worker.engine.attention.packed_step import PackedStep, Packer
from promptq.worker.engine.core.runner import KVLayout
from promptq.worker.engine.load_check.comparison import LOW_PRECISION_TOLERANCE, off_by
from promptq.worker.engine.model.packed_model import PackedModel
from promptq.worker.engine.runner.trial_steps import trial_batch

T = TypeVar("T")

TRIAL_ROWS = 61
"""The number of rows of a trial step. The compiler treats equal sizes as one variable, for example
the number of rows and the size of a head. So this number is prime."""
TOLERANCE = 1e-3
"""The largest accepted median difference in fp32 (see `off_by`). Fused code rounds less often."""
GRAPHS = 32
"""The most graphs of a model. torch's default of 8 is enough for four kinds of layers."""

logger = logging.getLogger(__name__)


class CompiledModel:
    """A model whose decoder layers run compiled. The layers run uncompiled if compiling fails."""

    def __init__(
        self, model: PackedModel, cache: KVCache, max_model_len: int, *, backend: str = "inductor"
    ) -> None:
        """Compile the layers, and compare the result with the uncompiled layers. `backend` is an
        option of torch.compile; "eager" only traces the graphs."""
        self._model = model
        self._layers = model.decoder_layers()
        self._backend = backend
        self._compiled: list[Any] = []  # kept because captured graphs replay their kernels
        self.is_compiled = False
        self._set_up(cache, min(TRIAL_ROWS, max_model_len, cache.num_blocks * cache.block_size))

    def logits(self, step: PackedStep, rows: torch.Tensor) -> torch.Tensor:
        """See `PackedModel.logits`. If a compiled step fails, this step and all later steps run
        uncompiled. The second run writes the K and V of the step again."""
        return self._run(lambda: self._model.logits(step, rows))

    def logits_and_states(
        self, step: PackedStep, rows: torch.Tensor, kept: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `PackedModel.logits_and_states`. Runs compiled, or uncompiled if compiling fails."""
        return self._run(lambda: self._model.logits_and_states(step, rows, kept))

    @torch.inference_mode()
    def _run(self, compute: Callable[[], T]) -> T:
        try:
            return compute()
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            # A capture of a graph cannot continue after an error.
            is_capturing = torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
            if not self.is_compiled or is_capturing:
                raise
            self._give_up(error)
        return compute()

    def undo(self) -> None:
        """Make the layers run uncompiled from now on."""
        self.is_compiled = False
        for layer in self._layers:
            vars(layer).pop("forward", None)

    @torch.inference_mode()
    def _set_up(self, cache: KVCache, num_rows: int) -> None:
        steps = [_step(num_rows, cache), _step(1, cache)]
        expected = [self._all_logits(step) for step in steps]
        tolerance = TOLERANCE if expected[0].dtype == torch.float32 else LOW_PRECISION_TOLERANCE
        try:
            self._compile()
            for step, plain in zip(steps, expected, strict=True):
                off = float(off_by(self._all_logits(step).float(), plain.float()).median())
                # Not `off > tolerance`, which would accept NaN.
                if not off <= tolerance:
                    raise ValueError(f"logits are off by {off:.2g} of their spread")
        except Exception as error:
            self._give_up(error)

    def _all_logits(self, step: PackedStep) -> torch.Tensor:
        num_rows, device = step.input_ids.shape[1], step.input_ids.device
        return self._model.logits(step, torch.arange(num_rows, device=device))

    def _compile(self) -> None:
        if not self._layers:
            raise ValueError("the model has no list of decoder layers")
        config: Any = torch._dynamo.config
        config.recompile_limit = max(config.recompile_limit, GRAPHS)
        self.is_compiled = True
        for layer in self._layers:
            forward = torch.compile(
                layer.forward, dynamic=True, fullgraph=True, backend=self._backend
            )
            self._compiled.append(forward)
            vars(layer)["forward"] = forward

    def _give_up(self, error: Exception) -> None:
        self.undo()
        cause = getattr(error, "inner_exception", error)  # the error of the compiler's backend
        reason = str(cause).strip().split("\n")[0]
        logger.warning("the model runs without torch.compile: %s: %s", type(cause).__name__, reason)


def _step(num_rows: int, cache: KVCache) -> PackedStep:
    layout = KVLayout(cache.num_blocks, cache.block_size, cache.bytes_per_token)
    batch = trial_batch([(num_rows, num_rows)], layout, vocab_size=32)
    return Packer(cache.block_size, cache.layers[0].key.device).pack(batch)

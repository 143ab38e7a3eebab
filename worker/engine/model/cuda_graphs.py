"""Runs steps as CUDA graphs: one launch instead of about a thousand.

A graph works on fixed addresses and for a fixed number of rows. So the inputs of a step are copied
into buffers that stay, and padded to the next size for which a graph was captured. Padding rows are
written nowhere and see nothing (see AttentionBackend.takes_padding); their results are dropped.

There are graphs for steps of decodes alone, and graphs for steps with chunks of prompts (mixed
steps), which have one more kernel a layer. Which rows are decodes and which belong to chunks is
read from work lists on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Protocol

import torch

from promptq.worker.engine.attention.packed_step import PackedStep
from promptq.worker.engine.attention.step_buffers import StepBuffers, StepKind
from promptq.worker.engine.device.memory import bytes_held

MAX_GRAPH_SIZE = 256
"""Larger batches of decodes keep the device busy for longer than their launches take."""
MIXED_SIZES = (16, 32, 64, 128, 192, 256, 384, 512)
"""The numbers of rows of mixed steps, for the same reason."""


class Model(Protocol):
    """What PackedModel offers."""

    def logits(self, step: PackedStep, rows: torch.Tensor) -> torch.Tensor: ...


def graph_kinds(max_num_seqs: int, max_num_batched_tokens: int) -> list[StepKind]:
    """The kinds of steps to capture graphs for. Decodes: a few small ones, then multiples of
    eight."""
    largest = min(max_num_seqs, MAX_GRAPH_SIZE)
    small = [size for size in (1, 2, 4) if size < largest]
    decodes = [*small, *range(8, largest, 8), largest]
    mixed = [size for size in MIXED_SIZES if size <= max_num_batched_tokens]
    return [StepKind(size) for size in decodes] + [StepKind(size, is_mixed=True) for size in mixed]


def graph_bytes(
    kinds: list[StepKind],
    capture: Callable[[list[StepKind]], GraphedModel],
    device: torch.device,
) -> int:
    """An estimate of the memory that the graphs of these kinds take, in bytes.

    The two largest are captured and dropped again. The first holds the results of the
    largest step, in which the smaller steps find room. So each further one is counted as what the
    second one added, which is mostly the driver's own.
    """

    largest, *others = sorted(kinds, reverse=True)
    capture([largest])  # what a first capture sets up stays, and is not a graph's
    first = bytes_held(device, lambda: capture([largest]))
    if not others:
        return first
    both = bytes_held(device, lambda: capture([largest, others[0]]))
    return first + len(others) * max(0, both - first)


class GraphedModel:
    """A model on CUDA whose steps are padded to one of some kinds and replayed as graphs.

    Its backend must take padding. Steps that are larger than all kinds run without a graph. So does
    every step of a model that cannot be captured, for example one whose forward waits for the
    device. The device is this thread's current one (see `on_device`).
    """

    def __init__(
        self,
        model: Model,
        kinds: list[StepKind],
        *,
        max_num_seqs: int,
        max_model_len: int,
        block_size: int,
        device: torch.device,
    ) -> None:
        self.plain = model
        self._buffers = StepBuffers(kinds, max_num_seqs, max_model_len, block_size, device)
        self._runs: dict[StepKind, Callable[[], torch.Tensor]] = {}
        self.why_no_graphs = ""
        """Why no step is replayed; empty if steps are."""
        self._prepare(kinds, device)

    @torch.inference_mode()
    def logits(self, step: PackedStep, rows: torch.Tensor) -> torch.Tensor:
        """See PackedModel. The result is valid until the next call, which writes to the same
        place."""
        fitting = (kind for kind in self._runs if self._buffers.fits(step, len(rows), kind))
        kind = min(fitting, default=None)
        if kind is None:
            return self.plain.logits(step, rows)
        self._buffers.fill(step, rows, kind)
        return self._runs[kind]()[: len(rows)]

    @torch.inference_mode()
    def _prepare(self, kinds: list[StepKind], device: torch.device) -> None:
        """Capture the largest first, so that the smaller graphs fit into its memory."""
        capture = _Capture(self.plain)
        for kind in sorted(kinds, reverse=True):
            try:
                self._runs[kind] = capture.of(*self._buffers.step(kind))
            except RuntimeError as error:
                self.why_no_graphs = str(error).split("\n")[0]
                self._runs.clear()
                return


class _Capture:
    """Captures the steps of one model, one after the other: on one stream, into one pool of
    memory, and with one place to which all graphs write their logits."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        self._pool = torch.cuda.graph_pool_handle()
        self._logits: torch.Tensor | None = None

    def of(self, step: PackedStep, rows: torch.Tensor) -> Callable[[], torch.Tensor]:
        """What replays the step and gives its logits. Raises RuntimeError if it cannot be captured.

        A capture that fails leaves the allocator in a state that has to be mended. So a step that
        waits for the device is found before.
        """
        caller = torch.cuda.current_stream()
        self._stream.wait_stream(caller)
        with torch.cuda.stream(self._stream):
            self._model.logits(step, rows)  # compiles kernels, and sets up libraries
            with _no_waiting():
                logits = self._model.logits(step, rows)
        caller.wait_stream(self._stream)
        if self._logits is None:
            self._logits = torch.empty_like(logits)
        target = self._logits[: len(rows)]
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
                target.copy_(self._model.logits(step, rows))
        except RuntimeError:
            torch.cuda.set_stream(caller)
            with suppress(RuntimeError):  # it was ended after all
                torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), self._pool)
            raise

        def replay() -> torch.Tensor:
            graph.replay()
            return target

        return replay


@contextmanager
def _no_waiting() -> Iterator[None]:
    """Have torch raise RuntimeError where the host would wait for the device."""
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)

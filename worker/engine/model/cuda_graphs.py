"""Runs decode steps as CUDA graphs: one launch instead of about a thousand.

A graph works on fixed addresses and for a fixed number of rows. So the inputs of a step are copied
into buffers that stay, and padded to the next size for which a graph was captured. Padding rows are
written nowhere and see nothing (see AttentionBackend.takes_padding); their results are dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Protocol

import torch

from promptq.worker.engine.attention.backend import DECODE_WORK, StepLayout
from promptq.worker.engine.attention.decode_work import DecodeWork
from promptq.worker.engine.attention.packed_step import PackedStep
from promptq.worker.engine.core.block_manager import num_blocks_for
from promptq.worker.engine.device.memory import bytes_held

MAX_GRAPH_SIZE = 256
"""Larger batches keep the device busy for longer than their launches take."""


class Model(Protocol):
    """What PackedModel offers."""

    def logits(self, step: PackedStep, rows: torch.Tensor) -> torch.Tensor: ...


def graph_sizes(max_num_seqs: int) -> list[int]:
    """The numbers of rows to capture graphs for: a few small ones, then multiples of eight."""
    largest = min(max_num_seqs, MAX_GRAPH_SIZE)
    return [size for size in (1, 2, 4) if size < largest] + [
        *range(8, largest, 8),
        largest,
    ]


def graph_bytes(
    model: Model, sizes: list[int], max_model_len: int, block_size: int, device: torch.device
) -> int:
    """An estimate of the memory that a GraphedModel of these sizes takes, in bytes.

    Graphs are captured for the two largest sizes and dropped again. The first holds the results of
    the largest step, in which the smaller steps find room. So each further size is counted as what
    the second one added, which is mostly the driver's own.
    """

    def held(sizes: list[int]) -> int:
        return bytes_held(
            device,
            lambda: GraphedModel(
                model,
                sizes=sizes,
                max_model_len=max_model_len,
                block_size=block_size,
                device=device,
            ),
        )

    largest, *others = sorted(sizes, reverse=True)
    first = held([largest])
    if not others:
        return first
    return first + len(others) * max(0, held([largest, others[0]]) - first)


@dataclass(frozen=True, slots=True)
class DecodeBuffers:
    """The inputs of decode steps, at addresses that stay the same."""

    input_ids: torch.Tensor  # [max_num_seqs]
    positions: torch.Tensor  # [max_num_seqs]
    write_blocks: torch.Tensor  # [max_num_seqs]; -1: written nowhere
    write_offsets: torch.Tensor  # [max_num_seqs]
    block_tables: torch.Tensor  # [max_num_seqs, max_blocks]
    work: DecodeWork  # of contexts up to max_model_len; 0: a padding row
    block_size: int

    @classmethod
    def of(
        cls, max_num_seqs: int, max_model_len: int, block_size: int, device: torch.device
    ) -> DecodeBuffers:
        def zeros(*shape: int) -> torch.Tensor:
            return torch.zeros(*shape, dtype=torch.int64, device=device)

        return cls(
            input_ids=zeros(max_num_seqs),
            positions=zeros(max_num_seqs),
            write_blocks=zeros(max_num_seqs) - 1,
            write_offsets=zeros(max_num_seqs),
            block_tables=zeros(max_num_seqs, num_blocks_for(max_model_len, block_size)),
            work=DecodeWork([max_model_len] * max_num_seqs, device),
            block_size=block_size,
        )

    def fill(self, step: PackedStep, size: int) -> None:
        """Copy the inputs of a step, and pad it to `size` rows."""
        layout = step.layout
        num_rows, width = layout.block_tables.shape
        self.input_ids[:num_rows] = step.input_ids[0]
        self.positions[:num_rows] = step.positions[0]
        self.write_blocks[:num_rows] = layout.write_blocks
        self.write_offsets[:num_rows] = layout.write_offsets
        self.block_tables[:num_rows, :width] = layout.block_tables
        for buffer, nothing in (
            (self.input_ids, 0),
            (self.positions, 0),
            (self.write_blocks, -1),
        ):
            buffer[num_rows:size] = nothing
        self.work.fill([*layout.context_lens, *[0] * (size - num_rows)])

    def step(self, size: int) -> PackedStep:
        """A step whose inputs are the first `size` rows of the buffers, whatever they hold. Until
        they are filled again, its rows see nothing."""
        self.work.fill([0] * size)
        longest = self.block_tables.shape[1] * self.block_size
        layout = StepLayout(
            num_decodes=size,
            query_starts=list(range(size + 1)),
            context_lens=[longest] * size,
            block_tables=self.block_tables[:size],
            write_blocks=self.write_blocks[:size],
            write_offsets=self.write_offsets[:size],
            block_size=self.block_size,
            plans={DECODE_WORK: self.work},
        )
        return PackedStep([], self.input_ids[None, :size], self.positions[None, :size], layout)


class GraphedModel:
    """A model on CUDA whose decode steps are padded to one of `sizes` and replayed as graphs.

    Its backend must take padding. Steps with chunks of prompts, and batches that are too large, run
    without a graph. So does every step of a model that cannot be captured, for example one whose
    forward waits for the device. The device is this thread's current one (see `on_device`).
    """

    def __init__(
        self,
        model: Model,
        *,
        sizes: list[int],
        max_model_len: int,
        block_size: int,
        device: torch.device,
    ) -> None:
        self._model = model
        self._buffers = DecodeBuffers.of(max(sizes), max_model_len, block_size, device)
        self._runs: dict[int, Callable[[], torch.Tensor]] = {}
        self.why_no_graphs = ""
        """Why no step is replayed; empty if steps are."""
        self._prepare(sizes, device)

    @torch.inference_mode()
    def logits(self, step: PackedStep, rows: torch.Tensor) -> torch.Tensor:
        """See PackedModel."""
        size = self._size_for(step)
        if size is None:
            return self._model.logits(step, rows)
        self._buffers.fill(step, size)
        # This is a copy, because the next step writes its logits to the same place.
        return self._runs[size]().index_select(0, rows)

    def _size_for(self, step: PackedStep) -> int | None:
        num_rows = step.layout.num_decodes
        if num_rows < len(step.layout.context_lens):
            return None
        return min((size for size in self._runs if size >= num_rows), default=None)

    @torch.inference_mode()
    def _prepare(self, sizes: list[int], device: torch.device) -> None:
        """Capture the largest first, so that the smaller graphs fit into its memory."""
        capture = _Capture(self._model)
        for size in sorted(sizes, reverse=True):
            step, rows = self._buffers.step(size), torch.arange(size, device=device)
            try:
                self._runs[size] = capture.of(step, rows)
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

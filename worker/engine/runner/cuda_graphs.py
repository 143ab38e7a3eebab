"""Runs steps as CUDA graphs: one launch instead of about a thousand.

A graph has fixed addresses and a fixed number of rows. So the inputs of a step are copied into
permanent buffers, and padded to the next size for which a graph was captured. Padding rows write
and read no K and V (see AttentionBackend.takes_padding), and their results are dropped.

Some graphs are for decodes only. Other graphs are for steps with chunks of prompts (mixed steps),
and have one more kernel per layer. Work lists on the device describe the decodes and the chunks.

A graph ends with the choice of tokens, and reads the random numbers and parameters from the device.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any, Protocol

import torch

from promptq.worker.engine.attention.packed_step import Lists, PackedStep
from promptq.worker.engine.attention.step_buffers import StepBuffers, StepKind
from promptq.worker.engine.attention.types import StepLayout
from promptq.worker.engine.device.memory import bytes_held
from promptq.worker.engine.recurrent.state_pool import StatePool
from promptq.worker.engine.sampling.temperature_and_choice import DRAWS, Chosen

MAX_GRAPH_SIZE = 256
"""The most rows of a graph for decodes. In larger steps, computing takes longer than launching."""
MIXED_SIZES = (16, 32, 64, 128, 192, 256, 384, 512)
"""Row counts of graphs for mixed steps. In larger steps, computing takes longer than launching."""

Choose = Callable[[torch.Tensor, torch.Tensor], Chosen]
"""A function that chooses tokens from logits [S, vocab_size] and draws [len(DRAWS), S]."""
Results = tuple[torch.Tensor, Chosen | None]
"""The logits of a step, and the tokens that its graph chose (None if no graph chose tokens)."""


class Model(Protocol):
    """The methods of PackedModel that graphs use."""

    def logits(self, step: PackedStep, rows: torch.Tensor) -> torch.Tensor: ...

    def logits_and_states(
        self, step: PackedStep, rows: torch.Tensor, kept: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]: ...


def graph_kinds(max_num_seqs: int, max_num_batched_tokens: int) -> list[StepKind]:
    """Returns the kinds of steps to capture. Steps of decodes have the sizes 1, 2 and 4, then
    multiples of eight. Mixed steps have the sizes MIXED_SIZES."""
    largest = min(max_num_seqs, MAX_GRAPH_SIZE)
    small = [size for size in (1, 2, 4) if size < largest]
    decodes = [*small, *range(8, largest, 8), largest]
    mixed = [size for size in MIXED_SIZES if size <= max_num_batched_tokens]
    return [StepKind(size) for size in decodes] + [StepKind(size, is_mixed=True) for size in mixed]


def graph_bytes(
    kinds: list[StepKind], capture: Callable[[list[StepKind]], GraphedModel], device: torch.device
) -> int:
    """Returns an estimate of the bytes that the graphs of these kinds take.

    Captures the two largest graphs and drops them again. The memory of the first graph includes the
    results of the largest step, and smaller steps reuse this memory. So each further graph counts
    like the second graph, which needs mostly memory for the driver.
    """
    largest, *others = sorted(kinds, reverse=True)
    capture([largest])  # in a first capture, libraries allocate memory that is not a graph's
    first = bytes_held(device, lambda: capture([largest]))
    if not others:
        return first
    both = bytes_held(device, lambda: capture([largest, others[0]]))
    return first + len(others) * max(0, both - first)


def new_stream() -> torch.cuda.Stream:
    stream: torch.cuda.Stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]  # in torch
    return stream


class GraphedModel:
    """A model on CUDA whose steps are padded to one of `kinds` and replayed as graphs.

    The model's backend must support padding. Steps that are larger than all kinds run without a
    graph. No step has a graph if the model cannot be captured, for example because its modules wait
    for the device. The device must be this thread's current device (see `on_device`). Without
    `choose`, the graphs end with the logits. Several instances may capture on one `stream`. That
    saves memory, because libraries allocate some memory for each stream.
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
        choose: Choose | None = None,
        stream: torch.cuda.Stream | None = None,
        states: StatePool | None = None,
    ) -> None:
        """`states` is the state pool of the model's recurrent layers; None without such layers."""
        self.plain = model
        self._states = states
        self._choose = choose
        self._stream = stream
        self._buffers = StepBuffers(
            kinds, max_num_seqs, max_model_len, block_size, device, len(DRAWS)
        )
        self._runs: dict[StepKind, Callable[[], Results]] = {}
        self.why_no_graphs = ""
        """The reason why no step is replayed as a graph; empty if steps are replayed."""
        self._prepare(kinds)

    def logits(self, step: PackedStep, rows: torch.Tensor) -> torch.Tensor:
        """See `PackedModel.logits`. The next call overwrites the result."""
        return self.run(step, rows)[0]

    def logits_and_states(
        self, step: PackedStep, rows: torch.Tensor, kept: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `PackedModel.logits_and_states`. Runs no graph, so the step must not be padded."""
        return self.plain.logits_and_states(step, rows, kept)

    @torch.inference_mode()
    def run(self, step: PackedStep, rows: torch.Tensor) -> Results:
        """Returns the logits of `rows`, and the tokens that the graph chose from the logits with
        the step's draws. If no graph was replayed, the tokens are None."""
        kind = self._kind(step.layout, len(rows))
        if kind is None:
            return self.plain.logits(step, rows), None
        entries = None if self._states is None else self._states.begin(step.items).table
        self._buffers.fill(step, rows, kind, entries)
        logits, chosen = self._runs[kind]()
        if self._states is not None:
            self._states.finish(step.items)
        if chosen is not None:
            token_ids, is_sound = chosen
            chosen = token_ids[: len(rows)], is_sound[: len(rows)]
        return logits[: len(rows)], chosen

    def lists(self, layout: StepLayout, num_sampled: int) -> Lists | None:
        """Returns the work lists of a step; None if the step will not be padded. Has the type
        PaddedLists."""
        kind = self._kind(layout, num_sampled)
        return None if kind is None else self._buffers.lists(layout, kind)

    def _kind(self, layout: StepLayout, num_sampled: int) -> StepKind | None:
        fitting = (kind for kind in self._runs if self._buffers.fits(layout, num_sampled, kind))
        return min(fitting, default=None)

    @torch.inference_mode()
    def _prepare(self, kinds: list[StepKind]) -> None:
        """Capture the largest graph first, so that the smaller graphs fit into its memory."""
        capture = _Capture(self.plain, self._choose, self._stream)
        for kind in sorted(kinds, reverse=True):
            try:
                self._runs[kind] = capture.of(self._buffers.step(kind))
            except RuntimeError as error:
                self.why_no_graphs = str(error).split("\n")[0]
                self._runs.clear()
                return


class _Capture:
    """Captures steps as CUDA graphs that share a stream, a memory pool and a tensor of logits."""

    def __init__(
        self, model: Model, choose: Choose | None, stream: torch.cuda.Stream | None
    ) -> None:
        self._model = model
        self._choose = choose
        self._stream = stream or new_stream()
        self._pool = torch.cuda.graph_pool_handle()
        self._logits: torch.Tensor | None = None

    def of(self, step: PackedStep) -> Callable[[], Results]:
        """Returns a function that replays the step. Raises RuntimeError if capturing fails. A
        failed capture breaks the allocator, so a trial run first detects a step that waits for the
        device."""
        caller = torch.cuda.current_stream()
        self._stream.wait_stream(caller)
        with torch.cuda.stream(self._stream):
            self._run(step)  # compiles kernels, and sets up libraries
            with _no_waiting():
                logits, _ = self._run(step)
        caller.wait_stream(self._stream)
        if self._logits is None:
            self._logits = torch.empty_like(logits)
        target = self._logits[: len(logits)]
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
                results = self._run(step, target)
        except RuntimeError:
            torch.cuda.set_stream(caller)
            with suppress(RuntimeError):  # the capture had ended after all
                torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), self._pool)
            raise

        def replay() -> Results:
            graph.replay()
            return results

        return replay

    def _run(self, step: PackedStep, target: torch.Tensor | None = None) -> Results:
        """Compute a step. Writes the logits to `target` if there is one."""
        logits = self._model.logits(step, step.sampled)
        if target is not None:
            logits = target.copy_(logits)
        return logits, None if self._choose is None else self._choose(logits, step.draws)


@contextmanager
def _no_waiting() -> Iterator[None]:
    """In this block, make torch raise RuntimeError where the host would wait for the device."""
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Synchronization debug mode")  # a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


def on_device(device: torch.device) -> AbstractContextManager[Any]:
    """Returns a context in which `device`, if it is a CUDA device, is the thread's current device.
    Triton's kernels, streams, graphs and events use the current device, not their tensors' device.
    """
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()

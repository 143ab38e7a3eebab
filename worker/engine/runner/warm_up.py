"""Runs dummy steps at startup, to set up libraries and kernels, and to try the largest step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

import torch

from promptq.shared.errors import UnsupportedModelError
from promptq.shared.protocol.request import NEUTRAL, SamplingParams
from promptq.worker.engine.core.sequence import Batch
from promptq.worker.engine.core.step_plan import most_reported_rows
from promptq.worker.engine.decoders.native import NativeDecoder
from promptq.worker.engine.runner.cuda_graphs import GraphedModel
from promptq.worker.engine.runner.model_runner import ModelRunner
from promptq.worker.engine.runner.trial_steps import (
    MOST_SAMPLING,
    SAMPLING,
    Shares,
    kinds_of_steps,
    largest_step,
    most_padded_step,
    trial_batch,
)

PROMPT_TOKENS = 64


@torch.inference_mode()
def warm_up(runner: ModelRunner) -> None:
    """Run a few dummy steps, because libraries set up some parts in a first step. Sets the runner's
    `is_row_invariant` and `embedding_size`."""
    num_tokens = min(_kv_tokens(runner), runner.max_model_len, PROMPT_TOKENS)
    last_rows = []
    for count in (num_tokens, min(num_tokens, 2), 1):
        if first := num_tokens - count:  # recurrent layers need the states before
            _last_row(runner, (first, first))
        last_rows.append(_last_row(runner, (num_tokens, count)))
    runner.collect(runner.launch(_trial(runner, [(1, 1)], vocab_size=runner.vocab_size)))
    # On a GPU the number of rows selects a product, and steps may have many more rows. In
    # transformers' recurrent layers, sums depend on where steps cut a prompt.
    is_same = all(torch.equal(last_rows[0], row) for row in last_rows)
    is_on_cpu = runner.device.type == "cpu"
    is_native = isinstance(runner.model, NativeDecoder)
    runner.is_row_invariant = is_same and is_on_cpu and (is_native or runner.states is None)
    with suppress(UnsupportedModelError):  # this model makes no vectors
        step = runner.packer.pack(_trial(runner, [(1, 1)]))
        _, states = runner.model.logits_and_states(step, step.sampled, step.sampled)
        runner.embedding_size = states.shape[1]


def warm_up_kinds(runner: ModelRunner, max_num_batched_tokens: int, max_num_seqs: int) -> None:
    """Run each kind of step and of sampling once, because a kernel is compiled at its first launch.
    The largest step comes last, to test that enough memory is free beside the KV cache.

    Steps run without CUDA graphs, because the kernels of graphs were compiled during the capture.
    """
    served = runner.model
    runner.model = served.plain if isinstance(served, GraphedModel) else served
    try:
        for batch in _kinds(runner, max_num_batched_tokens, max_num_seqs):
            runner.collect(runner.launch(batch))
    finally:
        runner.model = served


def largest_steps(
    runner: ModelRunner, num_tokens: int, num_seqs: int, max_context: int
) -> Iterator[Batch]:
    """Yields the steps that take the most memory. See `largest_step`."""
    kinds = (largest_step,) if runner.states is None else (most_padded_step, largest_step)
    max_reported_rows = most_reported_rows(runner.vocab_size)
    for shares_of in kinds:
        shares = shares_of(num_tokens, num_seqs, max_context)
        yield _trial(runner, shares, MOST_SAMPLING, max_reported_rows)


def _last_row(runner: ModelRunner, share: tuple[int, int]) -> torch.Tensor:
    """Returns the logits of the last row of a dummy step with one share."""
    batch = _trial(runner, [share], vocab_size=runner.vocab_size)
    row = torch.tensor([share[1] - 1], device=runner.device)
    return runner.model.logits(runner.packer.pack(batch), row).clone()


def _kinds(runner: ModelRunner, max_num_batched_tokens: int, max_num_seqs: int) -> Iterator[Batch]:
    kv_tokens = _kv_tokens(runner)
    length = min(runner.max_model_len, kv_tokens)
    for shares in kinds_of_steps(max_num_batched_tokens, max_num_seqs, length):
        yield _trial(runner, shares)
    decodes = [(1, 1)] * min(max_num_seqs, max_num_batched_tokens)
    for params in SAMPLING:
        for shares in (decodes[:1], decodes):
            yield _trial(runner, shares, params)
    context = min(length, max(1, kv_tokens // max_num_seqs))
    yield from largest_steps(runner, max_num_batched_tokens, max_num_seqs, context)


def _kv_tokens(runner: ModelRunner) -> int:
    return runner.kv_layout.num_blocks * runner.kv_layout.block_size


def _trial(
    runner: ModelRunner,
    shares: Shares,
    params: SamplingParams = NEUTRAL,
    max_reported_rows: int = 0,
    vocab_size: int = 2,
) -> Batch:
    """Returns a `trial_batch` for the runner. Launch the batch before you build the next batch."""
    batch = trial_batch(shares, runner.kv_layout, params, max_reported_rows, vocab_size)
    if runner.states is not None:
        runner.states.assume(batch.scheduled)
    return batch

"""Runs batches through a transformers model on the paged KV cache."""

from __future__ import annotations

import logging
import resource
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from promptq.worker.engine.api.messages import LEAST, EngineAbilities, PromptLogprobs
from promptq.worker.engine.attention.kv_cache import KVCache
from promptq.worker.engine.attention.packed_step import (
    NO_DRAWS,
    NOWHERE,
    PackedStep,
    Packer,
    no_padding,
)
from promptq.worker.engine.attention.step_buffers import StepKind
from promptq.worker.engine.core.runner import KVLayout, SampledToken
from promptq.worker.engine.core.sequence import Batch, ScheduledSequence, Sequence
from promptq.worker.engine.device.async_copies import HostCopies, to_device
from promptq.worker.engine.device.precision import has_fast_bf16_products
from promptq.worker.engine.load_check.checked_model import CheckedModel
from promptq.worker.engine.model.loading import LoadedModel, LoadOptions
from promptq.worker.engine.model.packed_model import PackedModel
from promptq.worker.engine.recurrent.state_pool import num_kept_states, pool_bytes
from promptq.worker.engine.runner.compiled import CompiledModel
from promptq.worker.engine.runner.cuda_graphs import (
    GraphedModel,
    Model,
    graph_kinds,
    new_stream,
    on_device,
)
from promptq.worker.engine.runner.head_drafts import HeadDrafts, code_of_head
from promptq.worker.engine.sampling.mask_thread import Masks
from promptq.worker.engine.sampling.sampler import Sampler, SamplerOutput

MOST_LIKELIEST = 20
"""Number of likeliest tokens for each prompt row with log-probabilities. The number is fixed, so
that the choice between equally likely tokens does not depend on other requests."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PooledStates:
    """Final hidden states for embedding vectors, while they are copied to the host."""

    shares: list[ScheduledSequence]
    copies: HostCopies
    """One tensor [sum of `num_pooled`, hidden size], fp32, with rows in the order of `shares`."""

    def hand_out(self) -> None:
        """Wait for the copies, and set the `states` of each share to the share's rows."""
        (states,) = self.copies.arrays()
        end = 0
        for share in self.shares:
            begin, end = end, end + share.num_pooled
            share.states = states[begin:end]


@dataclass(frozen=True, slots=True)
class ModelStep:
    """A launched step. `sampled` is None if the step samples nothing."""

    sampled: SamplerOutput | None
    counts: list[int]
    """Number of sampled rows of each sequence."""
    sequences: list[Sequence]
    """The sequence of each sampled row."""
    reported: HostCopies | None = None
    """Log-probabilities of prompt tokens, as in ChosenLogprobs; None if no prompt reports any."""
    reported_of: list[tuple[int, int]] = field(default_factory=list)
    """For each prompt: the number of reported rows, and of likeliest tokens in each row."""
    pooled: PooledStates | None = None

    @property
    def sampled_at(self) -> dict[int, int]:
        """Maps each sequence id to the index of the sequence's last token among the tokens that
        this step samples."""
        return {sequence.sequence_id: row for row, sequence in enumerate(self.sequences)}

    def fill_in(self, step: PackedStep) -> None:
        """Copy this step's sampled tokens into the unknown inputs of the next `step`."""
        if self.sampled is not None:
            rows, places = step.unknown
            tokens = self.sampled.token_ids.index_select(0, places)
            step.input_ids[0].index_copy_(0, rows, tokens)


class ModelRunner:
    """The runner that serves real models. Implements `Runner`."""

    def __init__(
        self,
        loaded: LoadedModel,
        checked: CheckedModel,
        cache: KVCache,
        max_model_len: int,
        options: LoadOptions,
        *,
        native_sampling: bool,
        head_cache: KVCache | None = None,
    ) -> None:
        self.end_token_ids = loaded.end_token_ids
        self.device = loaded.model.device
        self.dtype = loaded.model.dtype
        self.cache = cache
        num_slots = options.max_num_seqs
        self.kv_layout = KVLayout(
            cache.num_blocks,
            cache.block_size,
            cache.bytes_per_token + (head_cache.bytes_per_token if head_cache else 0),
            num_slots if checked.mixers else None,
            num_kept_states(num_slots),
            pool_bytes(checked.mixers, num_slots),
            states_skip_drafts=checked.decoder is not None,
        )
        self.vocab_size: int = loaded.text_config.vocab_size
        self.max_model_len = max_model_len
        model = checked.on(loaded.model, cache, max_model_len, num_slots=num_slots, releases=True)
        self.model: Model = model
        self.states = model.states
        self.compiled: CompiledModel | None = None
        """The compiled model; None if compiling was not tried."""
        if options.compile and self.states is not None:
            logger.warning("the model runs without torch.compile: it has recurrent layers")
        elif options.compile and isinstance(model, PackedModel):
            self.model = self.compiled = CompiledModel(model, cache, max_model_len)
        if options.cuda_graphs and self.device.type == "cuda" and checked.takes_padding:
            self.model = self.capturing(options)(
                graph_kinds(options.max_num_seqs, options.max_num_batched_tokens)
            )
        self.why_no_own_code = checked.why_no_own_code
        self.saved_format = loaded.format
        """Name of the files' quantization; empty if they are not quantized."""
        self.verdict = checked.verdict
        self.packer = Packer(cache.block_size, self.device)
        self._sampler = Sampler(self.vocab_size, self.device, native=native_sampling)
        self._masks = Masks(self.device)
        self.embedding_size = 0  # known once the model has run
        self.is_row_invariant = False
        """Whether the bits of a row's logits do not depend on other rows. Set by `warm_up`."""
        self.why_no_head = loaded.why_no_head
        """Why the head in the files does not draft; empty if it drafts, or if there is no head."""
        self._head_work: float | None = None
        self._drafts: HeadDrafts | None = None
        if loaded.head is not None and head_cache is not None:
            head = code_of_head(loaded, checked, model, head_cache)
            self._head_work = loaded.head.work
            sampler = Sampler(self.vocab_size, self.device, native=native_sampling)
            self._drafts = HeadDrafts(head, head_cache, sampler, self.device)

    def capturing(self, options: LoadOptions) -> Callable[[list[StepKind]], GraphedModel]:
        """Returns a function that captures CUDA graphs for steps of the given kinds."""
        # Backends that take padding need Triton, which is not installed everywhere.
        from promptq.worker.engine.sampling.triton_choice import choose_tokens

        return partial(
            GraphedModel,
            self.model,
            max_num_seqs=options.max_num_seqs,
            max_model_len=self.max_model_len,
            block_size=self.kv_layout.block_size,
            device=self.device,
            choose=choose_tokens,
            stream=new_stream(),
            states=self.states,
        )

    def launch(self, batch: Batch, after: ModelStep | None = None) -> ModelStep:
        """See `Runner.launch`. On CUDA, the work is only queued. On a CPU, the work is done on
        return."""
        with on_device(self.device), torch.inference_mode():
            return self._launch(batch, after)

    def _launch(self, batch: Batch, after: ModelStep | None) -> ModelStep:
        drafts = self._drafts
        if drafts is not None:
            drafts.draft(batch)
        sampling = batch.sampling
        counts = [item.num_samples for item in sampling]
        sequences = [item.sequence for item in sampling for _ in range(item.num_samples)]
        masks = self._masks.start(sequences)  # computed while the model runs
        num_ahead = [item.num_ahead + row for item in sampling for row in range(item.num_samples)]
        draws = self._sampler.draws(sequences, num_ahead) if sampling else NO_DRAWS
        model, chosen, pooled, kept = self.model, None, None, None
        pools = any(item.num_pooled for item in batch.scheduled)
        reporting = batch.reporting
        feeds_head = drafts is not None and any(item.feeds_head for item in batch.scheduled)
        if (pools or reporting or feeds_head) and isinstance(model, GraphedModel):
            model = model.plain  # graphs return only the logits of sampled rows
        step = self.packer.pack(
            batch,
            draws,
            sampled_at=NOWHERE if after is None else after.sampled_at,
            padded_lists=model.lists if isinstance(model, GraphedModel) else no_padding,
        )
        if after is not None:
            after.fill_in(step)
        rows = step.sampled
        if step.reported is not None:
            rows = torch.cat([rows, step.reported[0]])
        if pools or feeds_head:
            kept_rows = pooled_rows = step.pooled_rows
            if drafts is not None and feeds_head:
                kept_rows = pooled_rows + drafts.rows_to_keep(step.items, step.layout.query_starts)
            logits, states = model.logits_and_states(step, rows, to_device(kept_rows, self.device))
            if pools:
                shares = [item for item in step.items if item.num_pooled]
                pooled = PooledStates(shares, HostCopies([states[: len(pooled_rows)].float()]))
            if feeds_head:  # a slice would keep the pooled states in memory
                kept = states[len(pooled_rows) :].clone() if pooled_rows else states
        elif isinstance(model, GraphedModel):
            logits, chosen = model.run(step, rows)
        else:
            logits = model.logits(step, rows)
        if drafts is not None:
            drafts.keep(step.items, kept)
        reported: HostCopies | None = None
        if step.reported is not None:
            num_sampled = len(step.sampled)
            of_prompts, following = logits[num_sampled:], step.reported[1]
            reported = self._sampler.report(of_prompts, following, MOST_LIKELIEST)
            logits = logits[:num_sampled]
        reported_of = [
            (len(item.reported_rows), item.sequence.request.params.prompt_logprobs or 0)
            for item in reporting
        ]
        if not sampling:
            return ModelStep(None, counts, sequences, reported, reported_of, pooled)
        last_tokens = None  # the host knows them
        if after is not None:
            last_tokens = step.input_ids[0].index_select(0, step.sampled)
        sampled = self._sampler.sample(
            logits,
            sequences,
            masks,
            num_ahead,
            last_tokens=last_tokens,
            draws=step.draws,
            chosen=chosen,
        )
        return ModelStep(sampled, counts, sequences, reported, reported_of, pooled)

    def collect(self, launched: ModelStep) -> list[list[SampledToken]]:
        with on_device(self.device):
            tokens = iter(launched.sampled.tokens() if launched.sampled is not None else [])
            if launched.pooled is not None:
                launched.pooled.hand_out()
        return [[*islice(tokens, count)] for count in launched.counts]

    def prompt_logprobs(self, launched: ModelStep) -> list[PromptLogprobs]:
        if launched.reported is None:
            return []
        with on_device(self.device):
            logprobs, ranks, top_ids, top_logprobs = launched.reported.arrays()
        reports, start = [], 0
        for num_rows, num_top in launched.reported_of:
            rows, start = slice(start, start + num_rows), start + num_rows
            reports.append(
                PromptLogprobs(
                    _finite(logprobs[rows]),
                    ranks[rows].copy(),
                    top_ids[rows, :num_top].copy(),
                    _finite(top_logprobs[rows, :num_top]),
                )
            )
        return reports

    @property
    def abilities(self) -> EngineAbilities:
        """The abilities of an engine with this runner. The value is right only after `warm_up`."""
        is_exact = self.is_row_invariant or self.dtype == torch.float32
        unheeded = frozenset[str]() if self.embedding_size else frozenset({"embed"})
        return EngineAbilities(exact_resume=is_exact, unheeded=unheeded, head_work=self._head_work)

    @property
    def own_code(self) -> str:
        """Name of promptq's code for this device, even if transformers' modules serve the model."""
        return "fused kernels" if self.device.type == "cuda" else "native code"

    @property
    def why_no_graphs(self) -> str:
        """The reason why requested CUDA graphs could not be captured; empty if there is none."""
        return self.model.why_no_graphs if isinstance(self.model, GraphedModel) else ""

    @property
    def is_slow_in_bf16(self) -> bool:
        """Whether this runner computes in bf16 and would be many times faster in fp32."""
        is_torch_on_cpu = bool(self.why_no_own_code) and self.device.type == "cpu"
        return is_torch_on_cpu and self.dtype == torch.bfloat16 and not has_fast_bf16_products()

    def peak_memory_bytes(self) -> int:
        """Returns the peak of allocated memory in bytes: torch's on a CUDA device, or this
        process's on a CPU."""
        if self.device.type == "cuda":
            return int(torch.cuda.max_memory_allocated(self.device))
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024


def _finite(logprobs: Any) -> npt.NDArray[np.float32]:
    """Returns a copy with LEAST in place of -inf and NaN, which JSON lacks."""
    finite: npt.NDArray[np.float32] = np.fmax(logprobs, np.float32(LEAST))  # also of NaN
    return finite

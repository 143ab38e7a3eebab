"""Runs batches through a transformers model on the paged KV cache."""

from __future__ import annotations

import logging
import resource
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from promptq.shared.errors import ConfigurationError, UnsupportedModelError
from promptq.shared.protocol.request import NEUTRAL, SamplingParams
from promptq.worker.engine.api.messages import LEAST, EngineAbilities, PromptLogprobs
from promptq.worker.engine.api.port import Progress, unheard
from promptq.worker.engine.attention.kv_cache import KVCache, bytes_per_token
from promptq.worker.engine.attention.kv_cache_size import MIN_BLOCKS, fitting_blocks
from promptq.worker.engine.attention.packed_step import (
    NO_DRAWS,
    NOWHERE,
    PackedStep,
    Packer,
    no_padding,
)
from promptq.worker.engine.attention.step_buffers import StepKind
from promptq.worker.engine.core.runner import KVLayout, SampledToken
from promptq.worker.engine.core.scheduler import most_reported_rows
from promptq.worker.engine.core.sequence import Batch, ScheduledSequence, Sequence
from promptq.worker.engine.decoders.native import NativeDecoder, release
from promptq.worker.engine.device.async_copies import HostCopies, to_device
from promptq.worker.engine.device.memory import (
    MemoryPeak,
    counts_memory,
    free_bytes,
    give_back,
)
from promptq.worker.engine.device.precision import has_fast_bf16_products
from promptq.worker.engine.load_check.checked_model import CheckedModel, Verdict
from promptq.worker.engine.load_check.formula import check_model
from promptq.worker.engine.load_check.rounded import Expectation, check_packed
from promptq.worker.engine.model.backend_choice import (
    TURNED_OFF,
    backends_on,
    decoder_of_saved_weights,
    own_decoders,
    resolve_device,
    why_no_native_code,
)
from promptq.worker.engine.model.loading import LoadedModel, LoadOptions, load_model
from promptq.worker.engine.model.model_length import model_length
from promptq.worker.engine.model.packed_model import PackedModel
from promptq.worker.engine.recurrent.state_pool import num_kept_states, pool_bytes
from promptq.worker.engine.runner.compiled import CompiledModel
from promptq.worker.engine.runner.cuda_graphs import (
    GraphedModel,
    Model,
    graph_bytes,
    graph_kinds,
    new_stream,
    on_device,
)
from promptq.worker.engine.runner.head_drafts import (
    HeadDrafts,
    attention_of_head,
    code_of_head,
)
from promptq.worker.engine.runner.quantizing import (
    check_quantization,
    is_quantized,
    quantize,
    rounding_options,
)
from promptq.worker.engine.runner.trial_steps import (
    MOST_SAMPLING,
    SAMPLING,
    Shares,
    kinds_of_steps,
    largest_step,
    most_padded_step,
    trial_batch,
)
from promptq.worker.engine.sampling.mask_thread import Masks
from promptq.worker.engine.sampling.sampler import Sampler, SamplerOutput

LENGTH_WITHOUT_LIMIT = 8192
"""The model length for a model without a limit, if the options set none."""

WARM_UP_TOKENS = 64
MOST_LIKELIEST = 20
"""Number of likeliest tokens that are computed for each reported row of a prompt. With a fixed
number, the choice between equally likely tokens does not depend on other requests."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PooledStates:
    """Final hidden states that become part of vectors, while they are copied to the host."""

    shares: list[ScheduledSequence]
    copies: HostCopies
    """Copies of one tensor [sum of `num_pooled`, hidden size], fp32, in the order of `shares`."""

    def hand_out(self) -> None:
        """Wait for the states, and store each share's in `states`."""
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
    """The sequence of each row."""
    reported: HostCopies | None = None
    """Log-probabilities of prompts, as the columns of ChosenLogprobs; None if there are none."""
    reported_of: list[tuple[int, int]] = field(default_factory=list)
    """For each prompt: number of reported rows, and of likeliest tokens in each."""
    pooled: PooledStates | None = None

    @property
    def sampled_at(self) -> dict[int, int]:
        """For each sequence id, the place of its last token among the tokens sampled here."""
        return {sequence.sequence_id: row for row, sequence in enumerate(self.sequences)}

    def fill_in(self, step: PackedStep) -> None:
        """Write the tokens sampled here into the inputs of `step`, which begins with them."""
        if self.sampled is not None:
            rows, places = step.unknown
            tokens = self.sampled.token_ids.index_select(0, places)
            step.input_ids[0].index_copy_(0, rows, tokens)


class ModelRunner:
    """The runner that serves real models (see Runner)."""

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
        self._cache = cache
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
        self._model: Model = model
        self._states = model.states
        self.compiled: CompiledModel | None = None
        """Set if the options request compiling and the library's modules compute."""
        if options.compile and self._states is not None:
            logger.warning("the model runs without torch.compile: it has recurrent layers")
        elif options.compile and isinstance(model, PackedModel):
            self._model = self.compiled = CompiledModel(model, cache, max_model_len)
        if options.cuda_graphs and self.device.type == "cuda" and checked.takes_padding:
            self._model = self._capturing(options)(_graph_kinds(options))
        self.why_no_own_code = checked.why_no_own_code
        self.saved_format = loaded.format
        """Name of the files' quantization; empty if they are not quantized."""
        self.verdict = checked.verdict
        self._packer = Packer(cache.block_size, self.device)
        self._sampler = Sampler(self.vocab_size, self.device, native=native_sampling)
        self._masks = Masks(self.device)
        self.embedding_size = 0  # known once the model has run
        self.is_row_invariant = False
        """Whether a token's logits are equal to the last bit with any rows beside it. Known once
        the model has run."""
        self.why_no_head = loaded.why_no_head
        """Why the head in the files does not draft; empty if it does, or if there is none."""
        self._head_cost: float | None = None
        self._drafts: HeadDrafts | None = None
        if loaded.head is not None and head_cache is not None:
            head = code_of_head(loaded, checked, model, head_cache)
            self._head_cost = loaded.head.cost
            sampler = Sampler(self.vocab_size, self.device, native=native_sampling)
            self._drafts = HeadDrafts(head, head_cache, sampler, self.device)

    @classmethod
    def load(
        cls,
        name_or_dir: str,
        options: LoadOptions,
        progress: Progress = unheard,
        known: Verdict | None = None,
    ) -> ModelRunner:
        """Load a model, check that it is served correctly, and allocate its cache.

        Calls `progress` with each stage. `known` is the verdict of an earlier load of the same
        files with the same options. Raises ModelNotFoundError, UnsupportedModelError or
        ConfigurationError, with one sentence that names the fault.
        """
        device = resolve_device(options.device)
        backends_on(device, options.attention)  # raises before anything is loaded
        check_quantization(options, device)
        progress("weights")
        with on_device(device):
            loaded = load_model(
                name_or_dir,
                device=device,
                dtype=options.dtype,
                trust_remote_code=options.trust_remote_code,
                decoder=decoder_of_saved_weights(device, options),
                with_head=device.type == "cpu" if options.drafts is None else options.drafts,
            )
        return cls.of(loaded, options, progress, known)

    @classmethod
    def of(
        cls,
        loaded: LoadedModel,
        options: LoadOptions,
        progress: Progress = unheard,
        known: Verdict | None = None,
    ) -> ModelRunner:
        """Builds a runner from a loaded model, with the model's device and dtype."""
        with on_device(loaded.model.device):
            return cls._of(loaded, options, progress, known)

    @classmethod
    def _of(
        cls, loaded: LoadedModel, options: LoadOptions, progress: Progress, known: Verdict | None
    ) -> ModelRunner:
        device = loaded.model.device
        backends = backends_on(device, options.attention)
        limit = model_length(loaded, None)
        length = model_length(loaded, options.max_model_len) or LENGTH_WITHOUT_LIMIT
        progress("native code")
        no_native_code = why_no_native_code(loaded) if options.native else TURNED_OFF
        progress("checking")
        decoders, why_none = own_decoders(device, options, no_native_code)
        checked = check_model(
            loaded, backends, limit, decoders=decoders, why_no_own_code=why_none, known=known
        )
        if is_quantized(loaded, options):
            progress("quantizing")
            checked = quantize(loaded, checked, options, is_known=checked.is_known)
        if checked.decoder is not None:
            checked.decoder.arrange(loaded.model)
        give_back(device)
        reserved_bytes = 0
        if counts_memory(device) and options.kv_cache_memory is None:
            progress("largest step")
            with _refusing_shortage("--max-num-batched-tokens", "the memory beside the weights"):
                reserved_bytes = cls._bytes_beside_cache(loaded, checked, length, options)
            give_back(device)
        progress("KV cache")
        loaded, specs_of_head = attention_of_head(loaded, checked, options.drafts)
        num_blocks = fitting_blocks(
            [*checked.specs, *specs_of_head],
            block_size=options.block_size,
            memory_bytes=options.kv_cache_memory,
            wanted_tokens=options.max_num_seqs * length,
            device=device,
            reserved_bytes=reserved_bytes,
            state_bytes=pool_bytes(checked.mixers, options.max_num_seqs),
        )
        cache = KVCache(
            checked.specs, num_blocks=num_blocks, block_size=options.block_size, device=device
        )
        head_cache: KVCache | None = None
        if specs_of_head:
            head_cache = KVCache(
                specs_of_head, num_blocks=num_blocks, block_size=options.block_size, device=device
            )
        length = min(length, num_blocks * options.block_size)  # bounds the size of block tables
        progress("compiling" if options.compile and checked.why_no_own_code else "packing")
        expected: Expectation | None = None
        if checked.decoder is not None and checked.decoder.unpacked and not checked.is_known:
            expected = Expectation.of(loaded, checked, cache, length)
        runner = cls(
            *(loaded, checked, cache, length, options),
            native_sampling=not no_native_code,
            head_cache=head_cache,
        )
        if isinstance(runner._model, NativeDecoder):
            if expected is not None:
                rounding = rounding_options(options)
                check_packed(loaded, runner._model, cache, expected, rounding)
            release(loaded.model.modules())
            release(loaded.head.module.modules() if loaded.head is not None else ())
        give_back(device)  # memory that captures took besides the graphs
        progress("warm-up")
        with _refusing_shortage("--kv-cache-memory", "what the KV cache leaves free"):
            runner._warm_up()
            if counts_memory(device):
                runner.warm_up_kinds(options.max_num_batched_tokens, options.max_num_seqs)
        return runner

    @classmethod
    def _bytes_beside_cache(
        cls, loaded: LoadedModel, checked: CheckedModel, length: int, options: LoadOptions
    ) -> int:
        """Returns the bytes of CUDA memory that the largest step and the graphs need. Runs them on
        a cache of a few blocks."""
        device, block_size = loaded.model.device, options.block_size
        fitting_tokens = free_bytes(device) // max(1, bytes_per_token(checked.specs))
        context = min(length, max(1, fitting_tokens // options.max_num_seqs))
        peak = MemoryPeak(device)
        cache = KVCache(checked.specs, num_blocks=MIN_BLOCKS, block_size=block_size, device=device)
        plain = replace(options, compile=False, cuda_graphs=False)
        runner = cls(loaded, checked, cache, length, plain, native_sampling=False)
        for batch in runner._largest(options.max_num_batched_tokens, options.max_num_seqs, context):
            runner.collect(runner.launch(batch))
        needed = peak.bytes() - runner.kv_layout.state_bytes
        if options.cuda_graphs and checked.takes_padding:
            needed += graph_bytes(_graph_kinds(options), runner._capturing(options), device)
        checked.leave()  # otherwise its modules keep this cache in memory
        return needed

    def _capturing(self, options: LoadOptions) -> Callable[[list[StepKind]], GraphedModel]:
        """Returns a function that captures graphs of the model for some kinds of steps."""
        # Backends that take padding need Triton, which is not installed everywhere.
        from promptq.worker.engine.sampling.triton_choice import choose_tokens

        return partial(
            GraphedModel,
            self._model,
            max_num_seqs=options.max_num_seqs,
            max_model_len=self.max_model_len,
            block_size=self.kv_layout.block_size,
            device=self.device,
            choose=choose_tokens,
            stream=new_stream(),
        )

    def launch(self, batch: Batch, after: ModelStep | None = None) -> ModelStep:
        """See Runner. On CUDA the work is queued; on a CPU it is done on return."""
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
        model, chosen, pooled, kept = self._model, None, None, None
        pools = any(item.num_pooled for item in batch.scheduled)
        reporting = batch.reporting
        feeds_head = drafts is not None and drafts.needs_states(batch.scheduled)
        if (pools or reporting or feeds_head) and isinstance(model, GraphedModel):
            model = model.plain  # graphs return the logits of sampled rows alone
        step = self._packer.pack(
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
            if drafts is not None:
                kept_rows = pooled_rows + drafts.rows_to_keep(step.items, step.layout.query_starts)
            logits, states = model.logits_and_states(step, rows, to_device(kept_rows, self.device))
            if pools:
                shares = [item for item in step.items if item.num_pooled]
                pooled = PooledStates(shares, HostCopies([states[: len(pooled_rows)].float()]))
            kept = states[len(pooled_rows) :]
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
        sampled = self._sampler.sample(
            logits,
            sequences,
            masks,
            num_ahead,
            last_tokens=step.input_ids[0].index_select(0, step.sampled),
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

    @torch.inference_mode()
    def _warm_up(self) -> None:
        """Prefill and decode once, because libraries set up some parts only in a first step."""
        layout = self.kv_layout
        kv_tokens = layout.num_blocks * layout.block_size
        num_tokens = min(kv_tokens, self.max_model_len, WARM_UP_TOKENS)
        last_rows = []
        for count in (num_tokens, min(num_tokens, 2), 1):
            if first := num_tokens - count:  # recurrent layers need the states before
                self._last_row((first, first))
            last_rows.append(self._last_row((num_tokens, count)))
        self.collect(self.launch(self._trial([(1, 1)], vocab_size=self.vocab_size)))
        # On a GPU products are chosen by the number of rows, and steps may have many more. In the
        # library's form of a recurrent layer, sums depend on where steps cut a prompt.
        is_same = all(torch.equal(last_rows[0], row) for row in last_rows)
        is_on_cpu = self.device.type == "cpu"
        is_native = isinstance(self._model, NativeDecoder)
        self.is_row_invariant = is_same and is_on_cpu and (is_native or self._states is None)
        with suppress(UnsupportedModelError):  # this model makes no vectors
            step = self._packer.pack(self._trial([(1, 1)]))
            _, states = self._model.logits_and_states(step, step.sampled, step.sampled)
            self.embedding_size = states.shape[1]

    def _last_row(self, share: tuple[int, int]) -> torch.Tensor:
        """Returns the logits of the last row of a trial step with one share."""
        batch = self._trial([share], vocab_size=self.vocab_size)
        row = torch.tensor([share[1] - 1], device=self.device)
        return self._model.logits(self._packer.pack(batch), row).clone()

    def warm_up_kinds(self, max_num_batched_tokens: int, max_num_seqs: int) -> None:
        """Run each kind of step and of sampling once, because kernels are compiled when they are
        first launched. The largest step comes last, now that the cache takes its memory.

        Graphs are left out: their kernels were compiled when they were captured."""
        served = self._model
        self._model = served.plain if isinstance(served, GraphedModel) else served
        try:
            for batch in self._kinds(max_num_batched_tokens, max_num_seqs):
                self.collect(self.launch(batch))
        finally:
            self._model = served

    def _kinds(self, max_num_batched_tokens: int, max_num_seqs: int) -> Iterator[Batch]:
        layout = self.kv_layout
        kv_tokens = layout.num_blocks * layout.block_size
        length = min(self.max_model_len, kv_tokens)
        for shares in kinds_of_steps(max_num_batched_tokens, max_num_seqs, length):
            yield self._trial(shares)
        decodes = [(1, 1)] * min(max_num_seqs, max_num_batched_tokens)
        for params in SAMPLING:
            for shares in (decodes[:1], decodes):
                yield self._trial(shares, params)
        context = min(length, max(1, kv_tokens // max_num_seqs))
        yield from self._largest(max_num_batched_tokens, max_num_seqs, context)

    def _largest(self, *sizes: int) -> Iterator[Batch]:
        """Yields the steps that take the most memory. `sizes` are those of `largest_step`."""
        kinds = (largest_step,) if self._states is None else (most_padded_step, largest_step)
        for shares_of in kinds:
            yield self._trial(shares_of(*sizes), MOST_SAMPLING, most_reported_rows(self.vocab_size))

    def _trial(
        self,
        shares: Shares,
        params: SamplingParams = NEUTRAL,
        max_reported_rows: int = 0,
        vocab_size: int = 2,
    ) -> Batch:
        """Returns a `trial_batch`, which must be launched before the next one is made."""
        batch = trial_batch(shares, self.kv_layout, params, max_reported_rows, vocab_size)
        if self._states is not None:
            self._states.pretend(batch.scheduled)
        return batch

    @property
    def abilities(self) -> EngineAbilities:
        """See Runner. Known once the model has run."""
        is_exact = self.is_row_invariant or self.dtype == torch.float32
        unheeded = frozenset[str]() if self.embedding_size else frozenset({"embed"})
        return EngineAbilities(exact_resume=is_exact, unheeded=unheeded, head_cost=self._head_cost)

    @property
    def own_code(self) -> str:
        """Name of promptq's code for this device, whether or not it serves the model."""
        return "fused kernels" if self.device.type == "cuda" else "native code"

    @property
    def why_no_graphs(self) -> str:
        """Why steps are not replayed as CUDA graphs, if the options request it; else empty."""
        return self._model.why_no_graphs if isinstance(self._model, GraphedModel) else ""

    @property
    def is_slow_in_bf16(self) -> bool:
        """Whether this runner computes in bf16 and would be many times faster in fp32."""
        is_torch_on_cpu = bool(self.why_no_own_code) and self.device.type == "cpu"
        return is_torch_on_cpu and self.dtype == torch.bfloat16 and not has_fast_bf16_products()

    def peak_memory_bytes(self) -> int:
        """The peak memory of the device on CUDA, or of the whole process on a CPU."""
        if self.device.type == "cuda":
            return int(torch.cuda.max_memory_allocated(self.device))
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024


def _finite(logprobs: Any) -> npt.NDArray[np.float32]:
    """Returns a copy with LEAST in place of -inf and NaN, which JSON does not have."""
    finite: npt.NDArray[np.float32] = np.fmax(logprobs, np.float32(LEAST))  # also of NaN
    return finite


def _graph_kinds(options: LoadOptions) -> list[StepKind]:
    return graph_kinds(options.max_num_seqs, options.max_num_batched_tokens)


@contextmanager
def _refusing_shortage(option: str, where: str) -> Iterator[None]:
    """Turn a lack of memory for a step into a ConfigurationError that names the option."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise ConfigurationError(
            f"{option}: the largest step does not fit into {where}; a smaller"
            f" --max-num-batched-tokens or --max-num-seqs also helps"
        ) from error

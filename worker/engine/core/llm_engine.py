"""Continuous batching: each step is scheduled, launched, collected and committed."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import replace
from statistics import median
from typing import Any, NamedTuple

from promptq.shared.errors import ConfigurationError
from promptq.worker.engine.api.limit_checks import check_request, check_settings
from promptq.worker.engine.api.messages import (
    EngineLimits,
    EngineRequest,
    EngineSnapshot,
    EngineStats,
    GivenBack,
    SequenceOutput,
    SequenceSnapshot,
    StepOutput,
)
from promptq.worker.engine.core.block_manager import BlockManager
from promptq.worker.engine.core.committing import Committer, failed
from promptq.worker.engine.core.drafting import Drafter, DraftPolicy
from promptq.worker.engine.core.failed_steps import (
    Collected,
    StepRecovery,
    collect,
    is_out_of_memory,
)
from promptq.worker.engine.core.kept_states import KeptStates
from promptq.worker.engine.core.prefill_pacing import Pacing
from promptq.worker.engine.core.runner import Runner
from promptq.worker.engine.core.scheduler import Scheduler
from promptq.worker.engine.core.sequence import Batch, Sequence, SequenceStatus
from promptq.worker.engine.core.step_plan import most_reported_rows

_AUDIT_INTERVAL_SECONDS = 1.0
"""The least seconds between two audits. An audit takes 0.1 µs for each block."""
_SMALL_STEPS = 256
"""Number of steps with fewer sequences after a step that ran out of memory."""
_MOST_SHORTAGES = 6
"""The engine gives a sequence back after memory was short this many times for it alone."""
_PAUSE_SECONDS = 0.05
"""Seconds before the next try if no sequence had enough memory. Doubles with each shortage."""
_STEPS_SHOWN = 32
"""The reported step time is the median of this many steps."""
_NO_MEMORY = GivenBack("there is too little memory even for a single request")


class _Step(NamedTuple):
    batch: Batch
    launched: Any  # what the runner returned for the batch


class LLMEngine:
    """The engine around a runner. Implements `Engine` of api/port.py.

    `max_model_len` is lowered to the capacity of the model and its KV cache. `prefill_chunk` is the
    most tokens of one prompt in a step, by default the whole token budget of a step.
    `speculative_tokens` is the most tokens that are drafted for a sequence in a step, unless a
    request sets another number. With `async_scheduling`, the engine launches a step before it
    collects the tokens of the previous step. This helps if the runner computes in the background.
    Results for sequences that ended after the launch are dropped. With `share_prefix_cache`,
    tenants share cached prefixes.

    The constructor raises ConfigurationError, which names the option that cannot work.
    """

    def __init__(
        self,
        runner: Runner,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        prefill_chunk: int | None = None,
        max_model_len: int | None = None,
        speculative_tokens: int = 0,
        async_scheduling: bool = False,
        share_prefix_cache: bool = False,
    ) -> None:
        layout = runner.kv_layout
        kv_tokens = layout.num_blocks * layout.block_size
        lengths = (runner.max_model_len, kv_tokens, max_model_len)
        self.limits = EngineLimits(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=min(length for length in lengths if length is not None),
            kv_tokens=kv_tokens,
            block_size=layout.block_size,
            bytes_per_token=layout.bytes_per_token,
            state_bytes=layout.state_bytes,
            vocab_size=runner.vocab_size,
            embedding_size=runner.embedding_size,
        )
        check_settings(self.limits)
        has_states = layout.num_states is not None
        if layout.num_states is not None and layout.num_states < max_num_seqs:
            raise ConfigurationError(
                f"--max-num-seqs: {max_num_seqs} is more than the {layout.num_states} sequences for"
                " which the recurrent layers have states"
            )
        self.abilities = runner.abilities
        self._runner = runner
        # No state can be restored after a rejected draft, or behind a step that failed.
        self._speculative_tokens = speculative_tokens
        self._may_draft = not has_states or layout.states_skip_drafts
        self._draft_policy = DraftPolicy(self.abilities.head_work, recomputes=has_states)
        self._async_scheduling = async_scheduling and not has_states
        self._under_way: _Step | None = None
        self._uncommitted: Batch | None = None  # the work of a failed step
        self._full_steps_from = 0  # the step from which on steps have full size again
        self._block_manager = BlockManager(
            layout.num_blocks,
            layout.block_size,
            shares_tenants=share_prefix_cache,
            kept_states=KeptStates(layout.num_kept_states) if has_states else None,
        )
        self._scheduler = Scheduler(
            max_num_seqs,
            max_num_batched_tokens,
            prefill_chunk or max_num_batched_tokens,
            self._block_manager,
            most_reported_rows(runner.vocab_size),
        )
        self._recovery = StepRecovery(runner, self._commit, self._leave, self._set_back)
        self._pacing = Pacing()
        self._sequences: dict[int, Sequence] = {}
        self._totals = EngineStats(num_blocks=layout.num_blocks)
        self._next_audit_at = 0.0
        self._committer = Committer(self._block_manager, self._totals, has_states=has_states)
        self._last_steps: deque[float] = deque(maxlen=_STEPS_SHOWN)

    @property
    def has_work(self) -> bool:
        return bool(self._sequences)

    @property
    def stats(self) -> EngineStats:
        running = self._scheduler.running
        num_used_blocks = self._block_manager.num_used
        return replace(
            self._totals,
            num_running=len(running),
            num_waiting=len(self._scheduler.waiting),
            num_used_blocks=num_used_blocks,
            num_saved_blocks=sum(len(each.block_table) for each in running) - num_used_blocks,
            num_cached_blocks=self._block_manager.num_cached,
            num_preemptions=self._scheduler.num_preemptions,
            cached_tokens=self._scheduler.num_cached_tokens,
        )

    def add(self, request: EngineRequest) -> None:
        if request.sequence_id in self._sequences:
            raise ValueError(f"sequence_id: {request.sequence_id} is in the engine already")
        check_request(request, self.limits)
        sequence = Sequence.of(request, self.limits.max_model_len)
        sequence.drafter = self._drafter_for(sequence)
        self._sequences[request.sequence_id] = sequence
        self._scheduler.add(sequence)

    def abort(self, sequence_id: int) -> bool:
        sequence = self._sequences.get(sequence_id)
        if sequence is None:
            return False
        self._release(sequence)
        self._check_integrity_when_idle()
        return True

    def step(self) -> StepOutput:
        """Schedule, compute and commit one step. Returns the outputs of its sequences.

        If the runner raises an exception, nothing is committed: no sequence gains a token, and the
        next step schedules the same work. `recover` finds the sequence that caused the failure.
        """
        self._uncommitted = None
        if not self.has_work:
            return StepOutput([], self.stats)
        started_at = time.perf_counter()
        step, self._under_way = self._under_way or self._launch(), None
        self._uncommitted = step.batch
        following = self._launch_after(step) if self._async_scheduling else None
        collected = collect(self._runner, step.batch, step.launched)
        self._uncommitted = None
        outputs = self._commit(step.batch, collected)
        self._under_way = following
        self._totals.num_steps += 1
        self._totals.step_seconds = time.perf_counter() - started_at
        self._totals.busy_seconds += self._totals.step_seconds
        self._last_steps.append(self._totals.step_seconds)
        self._pacing.note(step.batch, self._totals.step_seconds)
        self._draft_policy.note(step.batch, self._totals.step_seconds)
        if self._totals.num_steps == self._full_steps_from:
            self._scheduler.max_num_batched_tokens = self.limits.max_num_batched_tokens
            self._scheduler.max_running = self.limits.max_num_seqs
        self._check_integrity_when_idle()
        return StepOutput(outputs, self.stats)

    def recover(self, error: Exception) -> StepOutput:
        if self._uncommitted is None:
            raise error
        batch, self._uncommitted, self._under_way = self._uncommitted, None, None
        if is_out_of_memory(error):
            smaller = max(self.limits.max_num_seqs, batch.num_tokens // 2)
            self._scheduler.max_num_batched_tokens = smaller
            self._full_steps_from = self._totals.num_steps + _SMALL_STEPS
        shares = [s for s in batch.scheduled if s.sequence.status is SequenceStatus.RUNNING]
        outputs = self._recovery.compute(shares) if shares else []
        if waiting := [s.sequence for s in shares if s.sequence.status is SequenceStatus.WAITING]:
            self._run_fewer(waiting)
        self._check_integrity_when_idle()
        return StepOutput(outputs, self.stats)

    def snapshot(self) -> EngineSnapshot:
        snapshot = EngineSnapshot(
            step_seconds=median(self._last_steps) if self._last_steps else 0.0,
            peak_memory_bytes=self._runner.peak_memory_bytes(),
        )
        shared: set[int] = set()
        by_slot = sorted(self._scheduler.running, key=lambda sequence: sequence.slot or 0)
        for sequence in (*by_slot, *self._scheduler.waiting):
            shared_here = self._block_manager.shared_blocks(sequence)
            shared.update(shared_here)
            snapshot.sequences.append(
                SequenceSnapshot(
                    sequence_id=sequence.sequence_id,
                    slot=sequence.slot,
                    num_tokens=sequence.num_tokens,
                    num_computed_tokens=sequence.num_computed_tokens,
                    num_blocks=len(sequence.block_table),
                    num_shared_blocks=len(shared_here),
                    timing=sequence.timing.copy(),
                )
            )
        snapshot.num_shared_blocks = len(shared)
        return snapshot

    def check_integrity(self) -> None:
        scheduler = self._scheduler
        scheduler.check_integrity()
        self._block_manager.check_integrity(scheduler.running)
        scheduled = sorted(each.sequence_id for each in (*scheduler.waiting, *scheduler.running))
        if scheduled != sorted(self._sequences):
            raise RuntimeError(
                f"the engine holds sequences {sorted(self._sequences)} "
                f"and its scheduler {scheduled}"
            )

    def _launch(self) -> _Step:
        batch = self._scheduler.schedule(self._pacing.chunk, self._pacing.prompt_tokens)
        self._uncommitted = batch
        return _Step(batch, self._runner.launch(batch))

    def _launch_after(self, step: _Step) -> _Step | None:
        """Launch the next step while `step` runs. Returns None if it cannot be planned yet."""
        pacing = self._pacing
        batch = self._scheduler.follow(step.batch, pacing.chunk, pacing.prompt_tokens)
        if batch is None:
            return None
        return _Step(batch, self._runner.launch(batch, after=step.launched))

    def _set_back(self, sequence: Sequence) -> bool:
        sequence.num_shortages += 1
        if sequence.num_shortages == _MOST_SHORTAGES:
            return False
        self._scheduler.set_back(sequence)
        return True

    def _run_fewer(self, set_back: list[Sequence]) -> None:
        """Limit the running sequences in the next steps to the number that had enough memory."""
        num_running = len(self._scheduler.running)
        self._scheduler.max_running = max(1, num_running)
        self._full_steps_from = self._totals.num_steps + _SMALL_STEPS
        if not num_running:
            most = max(sequence.num_shortages for sequence in set_back)
            time.sleep(_PAUSE_SECONDS * 2 ** (most - 1))

    def _leave(self, sequence: Sequence, error: str | None) -> SequenceOutput:
        if error is None:
            output = SequenceOutput(sequence.sequence_id, [], given_back=_NO_MEMORY)
        else:
            output = failed(sequence, error)
        return self._end(sequence, output)

    def _end(self, sequence: Sequence, last_output: SequenceOutput) -> SequenceOutput:
        last_output.timing = sequence.timing
        self._release(sequence)
        return last_output

    def _drafter_for(self, sequence: Sequence) -> Drafter | None:
        """Returns the drafter of a sequence. Returns None if the request or the model allows no
        drafts, or if the choice of a token depends on earlier tokens (see `looks_back`)."""
        request = sequence.request
        limit = request.params.speculative_tokens
        max_drafted = self._speculative_tokens if limit is None else limit
        if max_drafted == 0 or not self._may_draft or request.looks_back or request.pooling:
            return None
        begin = sequence.num_prompt_tokens + request.params.min_tokens
        end = sequence.max_num_tokens
        return Drafter(max_drafted, begin=begin, end=end, policy=self._draft_policy)

    def _commit(self, batch: Batch, collected: Collected) -> list[SequenceOutput]:
        outputs = []
        for sequence, output in self._committer.commit(batch, collected):
            if output.finish_reason is not None:
                self._end(sequence, output)
            outputs.append(output)
        return outputs

    def _release(self, sequence: Sequence) -> None:
        self._scheduler.remove(sequence)
        del self._sequences[sequence.sequence_id]
        self._totals.num_processed += 1

    def _check_integrity_when_idle(self) -> None:
        if not self.has_work and time.monotonic() >= self._next_audit_at:
            self.check_integrity()
            self._next_audit_at = time.monotonic() + _AUDIT_INTERVAL_SECONDS

"""Decides what a step computes: which sequences continue, are admitted, or are preempted."""

from __future__ import annotations

import heapq
import time
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, takewhile
from operator import attrgetter
from typing import Any, NamedTuple

from promptq.worker.engine.core.block_manager import BlockManager
from promptq.worker.engine.core.drafting import MAX_ROWS, UNKNOWN
from promptq.worker.engine.core.sequence import Batch, Sequence, SequenceStatus
from promptq.worker.engine.core.step_plan import StepPlan, can_plan_next
from promptq.worker.engine.core.tenant_shares import (
    TenantCounts,
    TenantShares,
    beyond_their_share,
    last_of_most,
)


class _Room(NamedTuple):
    """Room for a waiting sequence: its cached prefix, and the sequences to preempt for it."""

    prefix: list[int]
    victims: list[Sequence]


_order, _urgency = attrgetter("order"), attrgetter("urgency")

_Preemptible = Callable[[Sequence, int], Iterable[Sequence]]
"""Returns running sequences to preempt, in order, for a waiting one that needs n blocks."""


class Scheduler:
    """Chooses the sequences that run in each step, and how many tokens of each sequence the step
    computes.

    In each step at least one sequence makes progress, for three reasons. The most urgent running
    sequence is never preempted. If no sequence runs, the first waiting sequence is admitted. And
    the engine accepts no sequence that needs more than its whole memory.
    """

    def __init__(
        self,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        prefill_chunk: int,
        block_manager: BlockManager,
        max_reported_rows: int = 1,
    ) -> None:
        """`max_reported_rows` limits the prompt rows for which a step reports log-probabilities,
        because each row needs logits over the whole vocabulary."""
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_running = max_num_seqs  # fewer than the slots while memory is short
        self.prefill_chunk = prefill_chunk
        self.max_reported_rows = max_reported_rows
        self.block_manager = block_manager
        self.waiting: list[Sequence] = []  # in the queue's order
        self.running: list[Sequence] = []  # most urgent first
        self.num_preemptions = 0
        self.num_cached_tokens = 0  # of prompts, when first scheduled
        self._waiting_by_urgency: list[Sequence] = []
        self._tenants_waiting, self._tenants_running = TenantCounts(), TenantCounts()
        self._free_slots = list(range(max_num_seqs))  # a heap: the lowest is reused first
        # Blocks that an admission leaves free for the next tokens of the other sequences, so that
        # the admission does not cause a preemption at once.
        self._watermark = max(1, block_manager.num_blocks // 100)
        # The last sequence that lacked room, and the `num_gained` of blocks at which it may fit.
        self._without_room: tuple[int | None, int] = None, 0

    def add(self, sequence: Sequence) -> None:
        sequence.status = SequenceStatus.WAITING
        insort(self.waiting, sequence, key=_order)
        insort(self._waiting_by_urgency, sequence, key=_urgency)
        self._tenants_waiting.add(sequence.request.tenant)

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence for good. The sequence's slot and blocks are free on return."""
        self._withdraw(sequence)
        sequence.status = SequenceStatus.FINISHED

    def set_back(self, sequence: Sequence) -> None:
        """Preempt a running sequence: return the sequence to its position among the waiting
        sequences. The computed blocks stay cached until they are evicted, so the sequence can
        resume cheaply."""
        self._withdraw(sequence)
        sequence.num_computed_tokens = 0
        sequence.timing.preemptions += 1
        sequence.timing.preempted_at.append(time.monotonic())
        self.num_preemptions += 1
        self.add(sequence)

    def schedule(
        self, long_prompt_chunk: int | None = None, prompt_tokens: int | None = None
    ) -> Batch:
        """Plan a step, decodes first. If the step is not computed, the next call plans the same
        work again.

        In a step with decodes, a long prompt gets at most `long_prompt_chunk` tokens, and all
        prompts together get at most `prompt_tokens`.
        """
        plan = self._new_plan(long_prompt_chunk)
        self._continue_running(plan, prompt_tokens)
        for sequence, room in self._ahead_of_order(plan):
            self._admit(sequence, room, plan)
        for sequence, room in self._in_order(plan):
            if plan.num_tokens_left == 0:
                break
            self._admit(sequence, room, plan)
        self._draft(plan)
        if plan.keeps_states:
            for sequence, share in plan.shares.items():
                self.block_manager.reserve_state(sequence, share.start + share.num_tokens)
        return Batch(list(plan.shares.values()))

    def follow(
        self, batch: Batch, long_prompt_chunk: int | None = None, prompt_tokens: int | None = None
    ) -> Batch | None:
        """Plan the step after `batch` before the tokens of `batch` are known. The plan has the next
        chunks of prompts, and one more decode of each sequence that samples and may continue.

        Returns None if a waiting sequence may be admitted, or if the plan depends on the tokens.
        """
        shares = {
            share.sequence: share
            for share in batch.scheduled
            if share.sequence.status is SequenceStatus.RUNNING
        }
        if not all(map(can_plan_next, shares.values())):
            return None
        plan = self._new_plan(long_prompt_chunk)
        prefilling: dict[Sequence, int] = {}
        for sequence in self.running:
            share = shares.get(sequence)
            start = (
                sequence.num_computed_tokens if share is None else share.start + share.num_tokens
            )
            if start < sequence.num_tokens:
                prefilling[sequence] = start
            elif start + 1 < sequence.max_num_tokens:
                if not self.block_manager.extend(sequence, 1):
                    return None
                plan.give(sequence, start)
        plan.limit_prompts(prompt_tokens)
        for sequence in self._tenants_running.in_turn([*prefilling]):
            plan.give(sequence, prefilling[sequence])
        admissible = chain(self._ahead_of_order(plan), self._in_order(plan))
        if not plan.shares or next(admissible, None) is not None:
            return None
        return Batch(list(plan.shares.values()))

    def check_integrity(self) -> None:
        """Audit slots and queues. Raises RuntimeError, which names the inconsistency."""
        slots = [sequence.slot for sequence in self.running if sequence.slot is not None]
        if sorted(slots + self._free_slots) != list(range(self.max_num_seqs)):
            raise RuntimeError(f"slots: owned {slots} and free {self._free_slots} do not add up")
        for sequence in self.running:
            if sequence.status is not SequenceStatus.RUNNING or sequence.slot is None:
                raise RuntimeError(f"sequence {sequence.sequence_id} runs without slot or status")
        for sequence in self.waiting:
            if sequence.status is not SequenceStatus.WAITING or sequence.slot is not None:
                raise RuntimeError(f"sequence {sequence.sequence_id} waits with a slot or status")
            if sequence.block_table:
                raise RuntimeError(f"sequence {sequence.sequence_id} waits and holds blocks")
        if {*map(id, self.waiting)} != {*map(id, self._waiting_by_urgency)}:
            raise RuntimeError("waiting by order and waiting by urgency are not the same sequences")

    def _new_plan(self, long_prompt_chunk: int | None) -> StepPlan:
        return StepPlan(
            self.max_num_batched_tokens,
            self.prefill_chunk,
            long_prompt_chunk or self.prefill_chunk,
            self.block_manager.block_size,
            self.max_reported_rows,
            keeps_states=self.block_manager.kept_states is not None,
        )

    @property
    def _num_places(self) -> int:
        """Number of sequences that may still be admitted."""
        return min(len(self._free_slots), self.max_running - len(self.running))

    def _continue_running(self, plan: StepPlan, prompt_tokens: int | None) -> None:
        prefilling = []
        for sequence in list(self.running):
            if sequence.slot is None:
                continue  # preempted for a sequence before it
            if not sequence.decodes:
                prefilling.append(sequence)
                continue
            while not self.block_manager.extend(sequence):
                victim = self._next_to_make_room()
                self._preempt(victim, plan)
                if victim is sequence:
                    break
            else:
                plan.give(sequence)
        plan.limit_prompts(prompt_tokens)
        for sequence in self._tenants_running.in_turn(prefilling):
            if sequence.slot is not None:
                plan.give(sequence)

    def _next_to_make_room(self) -> Sequence:
        """Returns the running sequence to preempt when memory is short. Among the least urgent
        sequences, chooses the last one of the tenant with the largest share. Returns the most
        urgent sequence only if it runs alone."""
        if len(self._tenants_running) < 2:
            return self.running[-1]
        return last_of_most(self.running, self._shares())

    def _ahead_of_order(self, plan: StepPlan) -> Iterator[tuple[Sequence, _Room]]:
        """Yields waiting sequences that can join this plan ahead of the queue's order: first
        sequences that are more urgent than a running one, then sequences of tenants that run
        nothing. The caller must admit each sequence before taking the next."""
        while (sequence := self._next_urgent()) is not None:
            if (room := self._find_room(sequence, plan, self._less_urgent)) is None:
                break
            yield sequence, room
        for newcomer in self._newcomers():
            if (room := self._find_room(newcomer, plan, self._beyond_their_share)) is not None:
                yield newcomer, room

    def _in_order(self, plan: StepPlan) -> Iterator[tuple[Sequence, _Room]]:
        """Yields waiting sequences that can join this plan, in the queue's order. The caller must
        admit each sequence before taking the next."""
        position = 0  # also the number of places kept for sequences that wait for a prefix
        while position < min(len(self.waiting), self._num_places):
            sequence = self.waiting[position]
            if self._still_lacks_room(sequence, plan):
                return
            prefix = self.block_manager.find_prefix(sequence)
            if plan.computes_next_block(sequence, prefix):
                position += 1
            elif self._fits(sequence, prefix):
                yield sequence, _Room(prefix, [])
            else:
                return

    def _next_urgent(self) -> Sequence | None:
        """Returns the most urgent waiting sequence if it is more urgent than a running one."""
        if self._waiting_by_urgency and self.running:
            sequence = self._waiting_by_urgency[0]
            if sequence.request.priority < self.running[-1].request.priority:
                return sequence
        return None

    def _newcomers(self) -> list[Sequence]:
        """Returns the first waiting sequence of each tenant that runs nothing. Only sequences with
        the most urgent waiting priority count. Returns [] if no sequence runs."""
        tenants = self._tenants_waiting.keys() - self._tenants_running.keys()
        if not tenants or not self.running:
            return []
        newcomers: list[Sequence] = []
        priority = self._waiting_by_urgency[0].request.priority
        for sequence in self.waiting:
            if sequence.request.priority == priority and sequence.request.tenant in tenants:
                tenants.remove(sequence.request.tenant)
                newcomers.append(sequence)
        return newcomers

    def _draft(self, plan: StepPlan) -> None:
        """Draft tokens for decodes, in rows and blocks of KV cache that no other sequence needs."""
        num_sequences = len(plan.shares)
        drafting = [
            (share, drafter)
            for share in plan.shares.values()
            if (drafter := share.sequence.drafter) is not None
        ]
        if not drafting or num_sequences >= MAX_ROWS:
            return
        may_draft = drafting[0][1].policy.plan(len(drafting), num_sequences - len(drafting))
        if may_draft is None:
            return
        num_tokens = sum(share.num_tokens for share in plan.shares.values())
        num_rows = min(MAX_ROWS - num_tokens, plan.num_tokens_left)
        for share, drafter in drafting:
            share.feeds_head = may_draft.expected > 0
            sequence = share.sequence
            if num_rows < 1 or not share.samples:
                continue
            draft = drafter.draft(sequence.token_ids, num_rows, num_sequences, may_draft)
            is_possible = draft and sequence.decodes
            if not is_possible or self.block_manager.num_free <= self._watermark:
                continue
            if self.block_manager.extend(sequence, len(draft)):
                share.draft, share.drafts_by_head = tuple(draft), draft[0] == UNKNOWN
                num_rows -= len(draft)

    def _find_room(
        self, sequence: Sequence, plan: StepPlan, preemptible: _Preemptible
    ) -> _Room | None:
        """Returns room for a waiting sequence in addition to this plan. Returns None if there is
        too little room, or if the sequence should wait for a prefix that this plan computes."""
        prefix = self.block_manager.find_prefix(sequence)
        if plan.computes_next_block(sequence, prefix):
            return None
        num_running = len(self.running)
        num_needed = self._num_needed(sequence, prefix, num_running)
        if self._num_places > 0 and num_needed <= self.block_manager.num_free:
            return _Room(prefix, [])
        victims: list[Sequence] = []
        lesser = preemptible(sequence, num_needed)
        for victim, num_free in self.block_manager.num_free_after(lesser, prefix):
            victims.append(victim)
            if self._num_needed(sequence, prefix, num_running - len(victims)) <= num_free:
                return _Room(prefix, victims)
        return None

    def _less_urgent(self, sequence: Sequence, num_needed: int) -> list[Sequence]:
        """Returns the running sequences that are less urgent than `sequence`, the least urgent
        first. Empty if preempting all of them would free too few blocks."""
        priority = sequence.request.priority
        lesser = [*takewhile(lambda each: each.request.priority > priority, reversed(self.running))]
        num_freed_at_most = sum(len(victim.block_table) for victim in lesser)
        fits = num_needed - self._watermark <= self.block_manager.num_free + num_freed_at_most
        return lesser if fits else []

    def _beyond_their_share(self, newcomer: Sequence, num_needed: int) -> Iterable[Sequence]:
        if max(self._tenants_running.values()) < 2:
            return ()
        return beyond_their_share(self.running, self._shares(), newcomer.request, num_needed)

    def _shares(self) -> TenantShares:
        running = ((sequence.request, len(sequence.block_table)) for sequence in self.running)
        return TenantShares(self.max_num_seqs, self.block_manager.num_blocks, running)

    def _fits(self, sequence: Sequence, prefix: list[int]) -> bool:
        """Whether a waiting sequence fits into the free blocks. Notes how many blocks it lacks."""
        needed = self._num_needed(sequence, prefix, len(self.running))
        num_missing = needed - self.block_manager.num_free
        if num_missing > 0:
            self._without_room = sequence.sequence_id, self.block_manager.num_gained + num_missing
        return num_missing <= 0

    def _still_lacks_room(self, sequence: Sequence, plan: StepPlan) -> bool:
        """Whether a sequence certainly still lacks room. Does not search for its prefix."""
        known, num_gained = self._without_room
        return (
            known == sequence.sequence_id
            and self.block_manager.num_gained < num_gained
            and bool(self.running)  # otherwise it needs no watermark
            and not plan.prefilling
        )

    def _num_needed(self, sequence: Sequence, prefix: list[int], num_others: int) -> int:
        needed = self.block_manager.num_needed(sequence, prefix)
        return needed + self._watermark if num_others else needed

    def _admit(self, sequence: Sequence, room: _Room, plan: StepPlan) -> None:
        prefix = room.prefix
        for victim in room.victims:
            self._preempt(victim, plan)
        self._withdraw(sequence)
        self.block_manager.allocate(sequence, prefix)
        sequence.num_computed_tokens = len(prefix) * self.block_manager.block_size
        sequence.slot = heapq.heappop(self._free_slots)
        sequence.status = SequenceStatus.RUNNING
        if sequence.timing.scheduled_at is None:
            sequence.timing.scheduled_at = time.monotonic()
            size, num_prompt_tokens = self.block_manager.block_size, sequence.num_prompt_tokens
            num_known = self.block_manager.num_known_to(sequence.request.tenant, prefix)
            sequence.timing.cached_tokens = min(num_known * size, num_prompt_tokens)
            self.num_cached_tokens += min(sequence.num_computed_tokens, num_prompt_tokens)
        else:
            sequence.timing.resumed_at.append(time.monotonic())
        insort(self.running, sequence, key=_urgency)
        self._tenants_running.add(sequence.request.tenant)
        plan.give(sequence)

    def _preempt(self, sequence: Sequence, plan: StepPlan) -> None:
        plan.take_back(sequence)
        self.set_back(sequence)

    def _withdraw(self, sequence: Sequence) -> None:
        if sequence.status is SequenceStatus.WAITING:
            _remove(self.waiting, sequence, _order)
            _remove(self._waiting_by_urgency, sequence, _urgency)
            self._tenants_waiting.remove(sequence.request.tenant)
            return
        _remove(self.running, sequence, _urgency)
        self._tenants_running.remove(sequence.request.tenant)
        self.block_manager.free(sequence)
        if sequence.slot is not None:
            heapq.heappush(self._free_slots, sequence.slot)
            sequence.slot = None


def _remove(sequences: list[Sequence], sequence: Sequence, key: Callable[[Sequence], Any]) -> None:
    del sequences[bisect_left(sequences, key(sequence), key=key)]

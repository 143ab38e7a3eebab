"""The live batch of a worker: its requests in the engine, which each heartbeat publishes."""

from __future__ import annotations

from promptq.shared.protocol.worker_stats import SlotState, SlotStats
from promptq.worker.engine.api.messages import EngineSnapshot, SequenceSnapshot
from promptq.worker.leases.held_and_lost_leases import Leases
from promptq.worker.leases.lease import Lease
from promptq.worker.leases.rows import PreparedRequest


def live_batch(snapshot: EngineSnapshot, leases: Leases) -> list[SlotStats]:
    """Returns the batch of a snapshot, without sequences that have ended since the snapshot."""
    return [
        _slot_of(lease, sequence)
        for sequence in snapshot.sequences
        if (lease := leases.by_sequence(sequence.sequence_id)) is not None
    ]


def _slot_of(lease: Lease, sequence: SequenceSnapshot) -> SlotStats:
    prepared = lease.prepared
    timing = sequence.timing
    return SlotStats(
        slot=sequence.slot,
        request_id=prepared.request_id,
        tenant=prepared.request.tenant,
        priority=prepared.priority,
        attempt=prepared.claim.attempt,
        state=_state_of(sequence),
        prompt_tokens=prepared.num_prompt_tokens,
        emitted_tokens=sequence.num_tokens - prepared.num_prompt_tokens,
        max_tokens=prepared.engine_request.max_tokens,
        computed_tokens=sequence.num_computed_tokens,
        cached_tokens=timing.cached_tokens,
        recomputed_tokens=timing.recomputed_tokens,
        preemptions=timing.preemptions,
        kv_blocks=sequence.num_blocks,
        kv_shared_blocks=sequence.num_shared_blocks,
        claimed_at=prepared.claim.claimed_at_ms,
        prefill_at=_server_ms(prepared, timing.scheduled_at),
        first_token_at=_server_ms(prepared, timing.first_token_at),
        preempted_at=[*map(prepared.claim.server_ms, timing.preempted_at)],
        resumed_at=[*map(prepared.claim.server_ms, timing.resumed_at)],
    )


def _state_of(sequence: SequenceSnapshot) -> SlotState:
    if sequence.slot is None:
        return SlotState.PREEMPTED if sequence.timing.preemptions else SlotState.WAITING
    is_decoding = sequence.num_tokens - sequence.num_computed_tokens <= 1
    return SlotState.DECODE if is_decoding else SlotState.PREFILL


def _server_ms(prepared: PreparedRequest, at: float | None) -> int | None:
    return None if at is None else prepared.claim.server_ms(at)

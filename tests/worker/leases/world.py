"""An owner of leases with an engine that is none, and claims for it."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from typing import Any

from promptq.shared.protocol.claims import Claim, ModelIdentity
from promptq.shared.protocol.events import TokenEvent
from promptq.shared.protocol.rows import RowStatus
from promptq.worker.engine.api.messages import (
    EngineAbilities,
    EngineLimits,
    EngineRequest,
    EngineSnapshot,
    EngineStats,
    StepOutput,
)
from promptq.worker.leases.held_and_lost_leases import Leases
from promptq.worker.leases.lease import Lease, LeaseState
from promptq.worker.leases.prepare_or_resume import Preparation
from promptq.worker.text.tokenizer import ByteTokenizer


def limits(**changes: int) -> EngineLimits:
    known = {
        "max_num_seqs": 4,
        "max_num_batched_tokens": 64,
        "max_model_len": 4096,
        "kv_tokens": 4096,
        "block_size": 16,
        "bytes_per_token": 1,
        "vocab_size": 257,
    }
    return EngineLimits(**known | changes)


class FakeEngine:
    """An engine whose `sequences` are those added and not aborted."""

    num_aborting = 0
    has_failed = False

    def __init__(self, **changes: int) -> None:
        self.limits = limits(**changes)
        self.abilities = EngineAbilities()
        self.stats = EngineStats()
        self.sequences: list[int] = []

    def start(self) -> None:
        pass

    async def stop(self, patience: float) -> None:
        pass

    def add(self, request: EngineRequest) -> None:
        assert request.sequence_id not in self.sequences
        self.sequences.append(request.sequence_id)

    def abort(self, sequence_id: int) -> None:
        self.sequences.remove(sequence_id)  # what it has ended itself must not be aborted

    async def snapshot(self) -> EngineSnapshot:
        return EngineSnapshot()

    async def fetch(self) -> list[StepOutput]:
        await asyncio.Event().wait()
        return []

    def seconds_without_progress(self) -> float:
        return 0.0


END = 256
PREPARING, READY, RUNNING, ENDING, RETURNING, GONE = LeaseState


def claim(events: list[TokenEvent] | None = None, **fields: Any) -> Claim:
    """Of a payload with these fields, as far as they are not the claim's own."""
    own = {"request_id": "r", "fence": "2-x", "score": 5.0, "cost": 9, "is_suspect": False}
    own["tenant"] = ""
    own.update({name: fields.pop(name) for name in own if name in fields})
    fields.setdefault("prompt", "four")
    return Claim(
        payload=json.dumps(fields).encode(),
        attempt=2,
        seed=77,
        enqueued_at_ms=1000,
        claimed_at_ms=1500,
        prompt_tokens=None,
        events=events or [],
        **own,
    )


@dataclass
class Bounds:
    """The part of an engine that a preparation reads."""

    limits: EngineLimits
    abilities: EngineAbilities


def preparation(**abilities: Any) -> Preparation:
    return Preparation(
        ByteTokenizer(),
        Bounds(limits(max_model_len=20), EngineAbilities(**abilities)),
        ModelIdentity("mine", "123"),
        frozenset({END}),
    )


def emitted(text: str) -> list[TokenEvent]:
    return [TokenEvent(index=n, token_ids=[ord(c)], text=c) for n, c in enumerate(text)]


class World:
    """An owner with an engine of four slots, so that five have a place."""

    def __init__(self) -> None:
        self.engine = FakeEngine()
        self.leases = Leases(self.engine)

    def claimed(self, request_id: str = "r", **fields: object) -> Lease:
        (lease,) = self.leases.claimed([claim(request_id=request_id, **fields)])
        return lease

    def prepare(self, lease: Lease) -> None:
        self.leases.prepared(lease, preparation().prepare(lease.claim))

    def ready(self, request_id: str = "r", **fields: object) -> Lease:
        lease = self.claimed(request_id, **fields)
        self.prepare(lease)
        return lease

    def running(self, request_id: str = "r", **fields: object) -> Lease:
        lease = self.ready(request_id, **fields)
        self.leases.feed()
        return lease

    def in_state(self, state: LeaseState) -> Lease:
        if state is PREPARING:
            return self.claimed()
        if state is READY:
            return self.ready()
        lease = self.running()
        if state is ENDING:
            self.leases.ending(lease)
        elif state is RETURNING:
            self.leases.returning(lease)
        elif state is GONE:
            self.leases.answered(lease, RowStatus.FENCED)
        assert lease.state is state
        return lease

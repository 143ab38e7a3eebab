"""An engine that only notes down what it is told."""

from __future__ import annotations

import asyncio

from promptq.worker.engine.api.messages import (
    EngineAbilities,
    EngineLimits,
    EngineRequest,
    EngineSnapshot,
    EngineStats,
    StepOutput,
)


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
    """What was added and not aborted is in `sequences`."""

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

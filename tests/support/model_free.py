"""The model-free engine with checks of the cache that attention would read.

Instead of K and V, the cache stores for each position a fingerprint of all tokens up to this
position. So the checks find a wrong block table, and a block that is shared too early or freed
twice.
"""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import redis.asyncio

from promptq.shared.protocol.claims import ModelIdentity
from promptq.shared.queue import lookups
from promptq.shared.queue.request_queue import AsyncRequestQueue, RequestQueue
from promptq.shared.runtime.tracing import Tracing
from promptq.shared.settings.worker import WorkerSettings
from promptq.worker.engine.core import model_free
from promptq.worker.engine.core.llm_engine import LLMEngine
from promptq.worker.engine.core.model_free import END_TOKEN_ID, ModelFreeStep, token_at
from promptq.worker.engine.core.runner import SampledToken
from promptq.worker.engine.core.sequence import Batch, ScheduledSequence, Sequence
from promptq.worker.serve.build import Served
from promptq.worker.serve.worker import Worker
from promptq.worker.text.tokenizer import ByteTokenizer
from tests.support.requests import check_log, result_of
from tests.support.roles import as_role

__all__ = [
    "END_TOKEN_ID",
    "ModelFreeRunner",
    "ModelFreeStep",
    "build_model_free_engine",
    "token_at",
    "tokens_of",
]

_Pending = dict[int, int]
"""Maps a sequence's id to the token of the previous step, if that step is not collected yet."""


def tokens_of(seed: int, num_tokens: int) -> list[int]:
    """Returns the first `num_tokens` tokens that a request with this seed gets."""
    return [token_at(seed, position) for position in range(num_tokens)]


class ModelFreeRunner(model_free.ModelFreeRunner):
    """A runner that reads the whole cache of each sequence that samples a token.

    Raises RuntimeError at the first position that does not hold the sequence's fingerprint. A step
    takes `step_seconds`.
    """

    def __init__(
        self,
        num_blocks: int = 256,
        block_size: int = 16,
        *,
        max_model_len: int | None = None,
        step_seconds: float = 0.0,
    ) -> None:
        super().__init__(num_blocks, block_size, max_model_len or num_blocks * block_size)
        self.step_seconds = step_seconds
        self._cache: list[int | None] = [None] * (num_blocks * block_size)
        self._read: dict[int, tuple[list[int], list[int]]] = {}
        """By sequence of the last step: its tokens, and the fingerprint of each position."""

    def launch(self, batch: Batch, after: ModelFreeStep | None = None) -> ModelFreeStep:
        pending = _tokens_by_sequence(after) if after is not None else {}
        _check_batch(batch, pending, after.batch if after is not None else Batch([]))
        self._write(batch, pending)
        self._read = {
            share.sequence.sequence_id: self._read_back(share, pending) for share in batch.sampling
        }
        return super().launch(batch, after)

    def collect(self, launched: ModelFreeStep) -> list[list[SampledToken]]:
        time.sleep(self.step_seconds)
        return super().collect(launched)

    def _write(self, batch: Batch, pending: _Pending) -> None:
        # All reads come before all writes, because a sequence must not read results of others in
        # the same step.
        before = [self._fingerprint_before(share) for share in batch.scheduled]
        written: set[int] = set()
        for share, fingerprint in zip(batch.scheduled, before, strict=True):
            for position, token_id in enumerate(_token_ids(share, pending), start=share.start):
                fingerprint = hash((fingerprint, token_id))
                cell = self._cell(share.sequence, position)
                if cell in written:
                    raise RuntimeError(f"two sequences write cell {cell} in one step")
                written.add(cell)
                self._cache[cell] = fingerprint

    def _fingerprint_before(self, share: ScheduledSequence) -> int:
        if share.start == 0:
            return hash(share.sequence.request.cache_salt)
        fingerprint = self._cache[self._cell(share.sequence, share.start - 1)]
        if fingerprint is None:
            raise RuntimeError(
                f"sequence {share.sequence.sequence_id} continues at position {share.start}, "
                "but nothing is cached before it"
            )
        return fingerprint

    def _read_back(
        self, share: ScheduledSequence, pending: _Pending
    ) -> tuple[list[int], list[int]]:
        """Returns the tokens that the sequence reads, and their fingerprints."""
        sequence, size = share.sequence, self.kv_layout.block_size
        tokens = [*sequence.token_ids[: share.start], *_token_ids(share, pending)]
        known, fingerprints = self._read.get(sequence.sequence_id, ([], []))
        if tokens[: len(known)] != known:
            known, fingerprints = [], []
        fingerprint = fingerprints[-1] if known else hash(sequence.request.cache_salt)
        for token_id in tokens[len(known) :]:
            fingerprint = hash((fingerprint, token_id))
            fingerprints.append(fingerprint)
        for first in range(0, len(tokens), size):
            expected, cell = fingerprints[first : first + size], self._cell(sequence, first)
            if self._cache[cell : cell + len(expected)] != expected:
                raise RuntimeError(
                    f"sequence {sequence.sequence_id} reads other data than its tokens from"
                    f" position {first} through its block table"
                )
        return tokens, fingerprints

    def _cell(self, sequence: Sequence, position: int) -> int:
        size = self.kv_layout.block_size
        return sequence.block_table[position // size] * size + position % size


def _token_ids(share: ScheduledSequence, pending: _Pending) -> list[int]:
    """Returns the tokens of a sequence's share of a step. If the share was planned ahead, this is
    the token of the step before."""
    return share.token_ids or [pending[share.sequence.sequence_id]]


def _check_batch(batch: Batch, pending: _Pending, before: Batch) -> None:
    slots = [share.sequence.slot for share in batch.scheduled]
    if None in slots or len(set(slots)) != len(slots):
        raise RuntimeError(f"slots {slots} are not one for each sequence")
    under_way = {share.sequence: share.start + share.num_tokens for share in before.scheduled}
    for share in batch.scheduled:
        sequence, end = share.sequence, share.start + share.num_tokens
        num_computed = under_way.get(sequence, sequence.num_computed_tokens)
        if share.start != num_computed or share.num_tokens < 1:
            raise RuntimeError(f"sequence {sequence.sequence_id} does not continue where it was")
        num_tokens = sequence.num_tokens + (sequence.sequence_id in pending)
        if end > num_tokens or share.samples != (end == num_tokens):
            raise RuntimeError(f"sequence {sequence.sequence_id} samples at {end} tokens")
        if share.draft and not share.samples:
            raise RuntimeError(f"sequence {sequence.sequence_id} drafts before its last token")


def _tokens_by_sequence(step: ModelFreeStep) -> _Pending:
    """Returns the token of each sequence in a step without drafts, by sequence id."""
    shares = zip(step.batch.sampling, step.sampled, strict=True)
    return {share.sequence.sequence_id: tokens[0].token_id for share, tokens in shares}


def build_model_free_engine(
    *,
    max_num_seqs: int = 16,
    max_num_batched_tokens: int = 512,
    num_blocks: int = 256,
    block_size: int = 16,
    step_seconds: float = 0.0,
    **options: Any,
) -> LLMEngine:
    """Returns an engine with a `ModelFreeRunner`. `options` are further options of the engine."""
    return LLMEngine(
        ModelFreeRunner(num_blocks, block_size, step_seconds=step_seconds),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        **options,
    )


BY_ITSELF = {"max_events_per_second": math.inf}
"""Settings of a worker that sends each token in a separate event."""


def served_model_free(*, name: str = "model-free", **options: Any) -> Served:
    """Returns the model-free engine with checks of its cache, for a worker. `name` is the model."""
    return Served(
        engine=build_model_free_engine(**options),
        tokenizer=ByteTokenizer(),
        identity=ModelIdentity(name, name),
        end_token_ids=frozenset({END_TOKEN_ID}),
        device="none",
        dtype="none",
    )


def text_of(seed: int, num_tokens: int) -> str:
    """Returns the model-free engine's answer to any prompt with this seed."""
    return bytes(tokens_of(seed, num_tokens)).decode()


@asynccontextmanager
async def running_worker(
    url: str, served: Served | None = None, *, tracing: Tracing | None = None, **settings: Any
) -> AsyncIterator[Worker]:
    """Runs a worker in this event loop, in the role `worker`. By default, the worker has the
    model-free engine. At the end, drains the worker, and asserts that it holds no request and no KV
    block."""
    async with redis.asyncio.Redis.from_url(as_role("worker", url)) as client:
        engine = served or served_model_free()
        worker = Worker(WorkerSettings(**settings), engine, client, tracing=tracing)
        await worker.start()
        stop = asyncio.Event()
        serving = asyncio.create_task(worker.serve(stop))
        try:
            yield worker
            stop.set()
            await serving
            await worker.drain(asyncio.Event())
        finally:
            serving.cancel()
            await worker.stop()
    assert len(worker.leases) == 0
    assert worker.leases.num_running == 0
    if hasattr(worker.served.engine, "check_integrity"):  # an engine in this process
        worker.served.engine.check_integrity()
    assert worker.served.engine.stats.num_used_blocks == 0


async def finished(queue: AsyncRequestQueue, request_id: str) -> dict[str, Any]:
    """Waits for the result of a request, and returns it."""
    while True:
        state = await queue.state(request_id)
        if state is not None and state.is_final:
            break
        await asyncio.sleep(0.005)
    record = await queue.run(lookups.record(queue.keys, request_id))
    result: dict[str, Any] = json.loads(record["result"])
    return result


def assert_texts(
    queue: RequestQueue, requests: list[str], num_tokens: int, attempts: int = 1
) -> None:
    """Asserts that each request got its whole text, in exactly this number of attempts. The request
    at index i of the list has the seed i."""
    for seed, request_id in enumerate(requests):
        result, text = result_of(queue, request_id), text_of(seed, num_tokens)
        assert (result["text"], result["stats"]["attempts"]) == (text, attempts)
        check_log(queue, request_id, text)

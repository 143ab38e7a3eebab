"""An engine that forwards: each running sequence is a stream from an inference server."""

from __future__ import annotations

import asyncio
import heapq
import time
from collections import Counter
from collections.abc import Coroutine
from contextlib import aclosing
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from promptq.shared.errors import ConfigurationError
from promptq.shared.protocol.request import FinishReason
from promptq.shared.runtime.logs import get_logger
from promptq.shared.runtime.tasks import end
from promptq.worker.engine.api.limit_checks import check_request
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
from promptq.worker.upstream.dialects.dialect import (
    Chunk,
    Dialect,
    ServerDescription,
    abilities_of,
)
from promptq.worker.upstream.dialects.transport import (
    AnsweredFaultError,
    OverloadedError,
    RefusedError,
    Server,
    ServerFaultError,
    UnusableAnswerError,
)
from promptq.worker.upstream.forwarded_sequence import ForwardedSequence, preemption
from promptq.worker.upstream.gate import Gate
from promptq.worker.upstream.outbox import Outbox
from promptq.worker.upstream.server_process import ServerProcess
from promptq.worker.upstream.server_recovery import ServerRecovery
from promptq.worker.upstream.token_rules import NoTokenError
from promptq.worker.upstream.watched_stream import WatchedStream

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

_AWAY = "the inference server is away"
_DOUBT_SECONDS = 3.0
"""Seconds until a server that seems to have lost an ability is probed again."""
_OVERLOADED_SECONDS = 1.0
_BLAMELESS_FAULTS = 2
"""Number of times that a server may break off a request before the request is blamed."""
_PROGRESS_TOKENS = 64
"""After this number of tokens of an attempt, earlier faults no longer count."""
_MOST_REMEMBERED = 10_000


class ForwardingEngine:
    """Runs sequences on an inference server; implements `EnginePort`.

    The engine sends one sequence for each slot. Other sequences wait here in queue order, because
    nothing can reorder sequences that wait in a server, nor cancel them in some servers. When the
    server breaks a stream off, the request goes back to the queue with its progress. The engine
    then accepts nothing until the server has generated a token again.
    """

    def __init__(
        self,
        url: str,
        key: str | None,
        dialect: Dialect,
        limits: EngineLimits,
        description: ServerDescription,
        idle_seconds: float,
        process: ServerProcess | None = None,
    ) -> None:
        """Prepares an engine for a server with this description. After each fault, the engine
        probes the server again. A stream fails if it is silent for `idle_seconds`. `process` is the
        server's process if the engine must end the server."""
        self.limits = limits
        self.abilities = abilities_of(dialect, description)
        self.is_accepting = True
        self._url, self._key, self._idle_seconds = url, key, idle_seconds
        self._dialect = dialect
        self._description = description
        self._process = process
        self._server: Server | None = None
        self._sequences: dict[int, ForwardedSequence] = {}
        self._waiting: list[ForwardedSequence] = []  # a heap
        self._running: dict[int, ForwardedSequence] = {}  # by slot, until its connection is closed
        self._successors: dict[int, ForwardedSequence] = {}  # by the slot that was freed for it
        self._outbox = Outbox()
        self._gate = Gate(limits.max_num_seqs)
        self._recovery = ServerRecovery(dialect, description.model, limits.max_model_len, process)
        self._tasks: set[asyncio.Task[None]] = set()
        self._totals = EngineStats(num_blocks=limits.kv_tokens // limits.block_size)
        self._busy_since: float | None = None
        self._faults: Counter[str] = Counter()  # of requests, by id
        self.has_failed = False
        self._log = get_logger(server=url)

    # ------------------------------------------------------------ the port

    def start(self) -> None:
        self._server = Server(self._url, self._key, self._idle_seconds)
        self._spawn(self._gate.watch(self._server, self._running.values, self._heed_gate))

    async def stop(self, patience: float) -> None:
        self.is_accepting = False  # so that no stream takes the place of one that ends
        await end([*self._tasks])
        if self._server is not None:
            await self._server.close()
        if self._process is not None:
            await asyncio.to_thread(self._process.close)

    def add(self, request: EngineRequest) -> None:
        sequence = ForwardedSequence(request, [*request.output_token_ids])
        try:
            check_request(request, self.limits)
        except ValueError as error:
            self._put_end(sequence, FinishReason.ERROR, error=str(error))
            return
        if not self.is_accepting:
            away = GivenBack(_AWAY, is_blamed=False)
            self._outbox.put(SequenceOutput(request.sequence_id, [], given_back=away))
            return
        self._sequences[request.sequence_id] = sequence
        heapq.heappush(self._waiting, sequence)
        self._schedule()

    def abort(self, sequence_id: int) -> None:
        sequence = self._sequences.pop(sequence_id, None)
        self._outbox.drop(sequence_id)
        if sequence is None:
            return
        self._totals.num_processed += 1
        if sequence.stream is not None:
            sequence.stream.cancel()
        else:
            self._successors = {
                slot: successor
                for slot, successor in self._successors.items()
                if successor is not sequence
            }
            self._waiting = [waiting for waiting in self._waiting if waiting is not sequence]
            heapq.heapify(self._waiting)

    async def snapshot(self) -> EngineSnapshot:
        await asyncio.sleep(0)  # streams that are being closed get their turn
        sequences = [
            *self._running_sequences(),
            *sorted([*self._successors.values(), *self._waiting]),
        ]
        return EngineSnapshot([self._shown(each) for each in sequences])

    async def fetch(self) -> list[StepOutput]:
        return [StepOutput(await self._outbox.fetch(), self.stats)]

    @property
    def stats(self) -> EngineStats:
        running = self._running_sequences()
        block_size = self.limits.block_size
        busy = time.monotonic() - self._busy_since if self._busy_since is not None else 0.0
        return replace(
            self._totals,
            num_running=len(running),
            num_waiting=len(self._successors) + len(self._waiting),
            num_used_blocks=sum(-(-sequence.num_tokens // block_size) for sequence in running),
            busy_seconds=self._totals.busy_seconds + busy,
            max_running=self._gate.limit if self._gate.is_lowered else None,
            holds_back=self._gate.why,
        )

    @property
    def num_aborting(self) -> int:
        return len(self._running) - len(self._running_sequences())

    def seconds_without_progress(self) -> float:
        """Always 0: the engine gives back each stream that is silent for too long."""
        return 0.0

    # ------------------------------------------------------------ scheduling

    def _schedule(self) -> None:
        """Give free slots to waiting sequences, and free a slot for a sequence that may preempt."""
        while self._waiting and self.is_accepting:
            if len(self._running) >= self._gate.limit:
                self._preempt()
                break
            slots = range(self.limits.max_num_seqs)
            free = next(slot for slot in slots if slot not in self._running)
            self._run(heapq.heappop(self._waiting), free)
        if self._running and self._busy_since is None:
            self._busy_since = time.monotonic()
        elif not self._running and self._busy_since is not None:
            self._totals.busy_seconds += time.monotonic() - self._busy_since
            self._busy_since = None

    def _run(self, sequence: ForwardedSequence, slot: int) -> None:
        now = time.monotonic()
        timing = sequence.timing
        if timing.scheduled_at is None:
            timing.scheduled_at = now
        else:
            timing.resumed_at.append(now)
        sequence.slot = slot
        self._running[slot] = sequence
        sequence.stream = self._spawn(self._stream(sequence))
        sequence.stream.add_done_callback(lambda _: self._leave(slot))

    def _preempt(self) -> None:
        """Break off a stream that resumes exactly, if a waiting sequence may have its slot."""
        running = self._running_sequences()
        if len(running) + len(self._successors) < len(self._running):
            return  # a slot is about to be free anyway
        may_preempt = self.abilities.may_preempt
        able = [each for each in running if may_preempt(each.request.params, each.emitted)]
        streams = [*running, *self._successors.values()]
        if (pair := preemption(self._waiting, streams, able, self.limits.max_num_seqs)) is None:
            return
        urgent, victim = pair
        victim.timing.preemptions += 1
        victim.timing.preempted_at.append(time.monotonic())
        victim.is_reported = False
        self._totals.num_preemptions += 1
        assert victim.stream is not None
        assert victim.slot is not None
        victim.stream.cancel()
        self._successors[victim.slot] = urgent
        victim.stream, victim.slot = None, None
        self._waiting = [victim if sequence is urgent else sequence for sequence in self._waiting]
        heapq.heapify(self._waiting)

    def _running_sequences(self) -> list[ForwardedSequence]:
        """Returns the sequences whose stream is open, by slot."""
        return [
            sequence
            for slot, sequence in sorted(self._running.items())
            if sequence.slot == slot and sequence.sequence_id in self._sequences
        ]

    def _heed_gate(self) -> None:
        """Give back waiting sequences beyond the gate's limit: another server may have room."""
        if self._gate.is_lowered:
            num_places = max(0, self._gate.limit - len(self._running))
            self._waiting.sort()
            self._waiting, surplus = self._waiting[:num_places], self._waiting[num_places:]
            for sequence in surplus:
                self._give_back(sequence, self._gate.why)
        self._schedule()

    # ------------------------------------------------------------ a stream

    async def _stream(self, sequence: ForwardedSequence) -> None:
        try:
            await self._read(sequence)
        except RefusedError as error:
            if error.is_servers:
                self._give_back(sequence, str(error), is_blameless=True)
                self._recover(str(error))
            else:
                is_foreign = bool(sequence.request.pictures or sequence.request.pair)
                self._put_end(sequence, FinishReason.ERROR, error=str(error), is_refused=is_foreign)
        except OverloadedError as error:
            seconds = _OVERLOADED_SECONDS if error.seconds is None else error.seconds
            why = f"the server is overloaded: {error}"
            self._give_back(sequence, why, is_blameless=True, seconds=seconds)
            if self.is_accepting:  # the first of those that the server refuses together
                self._gate.overloaded(len(self._running) - 1)
            self._recover(str(error), seconds)
        except NoTokenError as error:
            self._put_end(sequence, FinishReason.ERROR, error=str(error), is_refused=True)
        except UnusableAnswerError as error:
            self._try_again(sequence, str(error))
        except ServerFaultError as error:
            if sequence.request.pictures and isinstance(error, AnsweredFaultError):
                self._try_again(sequence, str(error))
            else:
                self._give_back(sequence, str(error))
            self._recover(str(error))
        except ConfigurationError as error:
            self._fail(error)

    def _leave(self, slot: int) -> None:
        """Free the slot of a closed connection, and start the next sequence."""
        del self._running[slot]
        if self.is_accepting and (sequence := self._successors.pop(slot, None)) is not None:
            self._run(sequence, slot)
        self._schedule()

    async def _read(self, sequence: ForwardedSequence) -> None:
        """Pass on the chunks of a sequence until its end."""
        assert self._server is not None
        stream = WatchedStream(
            self._dialect,
            self._server,
            sequence.request,
            sequence.emitted,
            self._description,
            self.limits.vocab_size,
        )
        if sequence.request.pooling is not None:
            vector, num_tokens = await stream.embedding(self.limits.embedding_size)
            sequence.timing.prompt_tokens = num_tokens
            self._put_end(sequence, FinishReason.STOP, embedding=vector)
            return
        if sequence.request.wants_prompt_logprobs and not sequence.emitted:
            sequence.prompt_logprobs = [await stream.prompt_logprobs()]
        is_over = False
        async with aclosing(stream.chunks()) as chunks:
            async for chunk in chunks:
                is_over = await self._put_chunk(sequence, chunk)
        if not is_over:
            raise ServerFaultError("the stream ended without a finish reason")

    async def _put_chunk(self, sequence: ForwardedSequence, chunk: Chunk) -> bool:
        """Pass on a chunk. Returns whether the chunk was the last."""
        now = time.monotonic()
        timing = sequence.timing
        if chunk.token_ids:
            sequence.emitted += chunk.token_ids
            self._totals.num_steps += 1
            self._totals.generation_tokens += len(chunk.token_ids)
            if len(sequence.emitted) - len(sequence.request.output_token_ids) >= _PROGRESS_TOKENS:
                self._faults.pop(sequence.request.order[1], None)
            if timing.prompt_tokens is None:
                timing.prompt_tokens = chunk.num_prompt_tokens
            if timing.first_token_at is None:
                timing.first_token_at = now
                self._totals.prompt_tokens += sequence.num_prompt_tokens
        if chunk.finish_reason is not None:
            self._put_end(sequence, chunk.finish_reason, chunk)
        elif chunk.token_ids:
            output = SequenceOutput(
                sequence.sequence_id, chunk.token_ids, chunk.logprobs, sequence.prompt_logprobs
            )
            sequence.prompt_logprobs = None
            if not sequence.is_reported:
                sequence.is_reported = True
                output.timing = timing.copy()
            self._outbox.put(output)
        await self._outbox.wait_for_room()
        return chunk.finish_reason is not None

    # ------------------------------------------------------------ outputs

    def _put_end(
        self,
        sequence: ForwardedSequence,
        reason: FinishReason,
        chunk: Chunk | None = None,
        error: str | None = None,
        *,
        is_refused: bool = False,
        embedding: npt.NDArray[np.float32] | None = None,
    ) -> None:
        self._sequences.pop(sequence.sequence_id, None)
        self._faults.pop(sequence.request.order[1], None)
        self._totals.num_processed += 1
        output = SequenceOutput(
            sequence.sequence_id,
            chunk.token_ids if chunk else [],
            chunk.logprobs if chunk else None,
            sequence.prompt_logprobs if chunk else None,
            finish_reason=reason,
            error=error,
            is_refused=is_refused,
            timing=sequence.timing.copy(),
            embedding=embedding,
        )
        self._outbox.put(output)

    def _give_back(
        self,
        sequence: ForwardedSequence,
        reason: str,
        *,
        is_blameless: bool = False,
        seconds: float | None = None,
    ) -> None:
        """Return a request to the queue.

        A request that servers have broken off several times is blamed, so that a request that kills
        servers becomes a dead letter. Other requests are not claimed again for `seconds`.
        """
        if self._sequences.pop(sequence.sequence_id, None) is None:
            return  # aborted meanwhile
        self._totals.num_processed += 1
        is_blamed = False
        if not is_blameless and sequence.slot is not None:
            is_blamed = self._note_fault(sequence.request.order[1]) > _BLAMELESS_FAULTS
        delay_ms = None if is_blamed or seconds is None else int(seconds * 1000)
        given_back = GivenBack(reason, is_blamed, delay_ms)
        self._outbox.put(SequenceOutput(sequence.sequence_id, [], given_back=given_back))

    def _try_again(self, sequence: ForwardedSequence, reason: str) -> None:
        """Give back a request whose answer is unusable, and end it after several such answers."""
        request_id = sequence.request.order[1]
        if self._note_fault(request_id) <= _BLAMELESS_FAULTS:
            self._give_back(sequence, reason, is_blameless=True)
        elif sequence.sequence_id in self._sequences:
            error = f"the inference server's answer cannot be used: {reason}"
            has_pictures = bool(sequence.request.pictures)
            self._put_end(sequence, FinishReason.ERROR, error=error, is_refused=has_pictures)

    def _note_fault(self, request_id: str) -> int:
        """Count a fault of the server with a request. Returns the number of such faults."""
        if len(self._faults) > _MOST_REMEMBERED:
            self._faults.clear()
        self._faults[request_id] += 1
        return self._faults[request_id]

    # ------------------------------------------------------------ the server goes and comes back

    def _recover(self, why: str, seconds: float = 0.0) -> None:
        """Accept nothing for `seconds`, and then until the server has generated a token again."""
        if not self.is_accepting:
            return
        self.is_accepting = False
        self._log.warning("nothing is claimed until the inference server works again", why=why)
        waiting = [*self._successors.values(), *self._waiting]
        self._successors, self._waiting = {}, []
        for sequence in waiting:
            self._give_back(sequence, _AWAY)
        self._spawn(self._wait_for_server(seconds))

    async def _wait_for_server(self, seconds: float) -> None:
        assert self._server is not None
        try:
            now = await self._recovery.wait_until_well(self._server, seconds)
            if {*abilities_of(self._dialect, now).refused} - {*self.abilities.refused}:
                now = await self._recovery.wait_until_well(self._server, _DOUBT_SECONDS)
        except ConfigurationError as error:
            self._fail(error)
            return
        self._description = now
        before, self.abilities = self.abilities, abilities_of(self._dialect, now)
        if self.abilities != before:
            refused = " ".join(self.abilities.refused)
            self._log.warning("the server's abilities have changed", refused=refused)
        self.is_accepting = self._gate.is_load_reported = True
        self._schedule()

    def _fail(self, error: Exception) -> None:
        """Give all requests back without blame, and make `fetch` raise the error."""
        if not self.has_failed:
            self.has_failed = True
            self.is_accepting = False
            for sequence in [*self._sequences.values()]:
                self._give_back(sequence, str(error), is_blameless=True)
                if sequence.stream is not None:
                    sequence.stream.cancel()
            self._successors, self._waiting = {}, []
            self._outbox.fail(error)

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._note_end)
        return task

    def _note_end(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fail(error if isinstance(error, Exception) else RuntimeError(str(error)))

    def _shown(self, sequence: ForwardedSequence) -> SequenceSnapshot:
        runs, num_tokens = sequence.slot is not None, sequence.num_tokens
        return SequenceSnapshot(
            sequence_id=sequence.sequence_id,
            slot=sequence.slot,
            num_tokens=num_tokens,
            num_computed_tokens=num_tokens - 1 if runs and sequence.timing.first_token_at else 0,
            num_blocks=-(-num_tokens // self.limits.block_size) if runs else 0,
            num_shared_blocks=0,
            timing=sequence.timing.copy(),
        )

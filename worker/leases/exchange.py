"""Calls to Redis that renew leases, end cancelled requests, and give requests back to the queue.

The publisher sends rows (events), and passes the server's answers to this module. An answer may
change the state of a lease. If the request leaves the worker, `ExitLog` records the exit.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Sequence
from functools import partial

from redis.exceptions import RedisError

from promptq.shared.errors import SpoiltRecordError
from promptq.shared.protocol.claims import Held
from promptq.shared.protocol.keys import is_request_id
from promptq.shared.protocol.rows import RowStatus
from promptq.shared.protocol.worker_stats import RECORD_MS
from promptq.shared.queue import scripts
from promptq.shared.queue.request_queue import AsyncRequestQueue
from promptq.shared.queue.spoilt import note
from promptq.shared.runtime.logs import get_logger
from promptq.shared.server.retry import keep_trying
from promptq.worker.leases.exit_log import ExitLog
from promptq.worker.leases.held_and_lost_leases import Leases
from promptq.worker.leases.lease import Lease

_RETRY_SECONDS = 0.2
_UNSERVED_DELAY_MS = 1000
OVERFLOW = "overflow"
"""Replaces the name of a field in `leave_to_others` if an overflow worker cannot prepare a request.
Then overflow workers never claim the request again."""
_MOST_ATTEMPTS = 300  # then a stream ends if no live worker can continue it


class Exchange:
    """Renews leases, carries out cancels, and returns requests to the queue.

    `run_cancels` and `run_returns` are separate tasks, so neither waits for the other.
    """

    def __init__(
        self,
        queue: AsyncRequestQueue,
        leases: Leases,
        exit_log: ExitLog,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._queue = queue
        self._leases = leases
        self._exit_log = exit_log
        self._clock = clock
        self._beat_at = self._beating_since = -math.inf
        self._cancelled_ids: set[str] = set()
        self._some_cancelled = asyncio.Event()
        self._giving_back = asyncio.Lock()  # so that no lease is given back twice
        self._log = get_logger(worker_id=queue.worker_id)

    async def renew(self, leases: Sequence[Lease]) -> None:
        """Renew leases, and drop requests that are cancelled, expired or lost.

        Also reports exact lengths of prompts to Redis. Raises RedisError, OSError.
        """
        held = [lease.as_held() for lease in leases]
        published = await self._queue.publish([], held)
        self.take_answers(leases, held, published.held)
        self._leases.feed()

    def take_answers(
        self, leases: Sequence[Lease], sent: Sequence[Held], statuses: Sequence[RowStatus]
    ) -> None:
        """Act on the answers of Redis to a call. For each lease, `sent` has the data that the call
        sent, and `statuses` has the answer."""
        for lease, held, status in zip(leases, sent, statuses, strict=True):
            lease.reported(held)
            self.take_answer(lease, status)

    def take_answer(self, lease: Lease, status: RowStatus, reason: str = "") -> None:
        """Act on Redis's answer about one lease. `reason` is the finish reason if the answer is
        about the request's last row, otherwise ''."""
        self._exit_log.note(lease, self._leases.answered(lease, status, reason))

    def cancel(self, request_id: str) -> None:
        """Let `run_cancels` check whether this request is cancelled.

        Only the flag in the request's hash cancels a request. Any client can send the message with
        the id, so a text that cannot be an id has no effect.
        """
        if is_request_id(request_id):
            self._cancelled_ids.add(request_id)
            self._some_cancelled.set()

    async def run_cancels(self) -> None:
        """Check the requests passed to `cancel`, and end cancelled requests. Never returns.

        If the server cannot be reached, the next renewal of the leases finds these cancels.
        """
        while True:
            await self._some_cancelled.wait()
            self._some_cancelled.clear()
            ids, self._cancelled_ids = self._cancelled_ids, set()
            try:
                await self._carry_out(ids)
            except (RedisError, OSError) as error:
                self._log.warning("cancels not carried out", error=str(error))
            except SpoiltRecordError as error:
                note(error)

    async def _carry_out(self, ids: set[str]) -> None:
        leases = map(self._leases.by_request, sorted(ids))
        held = [lease for lease in leases if lease is not None]
        if held:
            await self.renew(held)
        if others := sorted(ids - {lease.request_id for lease in held}):
            await self._queue.run(scripts.cancel(others, "flagged"))

    async def run_returns(self) -> None:
        """Give requests whose leases are RETURNING back to the queue. Never returns.

        If the server cannot be reached, the worker keeps and renews these leases, and tries again.
        """
        while True:
            await self._leases.some_return.wait()
            try:
                await self.give_back()
            except (RedisError, OSError) as error:
                self._log.warning("requests not given back, trying again", error=str(error))
                await asyncio.sleep(_RETRY_SECONDS)

    async def give_back(self, seconds: float = 0.0) -> None:
        """Give all requests with RETURNING leases back to the queue. Retries for `seconds`. Then
        raises the last RedisError or OSError if the server still refuses."""
        async with self._giving_back:
            due = self._leases.due_back
            for part in (
                [lease for lease in due if lease.is_blamed],
                [lease for lease in due if not lease.is_blamed and lease.delay_ms is None],
                [lease for lease in due if not lease.is_blamed and lease.delay_ms is not None],
            ):
                if part:
                    await keep_trying(partial(self._release, part), seconds)
            if not self._leases.due_back:
                self._leases.some_return.clear()
        self._leases.feed()

    def note_heartbeat(self) -> None:
        """Record that the server has just accepted a heartbeat of this worker."""
        if not self._beats:
            self._beating_since = self._clock()
        self._beat_at = self._clock()

    @property
    def _beats(self) -> bool:
        return self._clock() - self._beat_at < RECORD_MS / 1000 / 2

    @property
    def _knows_others(self) -> bool:
        # Every live worker has had time to send a heartbeat.
        return self._beats and self._clock() - self._beating_since > RECORD_MS / 1000

    async def leave_to_others(self, unserved: Sequence[tuple[Lease, str]]) -> None:
        """Give requests back to the queue so that other workers take them. Each request comes with
        the name of a field that this worker's engine cannot serve.

        If no live worker can serve the field, this worker keeps the lease, so that the calling code
        can end the request. In three cases, the request nevertheless goes back, with a delay:

        - The name is `OVERFLOW`: the request is too long for this worker. A larger one may start.
        - An earlier attempt has generated output. That attempt's worker may return.
        - This worker started, or an outage ended, only now. Other workers may send heartbeats soon.

        Raises RedisError, OSError.
        """
        held = [lease.as_held() for lease, _ in unserved]
        needs = [field for _, field in unserved]
        statuses = await self._queue.run(scripts.release(held, needs=needs))
        for (lease, need), status in zip(unserved, statuses, strict=True):
            if status != "unserved":
                self._leases.returning(lease)
                self._exit_log.note(lease, self._leases.released(lease, status))
            elif (
                need == OVERFLOW
                or not self._knows_others
                or (lease.claim.events and lease.claim.attempt < _MOST_ATTEMPTS)
            ):
                self._leases.returning(lease, delay_ms=_UNSERVED_DELAY_MS)

    async def _release(self, leases: Sequence[Lease]) -> None:
        # All or none of these leases are blamed, and all or none have a delay.
        held = [lease.as_held() for lease in leases]
        delays_ms = [lease.delay_ms for lease in leases if lease.delay_ms is not None]
        crashed = leases[0].is_blamed
        statuses = await self._queue.release(held, crashed=crashed, delays_ms=delays_ms)
        for lease, status in zip(leases, statuses, strict=True):
            self._exit_log.note(lease, self._leases.released(lease, status))

"""Calls the webhooks of requests that have ended, many at once. Tenants and receivers take turns.

Only the process that leads the jobs calls webhooks. For each waiting webhook, the queue's Redis
stores the request's id, the number of attempts and the time of the next attempt. An attempt makes
its message from the request's hash. So an attacker who controls only RQ's server cannot make
promptq send or sign anything.

Other programs may write to the queue, too. An entry that is not a webhook is logged and deleted.
"""

from __future__ import annotations

import heapq
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Annotated, Any, Literal

import redis
from pydantic import BaseModel, Field, FiniteFloat, ValidationError

from promptq.producer.settings.jobs import JobsSettings
from promptq.producer.webhooks.tenant_turns import Turns
from promptq.producer.webhooks.webhook_attempts import (
    BACKOFF_SECONDS,
    DeliveryError,
    UndeliverableError,
    deliver,
    message_of,
    tenant_of,
    webhook_id_of,
)
from promptq.producer.webhooks.webhook_signature import WebhookSecrets
from promptq.shared.errors import ConfigurationError, InvalidRequestError
from promptq.shared.protocol.keys import Keys, check_request_id, is_request_id
from promptq.shared.queue import lookups
from promptq.shared.queue.call import Call, ids_of, text_map, text_of
from promptq.shared.queue.lookups import entries_of, shown
from promptq.shared.queue.request_queue import RequestQueue
from promptq.shared.queue.spoilt import deleted_if_spoilt, errors_logged, is_wrong_type, readable
from promptq.shared.runtime.logs import get_logger
from promptq.shared.server.cluster import client_of

_PAGE = 500
_PAGES = 4
"""The most pages of ended requests to read before the leader renews its lead."""
_RECORD_MS = 26 * 3_600_000
"""Milliseconds for which a webhook's request is kept: longer than all attempts together take.
ending.lua has the same number."""
_SOON_SECONDS = 1.0
_DEAD_KEPT = 10_000
_REASON_CHARACTERS = 300


class Waiting(BaseModel):
    """A webhook that waits for its next attempt."""

    tenant: str = ""
    attempts: Annotated[int, Field(ge=0, le=len(BACKOFF_SECONDS))] = 0
    due: FiniteFloat
    """Time of the next attempt in Unix seconds."""


class DeadWebhook(BaseModel):
    """A webhook that was given up."""

    at: int
    """Time at which the webhook was given up, in Unix milliseconds."""
    request_id: str
    tenant: str
    attempts: int
    reason: str


def read_dead(connection: redis.Redis, keys: Keys) -> list[DeadWebhook]:
    """Returns the latest 1000 webhooks that failed permanently, the latest first, without invalid
    entries."""
    client = client_of(connection, keys)
    entries: list[Any] = []
    with errors_logged(keys.webhooks_dead):
        entries = client.xrevrange(keys.webhooks_dead, count=1000)
    return readable(keys.webhooks_dead, entries, _dead_of)


def _dead_of(entry: tuple[bytes, Any]) -> DeadWebhook:
    entry_id, fields = entry
    return DeadWebhook.model_validate({**text_map(fields), "at": int(entry_id.split(b"-")[0])})


class _Outcome(BaseModel):
    kind: Literal["over", "failed", "undeliverable", "full", "away"]
    """The outcome of an attempt. `over`: done or not needed. `failed`: to be tried again.
    `undeliverable`: given up. `full`: too many calls at once. `away`: Redis is away."""
    reason: str = ""
    receiver: str | None = None


class Deliveries:
    """The waiting webhooks, and the threads that call them. All other work runs in one thread."""

    def __init__(
        self,
        connection: redis.Redis,
        settings: JobsSettings,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._settings = settings
        self._clock = clock
        self._keys = Keys(settings.queue)
        self._queue = RequestQueue(connection, settings.queue)
        self._redis = self._queue.redis
        self._secrets = WebhookSecrets(settings)
        self._log = get_logger(queue=settings.queue)
        self._threads = ThreadPoolExecutor(settings.webhook_workers, "webhook")
        self._turns = Turns(settings.webhook_workers)
        self._under_way: dict[Future[_Outcome], str] = {}
        self._is_known = False
        self._forget()

    def go_on(self) -> None:
        """Stores the outcomes of calls, reads new webhooks, and calls the webhooks that are due."""
        try:
            self._note()
            if not self._is_known:
                self._read_all()
            for _ in range(_PAGES):
                if self._take_in() < _PAGE:
                    break
        except redis.ResponseError as error:
            if not is_wrong_type(error):
                raise
            self._read_all()
        self._begin()

    def pause(self) -> None:
        """Stores outcomes but starts no delivery, because another process leads. The next `go_on`
        reads all webhooks again."""
        if self._is_known:
            self._forget()
            self._is_known = False
        self._note()

    def wait(self, seconds: float) -> bool:
        """Waits up to `seconds` until a running call ends. Returns whether any call was running."""
        if not self._under_way:
            time.sleep(seconds)
            return False
        wait(self._under_way, seconds, FIRST_COMPLETED)
        return True

    def close(self, seconds: float) -> None:
        """Begins no more calls, and waits up to `seconds` for the running calls."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        wait(self._under_way, seconds)
        self._note()

    def _forget(self) -> None:
        self._waiting: dict[str, Waiting] = {}
        self._receivers: dict[str, str] = {}
        self._of_tenant: Counter[str] = Counter()
        self._later: list[tuple[float, str]] = []
        self._ready = set(self._under_way.values())
        """Ids of webhooks that are due or being called."""
        self._turns.forget_due()

    def _read_all(self) -> None:
        self._forget()
        key = self._keys.webhooks_waiting
        entries: dict[bytes, bytes] = {}
        with deleted_if_spoilt(self._redis, key):
            entries = self._redis.hgetall(key)
        for raw, value in entries.items():
            [request_id] = ids_of([raw])
            try:
                waiting = Waiting.model_validate_json(value)
                check_request_id(request_id)
            except (ValidationError, InvalidRequestError):
                reason = "not a webhook"
                self._log.warning("webhook entry removed", entry=shown(raw), reason=reason)
                self._redis.hdel(key, raw)
            else:
                waiting.tenant = tenant_of(waiting.tenant)
                self._plan(request_id, waiting)
        self._is_known = True

    def _plan(self, request_id: str, item: Waiting) -> None:
        if request_id not in self._waiting:
            self._of_tenant[item.tenant] += 1
        self._waiting[request_id] = item
        heapq.heappush(self._later, (item.due, request_id))

    def _take_in(self) -> int:
        """Adds the webhooks of up to `_PAGE` ended requests. Returns the number of requests."""
        key = self._keys.webhooks
        ids = self._queue.run(entries_of("ZRANGE", key, 0, _PAGE - 1))
        if not ids:
            return 0
        keys = [self._keys.request("").encode() + raw for raw in ids]
        reading = [Call("", ["HGET", record, "tenant"], _tenant, str) for record in keys]
        tenants = self._queue.run(reading)
        new: dict[str, Waiting] = {}
        coming: Counter[str] = Counter()
        writing = list[Call[Any]]()
        for raw, request_id, tenant in zip(ids, ids_of(ids), tenants, strict=True):
            if not is_request_id(request_id):
                self._log.warning("webhook entry removed", entry=shown(raw), reason="not an id")
            elif self._of_tenant[tenant] + coming[tenant] >= self._settings.webhook_max_waiting:
                reason = "too many webhooks of its tenant wait"
                writing.append(self._bury(request_id, tenant, 0, reason))
            else:
                coming[tenant] += request_id not in self._waiting
                new[request_id] = Waiting(tenant=tenant, due=self._clock())
                # Keep the record, because the message is made from it. A dead letter never expires.
                record = self._keys.request(request_id)
                writing.append(Call("", ["PEXPIRE", record, _RECORD_MS, "GT"], int))
        writing += [self._keep(request_id, item) for request_id, item in new.items()]
        writing.append(Call("", ["ZREM", key, *ids], int))
        self._queue.run(writing, atomic=True)
        for request_id, item in new.items():
            self._plan(request_id, item)
        return len(ids)

    def _begin(self) -> None:
        now = self._clock()
        while self._later and self._later[0][0] <= now:
            due, request_id = heapq.heappop(self._later)
            item = self._waiting.get(request_id)
            if item is not None and item.due == due:
                self._make_ready(request_id)
        while (due_id := self._turns.take()) is not None:
            self._under_way[self._threads.submit(self._call, due_id)] = due_id

    def _make_ready(self, request_id: str) -> None:
        item = self._waiting.get(request_id)
        if item is not None and request_id not in self._ready:
            self._ready.add(request_id)
            self._turns.add(request_id, item.tenant, self._receivers.get(request_id))

    def _call(self, request_id: str) -> _Outcome:
        """Makes one attempt to call a webhook, in a thread. Returns the outcome."""
        receiver = None
        try:
            if not self._redis.hexists(self._keys.webhooks_waiting, request_id):
                return _Outcome(kind="over")
            record = self._queue.run(lookups.record(self._keys, request_id))
            message = message_of(self._keys.queue, request_id, record)
            if message is None:
                return _Outcome(kind="over")
            receiver = message.receiver
            if not self._turns.name_receiver(request_id, receiver):
                return _Outcome(kind="full", receiver=receiver)
            status = deliver(message, self._settings, self._secrets)
            self._log_of(request_id, message.tenant).info("webhook delivered", status=status)
        except UndeliverableError as error:
            return _Outcome(kind="undeliverable", reason=str(error), receiver=receiver)
        except (DeliveryError, ConfigurationError) as error:
            return _Outcome(kind="failed", reason=str(error), receiver=receiver)
        except redis.RedisError as error:
            if is_wrong_type(error):
                self._is_known = False
            return _Outcome(kind="away", receiver=receiver)
        except Exception as error:  # one message must not stop the others
            item = self._waiting.get(request_id)
            log = self._log_of(request_id, item.tenant if item is not None else "")
            log.error("webhook cannot be called", exc_info=error)
            return _Outcome(kind="failed", reason=type(error).__name__, receiver=receiver)
        return _Outcome(kind="over")

    def _log_of(self, request_id: str, tenant: str) -> Any:
        webhook_id = webhook_id_of(self._keys.queue, request_id)
        return self._log.bind(request_id=request_id, webhook_id=webhook_id, tenant=tenant)

    def _note(self) -> None:
        for future in [attempt for attempt in self._under_way if attempt.done()]:
            request_id = self._under_way[future]
            outcome = _Outcome(kind="away") if future.cancelled() else future.result()
            self._write(request_id, outcome)
            del self._under_way[future]
            self._turns.give_back(request_id)
            self._ready.discard(request_id)
            if outcome.kind == "full":
                self._make_ready(request_id)

    def _write(self, request_id: str, outcome: _Outcome) -> None:
        """Stores a call's outcome. After a redis.RedisError, `_write` must be called again."""
        item = self._waiting.get(request_id)
        if outcome.receiver is not None and item is not None:
            self._receivers[request_id] = outcome.receiver
        if outcome.kind == "away" and item is not None:
            item.due = self._clock() + _SOON_SECONDS
            heapq.heappush(self._later, (item.due, request_id))
        if outcome.kind in ("away", "full"):
            return
        writing = list[Call[Any]]()
        again = None
        if outcome.kind != "over" and item is not None:
            if outcome.kind == "failed":
                again = self._next_attempt(request_id, item, outcome.reason)
            if again is None:
                attempts = item.attempts + 1
                writing.append(self._bury(request_id, item.tenant, attempts, outcome.reason))
        if again is not None:
            writing.append(self._keep(request_id, again))
        elif outcome.kind == "over" or item is not None:
            writing.append(Call("", ["HDEL", self._keys.webhooks_waiting, request_id], int))
        self._queue.run(writing, atomic=True)
        if again is not None:
            self._plan(request_id, again)
        elif item is not None:
            del self._waiting[request_id]
            self._receivers.pop(request_id, None)
            self._of_tenant[item.tenant] -= 1

    def _next_attempt(self, request_id: str, item: Waiting, reason: str) -> Waiting | None:
        attempts = item.attempts + 1
        left = len(BACKOFF_SECONDS) - item.attempts
        log = self._log_of(request_id, item.tenant)
        log.warning("webhook failed", reason=reason, attempts_left=left)
        if not left:
            return None
        due = self._clock() + BACKOFF_SECONDS[item.attempts]
        return Waiting(tenant=item.tenant, attempts=attempts, due=due)

    def _keep(self, request_id: str, item: Waiting) -> Call[int]:
        args = ["HSET", self._keys.webhooks_waiting, request_id, item.model_dump_json()]
        return Call("", [*args], int)

    def _bury(self, request_id: str, tenant: str, attempts: int, reason: str) -> Call[Any]:
        self._log_of(request_id, tenant).warning("webhook is dead", reason=reason)
        args: list[str | bytes | int] = ["XADD", self._keys.webhooks_dead]
        args += ["MAXLEN", "~", _DEAD_KEPT, "*", "request_id", request_id, "tenant", tenant]
        args += ["attempts", attempts, "reason", reason[:_REASON_CHARACTERS]]
        return Call("", args, bytes, bytes)


def _tenant(reply: bytes | None) -> str:
    return tenant_of(text_of(reply)) if reply is not None and reply.isascii() else ""

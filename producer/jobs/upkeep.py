"""Upkeep: jobs that keep a queue tidy even without live workers. The leader enqueues them."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from contextlib import suppress
from pathlib import Path
from typing import Any

import redis

from promptq.producer.admin.request_fields import whole
from promptq.producer.batch_store.files import BATCH_FILE_SECONDS, FileStore
from promptq.producer.clients.connecting import server_url
from promptq.producer.settings.jobs import JobsSettings
from promptq.shared.protocol.keys import Keys
from promptq.shared.queue.call import text_map
from promptq.shared.queue.request_queue import RequestQueue
from promptq.shared.queue.spoilt import deleted_if_spoilt, errors_logged, note, spoilt_record
from promptq.shared.queue.statistics import Contribution
from promptq.shared.queue.statistics import sample as statistics_sample
from promptq.shared.runtime.logs import get_logger
from promptq.shared.server.cluster import client_of
from promptq.shared.server.connection import open_redis

REAP_SECONDS = 5

_MINUTE_MS = 60_000
_MINUTES_KEPT = 7 * 24 * 60


def reap(settings: JobsSettings) -> str:
    """Puts dead workers' requests back into the queue, ends expired requests, keeps statistics.

    If this job has not run for a while, the server may have been down, so that no worker could
    renew its leases. Then the job reaps nothing for half a lease, so that workers can renew first.
    Returns the outcome in words, for RQ.
    """
    queue = settings.queue
    with open_redis(server_url(settings.redis_url)) as connection:
        if not _has_been_watched(connection, Keys(queue), settings.lease_ms):
            return "waits for workers to renew their leases"
        requests = RequestQueue(connection, queue, max_crashes=settings.max_crashes)
        returned = ended = dead = 0
        has_more = True
        while has_more:
            reaped = requests.reap()
            returned += reaped.returned
            ended += reaped.ended
            dead += reaped.dead
            has_more = reaped.has_more
        requests.run(statistics_sample(Contribution()))
    if returned or ended or dead:
        get_logger(queue=queue).info("reaped", returned=returned, ended=ended, dead=dead)
    return f"{returned} returned, {ended} ended, {dead} dead"


def _has_been_watched(connection: redis.Redis, keys: Keys, lease_ms: int) -> bool:
    """Returns whether reaping has run for half a lease without interruption."""
    client = client_of(connection, keys)
    seconds, microseconds = client.time()
    now: int = seconds * 1000 + microseconds // 1000
    seen, since = _watched(client, keys)
    if not 0 < since <= now or now - seen > 1500 * REAP_SECONDS:
        since = now
    client.hset(keys.upkeep, mapping={"seen": now, "since": since})
    return now - since >= lease_ms / 2


def _watched(client: Any, keys: Keys) -> tuple[int, int]:
    """Returns the time of the last reaping, and the time since which reaping has never paused.

    Both are Unix milliseconds; 0: unknown.
    """
    seen = since = None
    with deleted_if_spoilt(client, keys.upkeep):
        seen, since = client.hmget(keys.upkeep, "seen", "since")
    return whole(seen), whole(since)


def sweep(settings: JobsSettings) -> str:
    """Deletes expired files, and leftovers of interrupted uploads and old batches.

    Returns the number of deletions in words, for RQ.
    """
    folder = settings.files_dir
    count = FileStore(folder).sweep() + _sweep_old(folder / "running")
    if count:
        get_logger(queue=settings.queue).info("swept files", count=count)
    return f"{count} files"


def _sweep_old(folder: Path) -> int:
    count = 0
    for path in folder.glob("batch_*.jsonl*"):
        with suppress(FileNotFoundError):
            if path.stat().st_mtime < time.time() - BATCH_FILE_SECONDS:
                path.unlink()
                count += 1
    return count


def roll_up(settings: JobsSettings) -> str:
    """Summarises the statistics: writes one entry for each past minute with samples.

    The entry's id is the minute, so no entry is written twice. Rates and counts are means,
    `finished` is a sum, and 95th percentiles are the largest in the minute. Returns the number of
    entries in words, for RQ.
    """
    keys, count = Keys(settings.queue), 0
    with open_redis(server_url(settings.redis_url)) as connection:
        client = client_of(connection, keys)
        seconds, _ = client.time()
        end = seconds * 1000 // _MINUTE_MS * _MINUTE_MS
        begin = _next_minute(client, keys, end)
        minutes: dict[int, list[dict[str, str]]] = defaultdict(list)
        entries: list[Any] = []
        with errors_logged(keys.statistics):
            entries = client.xrange(keys.statistics, begin, f"({end}-0")
        for entry_id, fields in entries:
            minutes[_ms_of(entry_id) // _MINUTE_MS * _MINUTE_MS].append(text_map(fields))
        for minute, samples in sorted(minutes.items()):
            with suppress(redis.ResponseError):  # another process was first
                client.xadd(
                    keys.statistics_minutes,
                    _one_of(samples),
                    id=f"{minute}-0",
                    maxlen=_MINUTES_KEPT,
                )
                count += 1
    return f"{count} minutes"


def _next_minute(client: Any, keys: Keys, end: int) -> int:
    """Returns the first minute without an entry, in Unix milliseconds.

    A stream that breaks the protocol is deleted and begins anew.
    """
    key, last = keys.statistics_minutes, []
    with deleted_if_spoilt(client, key):
        last = client.xrevrange(key, count=1)
    begin = _ms_of(last[0][0]) + _MINUTE_MS if last else 0
    if begin > end + _MINUTE_MS:  # no later entry could be added
        note(spoilt_record(key, "its last entry is in the future"))
        client.delete(key)
        return 0
    return begin


def _ms_of(entry_id: bytes) -> int:
    return int(entry_id.split(b"-")[0])


def _one_of(samples: list[dict[str, str]]) -> dict[str, str]:
    """Returns a summary of a minute's samples. Skips values that are not numbers."""
    values: dict[str, list[float]] = defaultdict(list)
    for sample in samples:
        for name, text in sample.items():
            with suppress(ValueError):
                number = float(text)
                if math.isfinite(number):
                    values[name].append(number)
    minute = {"samples": str(len(samples))}
    for name, numbers in values.items():
        if name == "finished":
            number = sum(numbers)
        elif name.endswith("_p95_ms"):
            number = max(numbers)
        else:
            number = sum(numbers) / len(numbers)
        minute[name] = f"{number:.10g}"
    return minute

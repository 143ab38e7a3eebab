"""Moves webhooks from RQ, where releases before 0.3 enqueued them, to the queue's Redis."""

from __future__ import annotations

import json
import re
import time
import zlib
from typing import Any

import redis

from promptq.producer.jobs.rq_jobs import rq_queue_name
from promptq.shared.protocol.keys import Keys, is_request_id
from promptq.shared.queue.spoilt import deleted_if_spoilt
from promptq.shared.runtime.logs import get_logger

_JOB_ID = re.compile(rb"msg_[0-9a-f]{32}")
_MAX_BYTES = 16 * 1024 * 1024
"""The most bytes of a webhook's job in RQ, compressed or not. A job has the whole message."""
_PAGE = 500


def take_over(jobs: redis.Redis, own: redis.Redis, keys: Keys) -> int:
    """Moves webhooks that wait in the server `jobs` to the server `own`. Returns their number.

    Each call reads and deletes one page of each list. In a job, only the request's id is read. So a
    forged job can only cause one more call of the webhook that this request names.
    """
    client: Any = jobs
    name = rq_queue_name(keys.queue, "webhooks")
    waiting, scheduled = f"rq:queue:{name}", f"rq:scheduled:{name}"
    job_ids: list[bytes] = []
    for key, read in ((waiting, client.lrange), (scheduled, client.zrange)):
        with deleted_if_spoilt(client, key):
            job_ids += read(key, 0, _PAGE - 1)
    count = 0
    for job_id in job_ids:
        if _JOB_ID.fullmatch(job_id):
            job = f"rq:job:{job_id.decode()}"
            data = b""
            with deleted_if_spoilt(client, job):
                if client.hstrlen(job, "data") <= _MAX_BYTES:
                    data = client.hget(job, "data") or b""
            request_id = _request_id_in(data)
            if request_id is not None and own.exists(keys.request(request_id)):
                own.zadd(keys.webhooks, {request_id: int(time.time() * 1000)}, nx=True)
                count += 1
            client.delete(job)
        client.lrem(waiting, 0, job_id)
        client.zrem(scheduled, job_id)
    if job_ids:
        get_logger(queue=keys.queue).info("webhooks taken over", found=len(job_ids), taken=count)
    return count


def _request_id_in(data: bytes) -> str | None:
    try:
        text = zlib.decompressobj().decompress(data, _MAX_BYTES)
        _, _, (_, _, _, body), _ = json.loads(text)
        request_id = json.loads(body)["data"]["request_id"]
    except (ValueError, TypeError, KeyError, RecursionError, zlib.error):
        return None
    return request_id if isinstance(request_id, str) and is_request_id(request_id) else None

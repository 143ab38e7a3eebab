"""Webhooks that releases before 0.3 handed to RQ; from now on they wait in the queue's Redis."""

from __future__ import annotations

import json
import re
import time
import zlib
from typing import Any

import redis

from promptq.producer.jobs.allowed_jobs import rq_queue_name
from promptq.shared.protocol.keys import Keys, is_request_id
from promptq.shared.runtime.logs import get_logger

_JOB_ID = re.compile(rb"msg_[0-9a-f]{32}")
_MAX_BYTES = 64 * 1024 * 1024
"""Of a job, which held the whole message."""


def take_over(jobs: redis.Redis, own: redis.Redis, keys: Keys) -> int:
    """Have those called that waited in RQ for their first attempt or the next; gives how many.

    Of a job only the request's id is taken. Whoever wrote it gets nothing but one more call of a
    webhook that the request itself asks for.
    """
    client: Any = jobs
    name = rq_queue_name(keys.queue, "webhooks")
    waiting, scheduled = f"rq:queue:{name}", f"rq:scheduled:{name}"
    found = [*client.lrange(waiting, 0, -1), *client.zrange(scheduled, 0, -1)]
    count = 0
    for job_id in found:
        if _JOB_ID.fullmatch(job_id):
            key = b"rq:job:" + job_id
            request_id = _request_id_in(client.hget(key, "data") or b"")
            if request_id is not None and own.exists(keys.request(request_id)):
                own.zadd(keys.webhooks, {request_id: int(time.time() * 1000)}, nx=True)
                count += 1
            client.delete(key)
        client.lrem(waiting, 0, job_id)
        client.zrem(scheduled, job_id)
    if found:
        get_logger(queue=keys.queue).info("webhooks taken over", found=len(found), taken=count)
    return count


def _request_id_in(data: bytes) -> str | None:
    try:
        text = zlib.decompressobj().decompress(data, _MAX_BYTES)
        _, _, (_, _, _, body), _ = json.loads(text)
        request_id = json.loads(body)["data"]["request_id"]
    except (ValueError, TypeError, KeyError, RecursionError, zlib.error):
        return None
    return request_id if isinstance(request_id, str) and is_request_id(request_id) else None

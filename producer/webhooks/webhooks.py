"""Webhooks: a URL is told that a request has ended, signed, and again until it takes that."""

from __future__ import annotations

import hashlib
import http.client
import json
import time
from datetime import UTC, datetime
from typing import Any
from urllib.parse import urlsplit

from promptq.producer.settings import read_jobs_settings
from promptq.producer.webhooks.safe_http import AddressRefusedError, post
from promptq.producer.webhooks.webhook_signature import load_secret, sign
from promptq.shared.errors import InvalidRequestError, PromptqError
from promptq.shared.protocol.request import Request
from promptq.shared.runtime.logs import get_logger

BACKOFF_SECONDS = (5, 30, 120, 600, 1800, 3600, 7200, 14_400, 21_600, 36_000)
"""Between the attempts, together just under a day."""


class UnreadableRecordError(PromptqError):
    """No message can be made of a request's hash."""


class DeliveryError(PromptqError):
    """The receiver did not take it; it is tried again."""


def webhook_id_of(queue: str, request_id: str) -> str:
    """The same for every attempt, so that a receiver can drop what it has."""
    return "msg_" + hashlib.sha256(f"{queue}:{request_id}".encode()).hexdigest()[:32]


def message_of(queue: str, request_id: str, record: dict[str, str]) -> tuple[str, str] | None:
    """(URL, body) of what is to be sent for a request's hash; None where nobody asked.

    Raises UnreadableRecordError for one that is gone, or into which a stranger wrote.
    """
    if not record:
        raise UnreadableRecordError("its record is kept no longer")
    try:
        request = Request.parse(record.get("payload", ""))
    except InvalidRequestError:  # it may have ended for just that; its URL may be sound
        url, metadata = _url_of(record.get("payload", "")), None
    else:
        url, metadata = request.webhook_url, request.metadata
    if url is None:
        return None
    try:
        body = _body_of(queue, request_id, record, metadata)
        body.encode()  # as it will be sent
    except (ValueError, OverflowError, OSError, RecursionError) as error:
        raise UnreadableRecordError(f"its record is no worker's: {error}") from None
    return url, body


def _body_of(queue: str, request_id: str, record: dict[str, str], metadata: object) -> str:
    finished_at = datetime.fromtimestamp(int(record.get("finished_at") or 0) / 1000, UTC)
    body = {
        "type": f"request.{record.get('state', 'unknown')}",
        "timestamp": finished_at.isoformat().replace("+00:00", "Z"),
        "data": {
            "request_id": request_id,
            "queue": queue,
            "state": record.get("state"),
            "metadata": metadata,
            "result": json.loads(record.get("result") or "null"),
        },
    }
    return json.dumps(body, ensure_ascii=False, separators=(",", ":"))


def deliver_webhook(queue: str, webhook_id: str, url: str, body: str) -> str:
    """The RQ job: one attempt. Raises DeliveryError to be tried again."""
    settings = read_jobs_settings(queue=queue)
    log = get_logger(webhook_id=webhook_id)
    timestamp = int(time.time())
    headers = {
        "content-type": "application/json; charset=utf-8",
        "user-agent": "promptq",
        "webhook-id": webhook_id,
        "webhook-timestamp": str(timestamp),
        "webhook-signature": sign(load_secret(settings), webhook_id, timestamp, body),
    }
    try:
        status = post(
            url,
            body.encode(),
            headers,
            timeout=settings.webhook_timeout_seconds,
            allow_private=settings.webhook_allow_private,
        )
    except AddressRefusedError as error:
        log.warning("webhook refused", reason=str(error))
        return f"refused: {error}"
    except (OSError, http.client.HTTPException) as error:
        raise DeliveryError(f"{_host(url)}: {type(error).__name__}: {error}") from None
    if status == 410:
        log.info("webhook is not wanted any more", status=status)
        return "gone"
    if not 200 <= status < 300:
        raise DeliveryError(f"{_host(url)} answered {status}")
    log.info("webhook delivered", status=status)
    return "delivered"


def _host(url: str) -> str:
    """What of a URL may be logged: the rest may hold what only its owner should know."""
    return urlsplit(url).hostname or "the receiver"


def _url_of(payload: str) -> str | None:
    try:
        fields: Any = json.loads(payload)
        url = fields.get("webhook_url")
    except (ValueError, AttributeError, RecursionError):
        return None
    return url if isinstance(url, str) else None

"""Webhooks: a URL is told that a request has ended, signed, and again until it takes that."""

from __future__ import annotations

import hashlib
import http.client
import json
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any
from urllib.parse import urlsplit

from promptq.producer.settings import JobsSettings
from promptq.producer.webhooks.safe_http import AddressRefusedError, post
from promptq.producer.webhooks.webhook_signature import WebhookSecrets
from promptq.shared.errors import InvalidRequestError, PromptqError
from promptq.shared.protocol.keys import is_tenant
from promptq.shared.protocol.request import Request

BACKOFF_SECONDS = (5, 30, 120, 600, 1800, 3600, 7200, 14_400, 21_600, 36_000)
"""Between the attempts, together just under a day."""


class UndeliverableError(PromptqError):
    """It is not tried again: no message can be made, or nobody is there who may or wants to hear
    it."""


class DeliveryError(PromptqError):
    """The receiver did not take it; it is tried again."""


@dataclass(frozen=True, slots=True)
class Message:
    """What is to be sent, and to whom."""

    webhook_id: str
    tenant: str
    """Whose request it was; '' is the tenant without a name."""
    url: str
    body: str

    @property
    def receiver(self) -> str:
        """Host and port: all URLs there wait for each other. The rest is for their owner alone."""
        try:
            parts = urlsplit(self.url)
            return f"{parts.hostname}:{parts.port or parts.scheme}"[:300]
        except ValueError:
            return "nobody"  # which is found when it is called


def webhook_id_of(queue: str, request_id: str) -> str:
    """The same for every attempt, so that a receiver can drop what it has."""
    return "msg_" + hashlib.sha256(f"{queue}:{request_id}".encode()).hexdigest()[:32]


def tenant_of(name: str | None) -> str:
    """Whose a request is by its hash; what is no name is that of nobody."""
    return name if name and is_tenant(name) else ""


def message_of(queue: str, request_id: str, record: dict[str, str]) -> Message | None:
    """What is to be sent for a request's hash; None where nobody asked.

    Raises UndeliverableError for one that is gone, or into which a stranger wrote.
    """
    if not record:
        raise UndeliverableError("its record is kept no longer")
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
        raise UndeliverableError(f"its record is no worker's: {error}") from None
    tenant = tenant_of(record.get("tenant"))
    return Message(webhook_id_of(queue, request_id), tenant, url, body)


def _body_of(queue: str, request_id: str, record: dict[str, str], metadata: object) -> str:
    finished_at = datetime.fromtimestamp(int(record.get("finished_at") or 0) / 1000, UTC)
    body = {
        "type": f"request.{record.get('state', 'unknown')}",
        "timestamp": finished_at.isoformat().replace("+00:00", "Z"),
        "data": {
            "request_id": request_id,
            "queue": queue,
            "tenant": tenant_of(record.get("tenant")) or None,
            "state": record.get("state"),
            "metadata": metadata,
            "result": json.loads(record.get("result") or "null"),
        },
    }
    return json.dumps(body, ensure_ascii=False, separators=(",", ":"))


def deliver(message: Message, settings: JobsSettings, secrets: WebhookSecrets) -> int:
    """One attempt; gives the status of the answer.

    Raises DeliveryError to be tried again, and UndeliverableError.
    """
    timestamp = int(time.time())
    headers = {
        "content-type": "application/json; charset=utf-8",
        "user-agent": "promptq",
        "webhook-id": message.webhook_id,
        "webhook-timestamp": str(timestamp),
        "webhook-signature": secrets.sign(
            message.tenant, message.webhook_id, timestamp, message.body
        ),
    }
    try:
        status = post(
            message.url,
            message.body.encode(),
            headers,
            timeout=settings.webhook_timeout_seconds,
            allow_private=settings.webhook_allow_private,
        )
    except AddressRefusedError as error:
        raise UndeliverableError(str(error)) from None
    except (OSError, http.client.HTTPException) as error:
        raise DeliveryError(f"{message.receiver}: {type(error).__name__}: {error}") from None
    if status == 410:
        raise UndeliverableError(f"{message.receiver} answered 410: it wants no more")
    if not 200 <= status < 300:
        raise DeliveryError(f"{message.receiver} answered {status}")
    return status


def _url_of(payload: str) -> str | None:
    try:
        fields: Any = json.loads(payload)
        url = fields.get("webhook_url")
    except (ValueError, AttributeError, RecursionError):
        return None
    return url if isinstance(url, str) else None

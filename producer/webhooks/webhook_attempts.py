"""Calls a webhook: sends to its URL a signed message which says that a request has ended."""

from __future__ import annotations

import hashlib
import http.client
import json
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any
from urllib.parse import urlsplit

from promptq.producer.calls.safe_http import AddressRefusedError, post
from promptq.producer.settings.jobs import JobsSettings
from promptq.producer.webhooks.webhook_signature import WebhookSecrets
from promptq.shared.errors import InvalidRequestError, PromptqError
from promptq.shared.protocol.keys import is_name
from promptq.shared.protocol.request import Request

BACKOFF_SECONDS = (5, 30, 120, 600, 1800, 3600, 7200, 14_400, 21_600, 36_000)
"""Seconds to wait after each attempt; together just under a day."""


class UndeliverableError(PromptqError):
    """No attempt can succeed: the message is lost, or the URL is not allowed, or the receiver wants
    no more webhooks."""


class DeliveryError(PromptqError):
    """The receiver did not accept the webhook. The jobs will try again."""


@dataclass(frozen=True, slots=True)
class Message:
    """The message of a webhook, and the URL to which it is sent."""

    webhook_id: str
    tenant: str
    """The tenant of the request; '' is the tenant without a name."""
    url: str
    body: str

    @property
    def receiver(self) -> str:
        """Host and port of the URL; the rest is private. Calls to one receiver take turns."""
        try:
            parts = urlsplit(self.url)
            return f"{parts.hostname}:{parts.port or parts.scheme}"[:300]
        except ValueError:
            return "nobody"  # the attempt will report the error


def webhook_id_of(queue: str, request_id: str) -> str:
    """Returns the id of a webhook. All attempts have this id, so receivers can skip repetitions."""
    return "msg_" + hashlib.sha256(f"{queue}:{request_id}".encode()).hexdigest()[:32]


def tenant_of(name: str | None) -> str:
    """Returns the name if it is a valid name of a tenant, otherwise ''."""
    return name if name and is_name(name) else ""


def message_of(queue: str, request_id: str, record: dict[str, str]) -> Message | None:
    """Returns the message for a request's hash; None if the request has no webhook. Raises
    UndeliverableError if the hash is gone or not valid."""
    if not record:
        raise UndeliverableError("the request's record has expired")
    try:
        request = Request.parse(record.get("payload", ""))
    except InvalidRequestError:  # another field is wrong; the URL may be valid
        url, metadata = _url_of(record.get("payload", "")), None
    else:
        url, metadata = request.webhook_url, request.metadata
    if url is None:
        return None
    try:
        body = _body_of(queue, request_id, record, metadata)
        body.encode()  # fails for a text that cannot be sent
    except (ValueError, OverflowError, OSError, RecursionError) as error:
        raise UndeliverableError(f"no worker wrote the request's record: {error}") from None
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
    return json.dumps(body, ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def deliver(message: Message, settings: JobsSettings, secrets: WebhookSecrets) -> int:
    """Sends a message once. Returns the answer's HTTP status, 2xx. After a failure, raises
    DeliveryError if another attempt may succeed, and UndeliverableError if none can."""
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
        raise UndeliverableError(
            f"{message.receiver} answered 410: the receiver wants no more webhooks"
        )
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

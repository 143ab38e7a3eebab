"""Webhooks: somebody's URL is told that a request has ended, signed, and again until it is taken.

Signatures are those of https://www.standardwebhooks.com, so that its libraries verify them.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import http.client
import json
import os
import secrets
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from producer.jobs.safe_http import AddressRefusedError, post
from producer.jobs.settings import JobsSettings, read_jobs_settings
from shared.errors import ConfigurationError, InvalidRequestError, PromptqError
from shared.logs import get_logger
from shared.schemas import Request

BACKOFF_SECONDS = (5, 30, 120, 600, 1800, 3600, 7200, 14_400, 21_600, 36_000)
"""Between the attempts, together just under a day."""

_PREFIX = "whsec_"


class DeliveryError(PromptqError):
    """The receiver did not take it; it is tried again."""


def load_secret(settings: JobsSettings) -> bytes:
    """The key of the signatures: that of the settings, or one that is made once and kept.

    Raises ConfigurationError.
    """
    if settings.webhook_secret is not None:
        return _decode(settings.webhook_secret.get_secret_value())
    path = secret_file(settings)
    if not path.exists():
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        own = path.with_name(f"{path.name}.{os.getpid()}")
        own.touch(0o600)
        own.write_text(_PREFIX + base64.b64encode(secrets.token_bytes(32)).decode() + "\n")
        try:
            os.link(own, path)  # which fails where another process was first
        except FileExistsError:
            pass
        finally:
            own.unlink()
    return _decode(path.read_text().strip())


def secret_file(settings: JobsSettings) -> Path:
    """Where a secret of our own making lies."""
    return settings.files_dir / "webhook-secret"


def sign(key: bytes, webhook_id: str, timestamp: int, body: str) -> str:
    """The `webhook-signature` header: HMAC-SHA256 of `id.timestamp.body`."""
    digest = hmac.digest(key, f"{webhook_id}.{timestamp}.{body}".encode(), hashlib.sha256)
    return "v1," + base64.b64encode(digest).decode()


def webhook_id_of(queue: str, request_id: str) -> str:
    """The same for every attempt, so that a receiver can drop what it has."""
    return "msg_" + hashlib.sha256(f"{queue}:{request_id}".encode()).hexdigest()[:32]


def message_of(queue: str, request_id: str, record: dict[str, str]) -> tuple[str, str] | None:
    """(URL, body) of what is to be sent for a request's hash; None where nobody asked."""
    try:
        request = Request.parse(record.get("payload", ""))
    except InvalidRequestError:  # it may have ended for just that; its URL may be sound
        url, metadata = _url_of(record.get("payload", "")), None
    else:
        url, metadata = request.webhook_url, request.metadata
    if url is None:
        return None
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
    return url, json.dumps(body, ensure_ascii=False, separators=(",", ":"))


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


def _decode(secret: str) -> bytes:
    try:
        key = base64.b64decode(secret.removeprefix(_PREFIX), validate=True)
    except ValueError:
        key = b""
    if not 24 <= len(key) <= 64:
        raise ConfigurationError(
            "webhook_secret (PROMPTQ_WEBHOOK_SECRET): is not `whsec_` and 24 to 64 bytes in base64"
        )
    return key

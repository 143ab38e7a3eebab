"""How webhooks are signed, and with what.

Signatures are those of https://www.standardwebhooks.com, so that its libraries verify them.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import os
import secrets
from pathlib import Path

from promptq.producer.settings import JobsSettings
from promptq.shared.errors import ConfigurationError
from promptq.shared.runtime.settings import ENV_PREFIX

_PREFIX = "whsec_"


def load_secret(settings: JobsSettings) -> bytes:
    """The key of the signatures: that of the settings, or one that is made once and kept.

    Raises ConfigurationError.
    """
    if settings.webhook_secret is not None:
        return _decode(settings.webhook_secret.get_secret_value())
    path = secret_file(settings)
    try:
        if not path.exists():
            _make(path)
        return _decode(path.read_text().strip())
    except OSError as error:
        raise ConfigurationError(
            f"files_dir ({ENV_PREFIX}FILES_DIR): the secret of webhooks cannot be kept in"
            f" {path.parent}: {error.strerror}"
        ) from error


def secret_file(settings: JobsSettings) -> Path:
    """Where a secret of our own making lies."""
    return settings.files_dir / "webhook-secret"


def sign(key: bytes, webhook_id: str, timestamp: int, body: str) -> str:
    """The `webhook-signature` header: HMAC-SHA256 of `id.timestamp.body`."""
    digest = hmac.digest(key, f"{webhook_id}.{timestamp}.{body}".encode(), hashlib.sha256)
    return "v1," + base64.b64encode(digest).decode()


def _make(path: Path) -> None:
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

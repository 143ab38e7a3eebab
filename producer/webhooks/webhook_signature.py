"""Signs webhooks with a secret for each tenant, derived from a master secret that is never sent.

A secret belongs to a tenant, not to a URL. If a tenant names another tenant's URL, the message has
the first tenant's signature, and the receiver refuses the message. No secret is stored in Redis.
Signatures follow https://www.standardwebhooks.com, whose library computes them.
"""

from __future__ import annotations

import base64
import fcntl
import hashlib
import hmac
import os
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, Field, SecretStr, TypeAdapter, ValidationError
from standardwebhooks.webhooks import Webhook

from promptq.producer.settings.jobs import JobsSettings
from promptq.shared.errors import ConfigurationError
from promptq.shared.settings.common import ENV_PREFIX

OVERLAP_SECONDS = 86_400
"""Seconds after a rotation for which the previous secret signs, too."""
_PREFIX = "whsec_"


class Rotation(BaseModel):
    """The version of a tenant's secret, and the time since which it is valid (Unix seconds)."""

    version: Annotated[int, Field(ge=2, le=10**9)]
    since: float


_ROTATIONS = TypeAdapter(dict[str, Rotation])


class WebhookSecrets:
    """The secrets of a queue's tenants. '' is the tenant without a name.

    All methods raise ConfigurationError if the folder for files cannot be used.
    """

    def __init__(self, settings: JobsSettings, clock: Callable[[], float] = time.time) -> None:
        self._queue = settings.queue
        self._clock = clock
        self._rotations = settings.files_dir / "webhook-rotations.json"
        self._master = _load_master(settings)
        self._shared = _shared_secret(settings)

    @property
    def has_shared(self) -> bool:
        """Whether the secret of releases before 0.3, shared by all tenants, also signs webhooks."""
        return self._shared is not None

    def of(self, tenant: str) -> list[str]:
        """Returns the tenant's valid secrets, the newest first, without the shared one."""
        rotation = self._read().get(self._name(tenant))
        if rotation is None:
            return [self._make(tenant, 1)]
        versions = [rotation.version]
        if self._clock() < rotation.since + OVERLAP_SECONDS:
            versions.append(rotation.version - 1)
        return [self._make(tenant, version) for version in versions]

    def rotate(self, tenant: str) -> str:
        """Creates and returns a tenant's new secret. The old one is valid for OVERLAP_SECONDS."""
        with _explained(self._rotations), _locked(self._rotations.with_suffix(".lock")):
            secrets = self._read()
            last = secrets.get(self._name(tenant))
            version = 2 if last is None else last.version + 1
            secrets[self._name(tenant)] = Rotation(version=version, since=self._clock())
            new = self._rotations.with_suffix(".new")
            new.unlink(missing_ok=True)
            new.touch(0o600)
            new.write_bytes(_ROTATIONS.dump_json(secrets))
            new.replace(self._rotations)
        return self._make(tenant, version)

    def sign(self, tenant: str, webhook_id: str, timestamp: int, body: str) -> str:
        """Returns the header `webhook-signature`, which has one signature for each valid secret."""
        # The shared secret comes first, for old receivers that read only one signature.
        valid = ([self._shared] if self._shared else []) + self.of(tenant)
        at = datetime.fromtimestamp(timestamp, UTC)
        return " ".join(Webhook(secret).sign(webhook_id, at, body) for secret in valid)

    def _name(self, tenant: str) -> str:
        return f"{self._queue}:{tenant}"

    def _make(self, tenant: str, version: int) -> str:
        """Derives a secret from the master secret. The result does not reveal other secrets."""
        what = f"promptq webhook {version} {self._queue} {tenant}".encode()
        return _encode(hmac.digest(self._master, what, hashlib.sha256))

    def _read(self) -> dict[str, Rotation]:
        with _explained(self._rotations):
            try:
                return _ROTATIONS.validate_json(self._rotations.read_bytes())
            except FileNotFoundError:
                return {}
            except ValidationError as error:
                raise ConfigurationError(
                    f"{self._rotations} is not a list of rotations: {error.errors()[0]['msg']}"
                ) from None


def master_file(settings: JobsSettings) -> Path:
    """Returns the path of the master secret that promptq has generated."""
    return settings.files_dir / "webhook-master-secret"


def shared_file(settings: JobsSettings) -> Path:
    """Returns the path at which releases before 0.3 stored the one secret of all receivers."""
    return settings.files_dir / "webhook-secret"


def _load_master(settings: JobsSettings) -> bytes:
    """Returns the master secret in the settings, or else the one that promptq made and stored."""
    if settings.webhook_master_secret is not None:
        return _decode(settings.webhook_master_secret, "webhook_master_secret")
    path = master_file(settings)
    with _explained(path):
        if not path.exists():
            _make_once(path)
        return _decode(SecretStr(path.read_text().strip()), "webhook_master_secret")


def _shared_secret(settings: JobsSettings) -> str | None:
    secret, path = settings.webhook_secret, shared_file(settings)
    with _explained(path):
        if secret is None and path.exists():
            secret = SecretStr(path.read_text().strip())
    return None if secret is None else _encode(_decode(secret, "webhook_secret"))


def _make_once(path: Path) -> None:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    own = path.with_name(f"{path.name}.{os.getpid()}")
    own.touch(0o600)
    own.write_text(_encode(secrets.token_bytes(32)) + "\n")
    try:
        os.link(own, path)  # fails if another process was first
    except FileExistsError:
        pass
    finally:
        own.unlink()


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigurationError(
            f"files_dir ({ENV_PREFIX}FILES_DIR): the secrets of webhooks cannot be kept in"
            f" {path.parent}: {error.strerror}"
        ) from error


def _encode(key: bytes) -> str:
    return _PREFIX + base64.b64encode(key).decode()


def _decode(secret: SecretStr, name: str) -> bytes:
    text = secret.get_secret_value()
    try:
        key = base64.b64decode(text.removeprefix(_PREFIX), validate=True)
    except ValueError:
        key = b""
    if not 24 <= len(key) <= 64:
        raise ConfigurationError(
            f"{name} ({ENV_PREFIX}{name.upper()}): is not `whsec_` and 24 to 64 bytes in base64"
        )
    return key

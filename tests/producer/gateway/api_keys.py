"""API keys of a gateway's callers."""

from __future__ import annotations

from typing import Any

from promptq import Client
from promptq.producer.admin.api_keys import ApiKey


def make_key(url: str, name: str, weight: float | None = None, **fields: Any) -> str:
    """The secret of a new key."""
    with Client(url) as client:
        return client.create_api_key(ApiKey.build(name=name, **fields), weight)[0]


def bearer(secret: str) -> dict[str, str]:
    """The header that a caller with this key sends."""
    return {"Authorization": f"Bearer {secret}"}

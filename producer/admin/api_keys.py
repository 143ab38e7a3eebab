"""API keys of the gateway: what each stands for, and where they are kept.

A key is 256 random bits, so its plain SHA-256 is enough to keep: there is nothing to guess. The key
itself is shown once, when it is made, and is nowhere afterwards.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Generator
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from promptq.shared.errors import ConfigurationError, RequestNotFoundError
from promptq.shared.protocol.keys import NAME, Keys
from promptq.shared.protocol.request import MAX_PRIORITY, invalid_request
from promptq.shared.queue import lookups
from promptq.shared.queue.call import Call, text_map

_PREFIX = "pq-"


class ApiKey(BaseModel):
    """What a key allows. Limits of 0 are none."""

    model_config = ConfigDict(extra="ignore")

    name: str = Field(pattern=NAME)
    """Unique; what people call the key, and what stands in logs."""
    tenant: str | None = Field(None, pattern=NAME)
    """Whose share its requests use; None: the tenant without a name."""
    highest_priority: int = Field(0, ge=-MAX_PRIORITY, le=MAX_PRIORITY)
    """The lowest number that its requests may ask for; lower runs sooner."""
    requests_per_minute: int = Field(0, ge=0)
    tokens_per_minute: int = Field(0, ge=0)
    """Counted when a request comes: its prompt as estimated, and its `max_tokens`."""
    is_admin: bool = False
    """May see and steer the whole queue."""
    created_at: int = 0
    """Unix milliseconds of the server."""
    hint: str = ""
    """The key's last characters, to tell keys apart."""

    @classmethod
    def build(cls, **fields: Any) -> Self:
        """Raises ConfigurationError naming the field that is wrong."""
        try:
            return cls(**fields)
        except ValidationError as error:
            raise ConfigurationError(str(invalid_request(error))) from None


def hash_of(secret: str) -> str:
    """Under which a key is kept."""
    return hashlib.sha256(secret.encode("utf-8", "surrogateescape")).hexdigest()


def create(
    keys: Keys, key: ApiKey, weight: float | None = None
) -> Generator[Call[Any], Any, tuple[str, ApiKey]]:
    """A new key and its secret; with `weight`, that of its tenant is set as well.

    Yields calls, is sent what they give. Raises ConfigurationError if the name is taken.
    """
    for other in (yield from list_all(keys)):
        if other.name == key.name:
            raise ConfigurationError(f"name: there is a key {key.name!r} already; revoke it first")
    secret = _PREFIX + secrets.token_urlsafe(32)
    now_ms = yield lookups.server_time_ms()
    made = key.model_copy(update={"created_at": now_ms, "hint": secret[-4:]})
    yield Call("", ["HSET", keys.api_keys, hash_of(secret), made.model_dump_json()], int)
    if weight is not None:
        yield Call("", ["HSET", keys.config, f"weight:{key.tenant or ''}", repr(weight)], int)
    return secret, made


def list_all(keys: Keys) -> Generator[Call[Any], Any, list[ApiKey]]:
    """All keys by their names. Yields calls as `create`."""
    found = yield Call("", ["HVALS", keys.api_keys], list)
    return sorted((ApiKey.model_validate_json(it) for it in found), key=lambda key: key.name)


def revoke(keys: Keys, name: str) -> Generator[Call[Any], Any, ApiKey]:
    """Nobody gets in with the key from now on. Raises RequestNotFoundError; yields as `create`."""
    found = yield Call("", ["HGETALL", keys.api_keys], text_map)
    named = {
        hashed: key
        for hashed, value in found.items()
        if (key := ApiKey.model_validate_json(value)).name == name
    }
    if not named:
        raise RequestNotFoundError(f"there is no key {name!r}")
    # Two, where two were made at the same moment.
    yield Call("", ["HDEL", keys.api_keys, *named], int)
    return next(iter(named.values()))


def look_up(keys: Keys, secret: str) -> Call[ApiKey | None]:
    """What a key allows; None if there is no such key."""
    return Call(
        "",
        ["HGET", keys.api_keys, hash_of(secret)],
        lambda reply: None if reply is None else ApiKey.model_validate_json(reply),
    )


def count(keys: Keys) -> Call[int]:
    """How many keys there are."""
    return Call("", ["HLEN", keys.api_keys], int)

"""API keys of the gateway: their rights and their storage.

A key is 256 random bits. Nobody can guess a key, so storing its plain SHA-256 is safe. The key
itself is printed once, when it is created, and is stored nowhere.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Sequence
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from promptq.producer.admin.request_fields import whole
from promptq.shared.errors import ConfigurationError, RequestNotFoundError
from promptq.shared.protocol.keys import NAME, Keys
from promptq.shared.protocol.request import MAX_PRIORITY, invalid_request
from promptq.shared.queue import lookups
from promptq.shared.queue.call import Call, Operation, text_map
from promptq.shared.queue.spoilt import readable

SCOPES = ("completions", "files", "batches", "models")
"""The scopes that a key may have, each a group of HTTP calls. `models` allows listing models."""

LOCAL_NAME = "local"
"""Name of callers on this machine while no key is needed. No key may have this name."""

MAX_RATE = 2**53
"""The highest limit of a key. The server's scripts count exactly up to this number."""

_PREFIX = "pq-"


class ApiKey(BaseModel):
    """An API key of the gateway, without its secret. A limit of 0 means no limit."""

    model_config = ConfigDict(extra="ignore")

    name: str = Field(pattern=NAME)
    """The key's unique name, for people and logs."""
    tenant: str | None = Field(None, pattern=NAME)
    """The tenant that the key's requests belong to. The key may read this tenant's files.

    A key that was created without a tenant has its name as tenant. None: a caller without a key.
    """
    is_own_tenant: bool = False
    """Whether the key was created without a tenant. If so, its tenant may have no other key."""
    highest_priority: int = Field(0, ge=-MAX_PRIORITY, le=MAX_PRIORITY)
    """The most urgent priority that the key's requests may have; lower numbers run sooner."""
    requests_per_minute: int = Field(0, ge=0)
    tokens_per_minute: int = Field(0, ge=0)
    """Limit of prompt and output tokens per minute. A prompt's tokens are estimated on arrival."""
    is_admin: bool = False
    """Whether the key may read and control the whole queue."""
    scopes: tuple[str, ...] | None = None
    """The scopes (`SCOPES`) that the key may call; None for all."""
    models: tuple[str, ...] | None = None
    """The names of the models that the key may use; None for all."""
    expires_at: int = Field(0, ge=0)
    """Time at which the key expires, in Unix milliseconds; 0: never."""
    created_at: int = 0
    """Time at which the key was created, in Unix milliseconds of the server."""
    hint: str = ""
    """The last four characters of the key's secret, by which people distinguish keys."""
    last_used_at: int = 0
    """Time of the key's last use in Unix milliseconds, exact to a minute; 0: never used."""

    @classmethod
    def build(cls, **fields: Any) -> Self:
        """Returns a key with these fields. Raises ConfigurationError that names the wrong field."""
        try:
            return cls(**fields)
        except ValidationError as error:
            raise ConfigurationError(str(invalid_request(error))) from None

    @property
    def party(self) -> str:
        """The tenant's name, or the key's name for a key without a tenant. Under this name, a
        gateway limits the memory and the time of calls."""
        return self.tenant or self.name

    @property
    def is_free(self) -> bool:
        """Whether the key's requests may name any tenant. Only an administrator's key that was
        created without a tenant allows this."""
        return self.is_admin and (self.tenant is None or self.is_own_tenant)

    @property
    def reach(self) -> tuple[str, ...]:
        """The tenants whose files and batches the key may read: normally only the key's tenant.

        An administrator's key that was created without a tenant may also read those of the tenant
        without a name (''). That tenant has, for example, files from before the first key.
        """
        own = self.tenant or ""
        return (own, "") if own and self.is_free else (own,)

    def is_over(self, now_ms: float) -> bool:
        """Returns whether the key has expired at `now_ms`."""
        return 0 < self.expires_at <= now_ms


def hash_of(secret: str) -> str:
    """Returns the SHA-256 of a key's secret, under which the key is stored."""
    return hashlib.sha256(secret.encode("utf-8", "surrogateescape")).hexdigest()


def create_api_key(
    keys: Keys, /, key: ApiKey, weight: float | None = None
) -> Operation[tuple[str, ApiKey]]:
    """Creates a key of the gateway. Returns its secret, which is not stored, and the stored key.

    `weight` is the new weight of the key's tenant. A key created without a tenant uses its name as
    tenant, and must be the only key of this tenant. Raises ConfigurationError if this rule would be
    broken, the name is taken, a scope is unknown, or a limit is above `MAX_RATE`.
    """
    _check_scopes(key)
    for name in ("requests_per_minute", "tokens_per_minute"):
        if getattr(key, name) > MAX_RATE:
            raise ConfigurationError(f"{name}: is above {MAX_RATE}; 0 means no limit")
    if key.name == LOCAL_NAME:
        raise ConfigurationError(
            f"name: {LOCAL_NAME!r} is the name of callers without a key; choose another one"
        )
    _check_apart(key, (yield from api_keys(keys)))
    secret = _PREFIX + secrets.token_urlsafe(32)
    now_ms = yield lookups.server_time_ms()
    created = key.model_copy(update={"created_at": now_ms, "hint": secret[-4:]})
    stored = created.model_dump_json(exclude={"is_own_tenant", "last_used_at"})
    yield Call("", ["HSET", keys.api_keys, hash_of(secret), stored], int)
    created = _of_a_tenant(created)
    if weight is not None:
        yield Call("", ["HSET", keys.config, f"weight:{created.tenant}", repr(weight)], int)
    return secret, created


def api_keys(keys: Keys, /) -> Operation[list[ApiKey]]:
    """Reads the gateway's keys, sorted by name."""
    stored, used = yield [
        Call("", ["HGETALL", keys.api_keys], text_map),
        Call("", ["HGETALL", keys.api_keys_used], text_map, dict),
    ]
    return sorted(
        (
            key.model_copy(update={"last_used_at": whole(used.get(hashed))})
            for hashed, key in _read_all(keys, stored)
        ),
        key=lambda key: key.name,
    )


def revoke_api_key(keys: Keys, /, name: str) -> Operation[ApiKey]:
    """Makes a key invalid at once. Returns the key. Raises RequestNotFoundError."""
    stored = yield Call("", ["HGETALL", keys.api_keys], text_map)
    named = {hashed: key for hashed, key in _read_all(keys, stored) if key.name == name}
    if not named:
        raise RequestNotFoundError(f"there is no key {name!r}")
    # Two keys may have one name, if they were made at the same moment.
    yield [Call("", ["HDEL", key, *named], int) for key in (keys.api_keys, keys.api_keys_used)]
    return next(iter(named.values()))


def look_up(keys: Keys, secret: str) -> Call[ApiKey | None]:
    """Reads the key with this secret; None if no such key exists."""
    return Call(
        "",
        ["HGET", keys.api_keys, hash_of(secret)],
        lambda reply: None if reply is None else _read(reply),
        lambda: None,
    )


def note_use(keys: Keys, secret: str, now_ms: int) -> Call[int]:
    """Records that a key was used at `now_ms` (Unix milliseconds)."""
    return Call("", ["HSET", keys.api_keys_used, hash_of(secret), now_ms], int)


def count(keys: Keys) -> Call[int]:
    """Reads the number of API keys."""
    return Call("", ["HLEN", keys.api_keys], int)


def _read_all(keys: Keys, stored: dict[str, str]) -> list[tuple[str, ApiKey]]:
    return readable(keys.api_keys, stored.items(), lambda entry: (entry[0], _read(entry[1])))


def _read(value: str | bytes) -> ApiKey:
    return _of_a_tenant(ApiKey.model_validate_json(value))


def _of_a_tenant(key: ApiKey) -> ApiKey:
    """Returns a copy of the key. If the key has no tenant, its name becomes the copy's tenant."""
    is_own = key.tenant is None
    tenant = key.name if is_own else key.tenant
    return key.model_copy(update={"tenant": tenant, "is_own_tenant": is_own})


def _check_scopes(key: ApiKey) -> None:
    known = ", ".join(SCOPES)
    for scope in key.scopes or ():
        if scope not in SCOPES:
            raise ConfigurationError(f"scope: {scope[:80]!r} is not one of {known}")
    if key.scopes == ():
        raise ConfigurationError(f"scope: a key needs at least one of {known}")


def _check_apart(key: ApiKey, others: Sequence[ApiKey]) -> None:
    new = _of_a_tenant(key)
    for other in others:
        if other.name == key.name:
            raise ConfigurationError(f"name: there is a key {key.name!r} already; revoke it first")
        if other.tenant != new.tenant:
            continue
        if other.is_own_tenant:
            raise ConfigurationError(
                f"tenant: {new.tenant!r} belongs to the key {other.name!r} alone, which was made"
                " without a tenant; this key would see its files and batches. Take another tenant,"
                f" or create {other.name!r} again with --tenant {new.tenant}"
            )
        if new.is_own_tenant:
            raise ConfigurationError(
                f"name: {key.name!r} is the tenant of the key {other.name!r}, and a key without a"
                " tenant gets its own name as tenant; take another name, or give --tenant"
                f" {key.name} if both keys should share them"
            )

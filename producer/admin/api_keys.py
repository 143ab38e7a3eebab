"""API keys of the gateway: what each stands for, and where they are kept.

A key is 256 random bits, so its plain SHA-256 is enough to keep: there is nothing to guess. The key
itself is shown once, when it is made, and is nowhere afterwards.
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

SCOPES = ("completions", "files", "batches", "models")
"""What a key may be kept to: completions with their streams, files, batches, the list of models."""

LOCAL_NAME = "local"
"""What callers of this machine are called where no key is needed; no key may be called so."""

_PREFIX = "pq-"


class ApiKey(BaseModel):
    """What a key allows. Limits of 0 are none."""

    model_config = ConfigDict(extra="ignore")

    name: str = Field(pattern=NAME)
    """Unique; what people call the key, and what stands in logs."""
    tenant: str | None = Field(None, pattern=NAME)
    """Whose share its requests use, and whose files it sees.

    Of a key that was made without one, its name, as soon as it is read. None is the tenant without
    a name, which only a caller without a key is.
    """
    is_own_tenant: bool = False
    """It was made without a tenant, so its name is that of a tenant which no other key may have."""
    highest_priority: int = Field(0, ge=-MAX_PRIORITY, le=MAX_PRIORITY)
    """The lowest number that its requests may ask for; lower runs sooner."""
    requests_per_minute: int = Field(0, ge=0)
    tokens_per_minute: int = Field(0, ge=0)
    """The prompt, as estimated, counts when a request comes, the output as it comes."""
    is_admin: bool = False
    """May see and steer the whole queue."""
    scopes: tuple[str, ...] | None = None
    """Those of `SCOPES` that it may call; None: all."""
    expires_at: int = Field(0, ge=0)
    """Unix milliseconds from which on nobody gets in with it; 0: never."""
    created_at: int = 0
    """Unix milliseconds of the server."""
    hint: str = ""
    """The key's last characters, to tell keys apart."""
    last_used_at: int = 0
    """Unix milliseconds, exact to a minute; 0: never. Kept apart from the rest."""

    @classmethod
    def build(cls, **fields: Any) -> Self:
        """Raises ConfigurationError naming the field that is wrong."""
        try:
            return cls(**fields)
        except ValidationError as error:
            raise ConfigurationError(str(invalid_request(error))) from None

    @property
    def party(self) -> str:
        """Whose share of a gateway's memory and time its calls take: that of its tenant."""
        return self.tenant or self.name

    @property
    def is_free(self) -> bool:
        """Whether its requests may name any tenant: of an administrator who belongs to none."""
        return self.is_admin and (self.tenant is None or self.is_own_tenant)

    @property
    def reach(self) -> tuple[str, ...]:
        """The tenants whose files and batches it sees: its own.

        Of an administrator who belongs to none also what belongs to nobody, as what was made before
        there were keys; '' is the tenant without a name.
        """
        own = self.tenant or ""
        return (own, "") if own and self.is_free else (own,)

    def is_over(self, now_ms: float) -> bool:
        """Whether it has expired."""
        return 0 < self.expires_at <= now_ms


def hash_of(secret: str) -> str:
    """Under which a key is kept."""
    return hashlib.sha256(secret.encode("utf-8", "surrogateescape")).hexdigest()


def create_api_key(
    keys: Keys, /, key: ApiKey, weight: float | None = None
) -> Operation[tuple[str, ApiKey]]:
    """Make a key of the gateway: its secret, shown this once, and what is kept of it.

    With `weight`, that of its tenant is set too. Raises ConfigurationError if the name is taken, if
    it or the tenant would let two keys see each other's that should not, and for an unknown scope.
    """
    _check_scopes(key)
    if key.name == LOCAL_NAME:
        raise ConfigurationError(
            f"name: {LOCAL_NAME!r} is what callers without a key are called; choose another one"
        )
    _check_apart(key, (yield from api_keys(keys)))
    secret = _PREFIX + secrets.token_urlsafe(32)
    now_ms = yield lookups.server_time_ms()
    made = key.model_copy(update={"created_at": now_ms, "hint": secret[-4:]})
    stored = made.model_dump_json(exclude={"is_own_tenant", "last_used_at"})
    yield Call("", ["HSET", keys.api_keys, hash_of(secret), stored], int)
    made = _of_a_tenant(made)
    if weight is not None:
        yield Call("", ["HSET", keys.config, f"weight:{made.tenant}", repr(weight)], int)
    return secret, made


def api_keys(keys: Keys, /) -> Operation[list[ApiKey]]:
    """The gateway's keys by name."""
    found, used = yield [
        Call("", ["HGETALL", key], text_map) for key in (keys.api_keys, keys.api_keys_used)
    ]
    return sorted(
        (
            _read(value).model_copy(update={"last_used_at": whole(used.get(hashed))})
            for hashed, value in found.items()
        ),
        key=lambda key: key.name,
    )


def revoke_api_key(keys: Keys, /, name: str) -> Operation[ApiKey]:
    """Let nobody in with a key from now on. Raises RequestNotFoundError."""
    found = yield Call("", ["HGETALL", keys.api_keys], text_map)
    named = {hashed: key for hashed, value in found.items() if (key := _read(value)).name == name}
    if not named:
        raise RequestNotFoundError(f"there is no key {name!r}")
    # Two, where two were made at the same moment.
    yield [Call("", ["HDEL", key, *named], int) for key in (keys.api_keys, keys.api_keys_used)]
    return next(iter(named.values()))


def look_up(keys: Keys, secret: str) -> Call[ApiKey | None]:
    """What a key allows; None if there is no such key."""
    return Call(
        "",
        ["HGET", keys.api_keys, hash_of(secret)],
        lambda reply: None if reply is None else _read(reply),
    )


def note_use(keys: Keys, secret: str, now_ms: int) -> Call[int]:
    """Write down when a key was last used."""
    return Call("", ["HSET", keys.api_keys_used, hash_of(secret), now_ms], int)


def count(keys: Keys) -> Call[int]:
    """How many keys there are."""
    return Call("", ["HLEN", keys.api_keys], int)


def _read(value: str | bytes) -> ApiKey:
    return _of_a_tenant(ApiKey.model_validate_json(value))


def _of_a_tenant(key: ApiKey) -> ApiKey:
    """The key, which is a tenant of its own if it was made without one."""
    is_own = key.tenant is None
    tenant = key.name if is_own else key.tenant
    return key.model_copy(update={"tenant": tenant, "is_own_tenant": is_own})


def _check_scopes(key: ApiKey) -> None:
    known = ", ".join(SCOPES)
    for scope in key.scopes or ():
        if scope not in SCOPES:
            raise ConfigurationError(f"scope: {scope[:80]!r} is none of {known}")
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
                f"tenant: {new.tenant!r} is the key {other.name!r} alone, which was made without a"
                " tenant, and this key would see its files and batches; take another tenant, or"
                f" make {other.name!r} anew with --tenant {new.tenant}"
            )
        if new.is_own_tenant:
            raise ConfigurationError(
                f"name: {key.name!r} is the tenant of the key {other.name!r}, and a key without a"
                " tenant is one by its name; take another name, or say"
                f" --tenant {key.name} if the two are to share"
            )

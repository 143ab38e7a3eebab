"""How a batch is run, how far it is, and how it ends."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from promptq.producer.admin.api_keys import ApiKey


class Ending(StrEnum):
    """Why a run is over. All but `stopped` are the batch's last status too."""

    COMPLETED = "completed"
    CANCELLED = "cancelled"
    EXPIRED = "expired"
    STOPPED = "stopped"
    """The process is to end; another one may go on."""


@dataclass(frozen=True, slots=True)
class BatchProgress:
    """How far a batch is. `total` lines, `completed` in the output, `failed` in the error file."""

    total: int
    completed: int
    failed: int
    in_flight: int


@dataclass(frozen=True, slots=True)
class RunOptions:
    """How a batch is run."""

    endpoint: str | None = None
    """Only lines for this URL are taken; None: any."""
    max_in_flight: int = 128
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Fields of each request that its line may override."""
    caller: ApiKey | None = None
    """Whose key allows lines what it allows; None: anything."""
    expires_at: float | None = None
    """Unix seconds at which the batch's window ends; what is in the queue then ends there."""
    retry_seconds: float = 60.0
    """How long a server that is away is waited for, before its error is raised."""

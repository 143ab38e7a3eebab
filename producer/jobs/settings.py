"""What only the jobs are told. The environment is read here, as in shared/settings.py."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from pydantic import Field, SecretStr

from shared.settings import Settings, read_settings_of


def _default_folder() -> Path:
    base = os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share"
    return Path(base) / "promptq" / "files"


class FilesSettings(Settings):
    """The settings of all, and where files are kept."""

    files_dir: Path = Field(
        default_factory=_default_folder,
        description="folder for uploaded files and the answers of batches; gateway and jobs need"
        " the same one; default: ~/.local/share/promptq/files",
    )


class JobsSettings(FilesSettings):
    """The settings of `promptq jobs`."""

    jobs_redis_url: str | None = Field(
        None,
        description="a standalone Redis for RQ, no Cluster and no Sentinel; default: the queue's",
    )
    batch_workers: int = Field(2, ge=0, description="batch files that run at once")
    batch_in_flight: int = Field(
        128, ge=1, description="most lines of a batch in the queue or running at once"
    )
    batch_priority: int = Field(
        100, ge=-1000, le=1000, description="of lines that bring none; lower runs sooner"
    )
    webhook_workers: int = Field(2, ge=1, description="webhooks that are called at once")
    webhook_secret: SecretStr | None = Field(
        None,
        description="signs webhooks: `whsec_` and 24 to 64 bytes in base64; default: one is made"
        " and kept in `webhook-secret` in the folder for files",
    )
    webhook_allow_private: bool = Field(
        False, description="call webhooks in private networks and on this machine too"
    )
    webhook_timeout_seconds: float = Field(
        10.0, gt=0, description="what a webhook's receiver may take to answer"
    )


def read_jobs_settings(**overrides: Any) -> JobsSettings:
    """Settings of the environment, overridden. Raises ConfigurationError naming what is wrong."""
    return read_settings_of(JobsSettings, overrides)


def read_files_settings(**overrides: Any) -> FilesSettings:
    """As `read_jobs_settings`, where only the folder is of interest."""
    return read_settings_of(FilesSettings, overrides)

"""What only gateways and jobs are told, by the environment, as shared/runtime/settings.py."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from pydantic import Field, SecretStr

from promptq.shared.protocol.request import MAX_PAYLOAD_BYTES
from promptq.shared.runtime.settings import Settings, read_settings_of


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


class GatewaySettings(FilesSettings):
    """The settings of all, and those of the HTTP side."""

    files_bytes_per_tenant: int = Field(
        2 << 30,
        ge=0,
        description="most bytes that the files of a tenant may have, answers of batches included;"
        " 0: no limit",
    )
    files_per_tenant: int = Field(
        1000, ge=0, description="most files that a tenant may have, likewise; 0: no limit"
    )
    batches_per_tenant: int = Field(
        100, ge=0, description="most batches of a tenant that have not ended; 0: no limit"
    )

    http_host: str = Field("127.0.0.1", description="address that the gateway listens on")
    http_port: int = Field(8000, ge=0, le=65535, description="its port; 0: any free one")
    http_share_port: bool = Field(
        False, description="let gateways on one machine share a port that all of them name"
    )
    http_max_body_bytes: int = Field(
        MAX_PAYLOAD_BYTES, ge=1, description="largest body of a request for a completion"
    )
    http_body_bytes_per_tenant: int = Field(
        64 * 1024 * 1024,
        ge=1,
        description="most bytes of bodies that a tenant may have on their way to the queue at once,"
        " beyond the first 64 KiB of each; beyond it 429",
    )
    http_body_bytes: int = Field(
        256 * 1024 * 1024,
        ge=1,
        description="the same of all tenants together, of which each takes more only while more is"
        " free than it holds; beyond it 503",
    )
    http_max_connections: int = Field(
        4096,
        ge=1,
        description="most connections at once; beyond it 503, but for 64 that only probes use",
    )
    http_header_seconds: float = Field(
        10.0,
        ge=0,
        description="how long a stream's status waits for its first token, so that an error can"
        " still be told by it",
    )
    http_keepalive_seconds: float = Field(
        15.0, gt=0, description="after so long without a token a stream gets a comment"
    )
    http_ready_seconds: float = Field(
        30.0, gt=0, description="/readyz counts on no worker whose step takes longer"
    )
    http_drain_seconds: float = Field(
        20.0, ge=0, description="how long a stopping gateway goes on with its answers"
    )


class JobsSettings(FilesSettings):
    """The settings of `promptq jobs`."""

    jobs_redis_url: str | None = Field(
        None,
        description="a standalone Redis for RQ, no Cluster and no Sentinel; default: the queue's",
    )
    batch_workers: int = Field(2, ge=0, description="batch files that run at once")
    batch_turn_seconds: float = Field(
        60.0, gt=0, description="how long a batch runs on while one of another tenant waits"
    )
    batch_in_flight: int = Field(
        128, ge=1, description="most lines of a batch in the queue or running at once"
    )
    batch_priority: int = Field(
        100, ge=-1000, le=1000, description="of lines that bring none; lower runs sooner"
    )
    webhook_workers: int = Field(
        32, ge=1, description="webhooks that are called at once, of all tenants"
    )
    webhook_max_waiting: int = Field(
        10_000, ge=1, description="webhooks of one tenant that may wait; what comes beyond is dead"
    )
    webhook_master_secret: SecretStr | None = Field(
        None,
        description="the tenants' secrets for webhooks are made of it: `whsec_` and 24 to 64 bytes"
        " in base64; default: one is made and kept in `webhook-master-secret` in the folder for"
        " files",
    )
    webhook_secret: SecretStr | None = Field(
        None,
        description="signs webhooks of all tenants too, as before release 0.3; unset it once each"
        " receiver has its tenant's secret; default: what `webhook-secret` in the folder for files"
        " holds, if it is there",
    )
    webhook_allow_private: bool = Field(
        False, description="call webhooks in private networks and on this machine too"
    )
    webhook_timeout_seconds: float = Field(
        10.0, gt=0, description="what a webhook's receiver may take to answer"
    )


def read_gateway_settings(**overrides: Any) -> GatewaySettings:
    """Settings of the environment, overridden. Raises ConfigurationError naming what is wrong."""
    return read_settings_of(GatewaySettings, overrides)


def read_jobs_settings(**overrides: Any) -> JobsSettings:
    """As `read_gateway_settings`."""
    return read_settings_of(JobsSettings, overrides)


def read_files_settings(**overrides: Any) -> FilesSettings:
    """As `read_gateway_settings`, where only the folder is of interest."""
    return read_settings_of(FilesSettings, overrides)

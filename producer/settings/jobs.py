"""Settings of jobs."""

from __future__ import annotations

from pydantic import Field, SecretStr

from promptq.producer.settings.files import FilesSettings
from promptq.shared.settings.common import ReaperSettings


class JobsSettings(FilesSettings, ReaperSettings):
    jobs_redis_url: str | None = Field(
        None, description="a Redis server for RQ, not a Cluster; default: the queue's server"
    )
    batch_workers: int = Field(2, ge=0, description="batch files that run at once")
    batch_turn_seconds: float = Field(
        60.0, gt=0, description="seconds that a batch runs while a batch of another tenant waits"
    )
    batch_in_flight: int = Field(
        128, ge=1, description="most lines of a batch that wait or run at once"
    )
    batch_priority: int = Field(
        100, ge=-1000, le=1000, description="priority of lines that have none; lower runs sooner"
    )
    webhook_workers: int = Field(
        32, ge=1, description="webhooks that are called at once, for all tenants together"
    )
    webhook_max_waiting: int = Field(
        10_000, ge=1, description="most webhooks of one tenant that may wait; more are given up"
    )
    webhook_master_secret: SecretStr | None = Field(
        None,
        description="the secret from which tenants' secrets for webhooks are made: `whsec_` and 24"
        " to 64 bytes in base64; default: one is made and kept in `webhook-master-secret` in the"
        " folder for files",
    )
    webhook_secret: SecretStr | None = Field(
        None,
        description="one more secret that signs the webhooks of all tenants, as before release 0.3;"
        " unset it once each receiver has its tenant's secret; default: the content of"
        " `webhook-secret` in the folder for files, if there is one",
    )
    webhook_allow_private: bool = Field(
        False, description="call webhooks in private networks and on this machine, too"
    )
    webhook_timeout_seconds: float = Field(
        10.0, gt=0, description="seconds that the receiver of a webhook may take to answer"
    )

"""What only a gateway is told. The environment is read here, as in shared/settings.py."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from producer.jobs.settings import FilesSettings
from shared.schemas import MAX_PAYLOAD_BYTES
from shared.settings import read_settings_of


class GatewaySettings(FilesSettings):
    """The settings of all, and those of the HTTP side."""

    http_host: str = Field("127.0.0.1", description="address that the gateway listens on")
    http_port: int = Field(8000, ge=0, le=65535, description="its port; 0: any free one")
    http_share_port: bool = Field(
        False, description="let gateways on one machine share a port that all of them name"
    )
    http_max_body_bytes: int = Field(
        MAX_PAYLOAD_BYTES, ge=1, description="largest body of a request for a completion"
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


def read_gateway_settings(**overrides: Any) -> GatewaySettings:
    """Settings of the environment, overridden. Raises ConfigurationError naming what is wrong."""
    return read_settings_of(GatewaySettings, overrides)

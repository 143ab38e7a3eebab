"""Settings of gateways."""

from __future__ import annotations

from pydantic import Field

from promptq.producer.settings.files import FilesSettings
from promptq.shared.protocol.keys import ALL_QUEUES
from promptq.shared.protocol.request import MAX_PAYLOAD_BYTES


class GatewaySettings(FilesSettings):
    files_bytes_per_tenant: int = Field(
        2 << 30,
        ge=0,
        description="most bytes of files, including answers of batches, that a tenant may have;"
        " 0: no limit",
    )
    files_per_tenant: int = Field(
        1000, ge=0, description="most files that a tenant may have, answers included; 0: no limit"
    )
    batches_per_tenant: int = Field(
        100, ge=0, description="most unfinished batches of a tenant; 0: no limit"
    )

    responses_seconds: int = Field(
        86_400, ge=60, description="seconds after its creation for which a stored response is kept"
    )
    responses_per_tenant: int = Field(
        100_000, ge=0, description="most stored responses of a tenant; 0: no limit"
    )
    responses_bytes_per_tenant: int = Field(
        256 << 20,
        ge=0,
        description="most bytes of stored responses that a tenant may have; 0: no limit",
    )
    queues: tuple[str, ...] = Field(
        (),
        description="the queues that the gateway serves, as a JSON list; the first one holds API"
        " keys, files and batches, and `*` stands for all others of the server; default:"
        " PROMPTQ_QUEUE if it is set, else `default` and `*`",
    )
    http_host: str = Field("127.0.0.1", description="address that the gateway listens on")
    http_port: int = Field(8000, ge=0, le=65535, description="port of the gateway; 0: any free one")
    http_share_port: bool = Field(
        False, description="share the port with other gateways on this machine that set this too"
    )
    http_max_body_bytes: int = Field(
        MAX_PAYLOAD_BYTES, ge=1, description="largest body of a completion request"
    )
    http_body_bytes_per_tenant: int = Field(
        64 * 1024 * 1024,
        ge=1,
        description="most bytes of request bodies that the gateway holds for a tenant, without the"
        " first 64 KiB of each; the answer beyond that is 429",
    )
    http_body_bytes: int = Field(
        256 * 1024 * 1024,
        ge=1,
        description="the limit for all tenants together; a tenant gets more bytes only while more"
        " bytes are free than the tenant uses; the answer beyond that is 503",
    )
    http_max_connections: int = Field(
        4096,
        ge=1,
        description="most connections at once; the answer beyond that is 503, except to probes,"
        " which have 64 more",
    )
    http_log_requests: bool = Field(True, description="log each call; `promptq up` does not")
    http_cors_origins: tuple[str, ...] = Field(
        (),
        description="origins (CORS) whose pages may read answers in a browser, as a JSON list such"
        ' as `["https://chat.example"]`; `["*"]`: all; such a page needs an API key',
    )
    http_header_seconds: float = Field(
        10.0,
        ge=0,
        description="seconds that a stream waits for its first token before it sends its status;"
        " until then, the status can still report an error",
    )
    http_keepalive_seconds: float = Field(
        15.0, gt=0, description="seconds without a token after which a stream gets a comment"
    )
    http_ready_seconds: float = Field(
        30.0, gt=0, description="seconds; /readyz ignores workers whose current step takes longer"
    )
    http_drain_seconds: float = Field(
        20.0, ge=0, description="seconds for which a stopping gateway continues its answers"
    )

    @property
    def served_queues(self) -> tuple[str, ...]:
        """Names of the queues to serve; `*` stands for all others. See `queues` for the default."""
        if not self.queues:
            return (self.queue,) if "queue" in self.model_fields_set else (self.queue, ALL_QUEUES)
        names = [name for name in self.queues if name != ALL_QUEUES] or [self.queue]
        return (*names, ALL_QUEUES) if ALL_QUEUES in self.queues else (*names,)

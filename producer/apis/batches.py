"""OpenAI's batches. These routes only record batches; `promptq jobs` runs them."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Query, Response
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

from promptq.producer.apis.files import LEAST_EXPIRY_SECONDS, ThisStore, page_of
from promptq.producer.batch_store.batch_records import (
    LONGEST_WINDOW,
    Batches,
    BatchMissingError,
    new_batch,
)
from promptq.producer.batch_store.files import BATCH_FILE_SECONDS, FileMissingError
from promptq.producer.calls.call_body import wrong_field
from promptq.producer.http.auth import ThisCaller, needs
from promptq.producer.http.errors import described
from promptq.producer.http.json_body import described_body, json_body
from promptq.producer.http.rate_limits import COUNTED_READ, admit_call
from promptq.producer.http.state import ThisGateway
from promptq.shared.protocol.urgency import WINDOW, window_ms

router = APIRouter(
    tags=["batches"], responses=described(400, 401, 403, 404, 503), dependencies=[needs("batches")]
)


class Expiry(BaseModel):
    """When a batch's output files are deleted: `seconds` after the creation of a file."""

    anchor: Literal["created_at"]
    seconds: int = Field(ge=LEAST_EXPIRY_SECONDS, le=BATCH_FILE_SECONDS)


def _check_number(metadata: Any) -> Any:
    # pydantic's own checks would report each of many wrong entries
    if isinstance(metadata, dict) and len(metadata) > _MOST_METADATA:
        raise ValueError(f"{len(metadata)} are more than the {_MOST_METADATA} allowed")
    return metadata


_MOST_METADATA = 16
Metadata = Annotated[
    dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]],
    BeforeValidator(_check_number),
]


def _check_window(window: str) -> str:
    if window_ms(window) > window_ms(LONGEST_WINDOW):
        raise ValueError(f"is longer than {LONGEST_WINDOW}")
    return window


class NewBatch(BaseModel):
    """The fields of /v1/batches."""

    model_config = ConfigDict(extra="forbid")

    input_file_id: str = Field(description="id of an uploaded file whose purpose is `batch`")
    endpoint: Literal["/v1/chat/completions", "/v1/completions", "/v1/embeddings"] = Field(
        description="`/v1/chat/completions`, `/v1/completions` or `/v1/embeddings`; every line must"
        " name the same"
    )
    completion_window: Annotated[str, AfterValidator(_check_window)] = Field(
        pattern=WINDOW, description="`24h` or less, such as `2h`; what has not ended then expires"
    )
    output_expires_after: Expiry | None = Field(
        None, description="when the answers are deleted; by default after 30 days"
    )
    metadata: Metadata | None = Field(
        None, description="up to 16 texts that are kept with the batch"
    )


def batches_of(gateway: ThisGateway) -> Batches:
    """Returns the records of batches in the gateway's own queue."""
    return Batches(gateway.queue)


TheseBatches = Annotated[Batches, Depends(batches_of)]


@router.post("/v1/batches", openapi_extra=described_body(NewBatch), responses=described(413, 429))
async def create(
    new: Annotated[NewBatch, Depends(json_body(NewBatch))],
    response: Response,
    gateway: ThisGateway,
    caller: ThisCaller,
    store: ThisStore,
    batches: TheseBatches,
) -> dict[str, object]:
    """Run the lines of an uploaded file within the completion window."""
    response.headers.update(await admit_call(gateway, caller))
    try:
        stored = await asyncio.to_thread(store.get, new.input_file_id, *caller.reach)
    except FileMissingError as error:
        raise wrong_field("input_file_id", str(error)) from None
    if stored.purpose != "batch":
        raise wrong_field("input_file_id", f"the file's purpose is {stored.purpose!r}, not 'batch'")
    # The answers become a file, too.
    await asyncio.to_thread(gateway.file_quotas.check, stored.tenant)
    record = new_batch(
        new.endpoint,
        stored.id,
        caller,
        new.metadata,
        new.output_expires_after.seconds if new.output_expires_after else BATCH_FILE_SECONDS,
        gateway.settings.served_queues[1:],
        new.completion_window,
    )
    record.tenant = stored.tenant  # the caller's tenant, or the tenant without a name
    await batches.add(record, gateway.settings.batches_per_tenant)
    return record.to_api()


@router.get("/v1/batches", **COUNTED_READ)
async def list_batches(
    batches: TheseBatches,
    caller: ThisCaller,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
    after: str | None = None,
) -> dict[str, object]:
    """List batches of the caller's tenant, the newest first."""
    try:
        records, has_more = await batches.page(caller.reach, limit, after)
    except BatchMissingError as error:
        raise wrong_field("after", str(error)) from None
    return page_of([record.to_api() for record in records], has_more)


@router.get("/v1/batches/{batch_id}")
async def retrieve(batch_id: str, batches: TheseBatches, caller: ThisCaller) -> dict[str, object]:
    """Return the state of a batch."""
    return (await batches.get(batch_id, caller.reach)).to_api()


@router.post("/v1/batches/{batch_id}/cancel", responses=described(409))
async def cancel(batch_id: str, batches: TheseBatches, caller: ThisCaller) -> dict[str, object]:
    """Cancel a batch. Answers so far go to the output file."""
    return (await batches.cancel(batch_id, caller.reach)).to_api()

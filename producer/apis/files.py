"""OpenAI's files: routes that upload, list, describe, download and delete them."""

from __future__ import annotations

import asyncio
import codecs
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Query, Request, Response
from fastapi.responses import FileResponse
from python_multipart.multipart import parse_options_header
from starlette.datastructures import FormData, Headers, UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser

from promptq.producer.admin.request_fields import whole
from promptq.producer.batch_store.file_quotas import Upload
from promptq.producer.batch_store.files import BATCH_FILE_SECONDS, FileStore, StoredFile
from promptq.producer.batch_store.input_file import MAX_FILE_BYTES
from promptq.producer.calls.call_body import check_one_of, wrong_field
from promptq.producer.calls.errors import ApiError
from promptq.producer.http.auth import ThisCaller, needs
from promptq.producer.http.bodies import body_pieces
from promptq.producer.http.errors import described
from promptq.producer.http.rate_limits import COUNTED_READ, admit_call
from promptq.producer.http.state import ThisGateway
from promptq.shared.runtime.large_json import written
from promptq.shared.runtime.turns import Work

_FORM_BYTES = 1 << 16  # of an upload's form besides its file

router = APIRouter(
    tags=["files"],
    responses=described(400, 401, 403, 404, 503),
    dependencies=[needs("files")],
)

_MOST_FIELDS = 16
_FIELD_BYTES = 1024
_CHARSETS = ("utf-8", "ascii", "iso8859-1")
_MAX_LIST = 10_000
_PURPOSES = ("batch", "user_data", "assistants", "fine-tune", "vision", "evals")
LEAST_EXPIRY_SECONDS = 3600
_FORM: dict[str, Any] = {
    "type": "object",
    "properties": {
        "file": {"type": "string", "format": "binary", "description": "up to 200 MB"},
        "purpose": {"type": "string", "enum": _PURPOSES, "description": "`batch` for batches"},
        "expires_after[anchor]": {"type": "string", "enum": ["created_at"]},
        "expires_after[seconds]": {
            "type": "integer",
            "minimum": LEAST_EXPIRY_SECONDS,
            "maximum": BATCH_FILE_SECONDS,
            "description": "when it is deleted; by default after 30 days if it is for batches",
        },
    },
    "required": ["file", "purpose"],
}
_BODY = {"content": {"multipart/form-data": {"schema": _FORM}}, "required": True}


def file_store(gateway: ThisGateway) -> FileStore:
    """Returns the gateway's store of uploaded files."""
    return gateway.file_quotas.store


ThisStore = Annotated[FileStore, Depends(file_store)]


@router.post("/v1/files", openapi_extra={"requestBody": _BODY}, responses=described(413, 429))
async def upload(
    request: Request, response: Response, gateway: ThisGateway, caller: ThisCaller
) -> dict[str, object]:
    """Upload a file. The body is a multipart form."""
    # An upload counts as a request and as a file before its body is read.
    response.headers.update(await admit_call(gateway, caller))
    declared = max(0, whole(request.headers.get("content-length")) - _FORM_BYTES)
    beginning = asyncio.to_thread(gateway.file_quotas.begin, caller.tenant or "", declared)
    with await beginning as upload, gateway.uploads.hold(caller.party) as hold:
        # The file is written to the disk while it arrives.
        pieces = body_pieces(request, MAX_FILE_BYTES, hold, most_beside=_FORM_BYTES, what="file")
        parser = MultiPartParser(
            _checked(request.headers),
            _charged(pieces, upload, declared),
            max_files=1,
            max_fields=_MOST_FIELDS,
            max_part_size=_FIELD_BYTES,
        )
        try:
            form = await parser.parse()
        except (MultiPartException, LookupError, ValueError) as error:
            raise ApiError(400, f"the body is not a multipart form: {str(error)[:200]}") from None
        try:
            return (await _add(upload, form)).to_api()
        finally:
            await form.close()


async def _charged(
    pieces: AsyncIterator[bytes], upload: Upload, counted: int
) -> AsyncGenerator[bytes, None]:
    """Yields the pieces, and charges their bytes to the tenant's file quota. The first
    `_FORM_BYTES` are free, and the next `counted` bytes were already charged. Raises
    FileQuotaError."""
    num_bytes = 0
    async for piece in pieces:
        num_bytes += len(piece)
        more = num_bytes - _FORM_BYTES - counted
        if more > 0:
            upload.grow(more)
            counted += more
        yield piece


async def _add(upload: Upload, form: FormData) -> StoredFile:
    file, purpose = form.get("file"), form.get("purpose")
    if not isinstance(file, UploadFile):
        raise wrong_field("file", "is missing")
    check_one_of("purpose", purpose, _PURPOSES)
    default = BATCH_FILE_SECONDS if purpose == "batch" else None
    ttl = _expiry(form.get("expires_after[seconds]"), form.get("expires_after[anchor]"))
    return await asyncio.to_thread(
        upload.add,
        file.file,
        filename=file.filename or "file",
        purpose=str(purpose),
        ttl_seconds=ttl or default,
    )


@router.get("/v1/files", **COUNTED_READ)
async def list_files(
    gateway: ThisGateway,
    caller: ThisCaller,
    store: ThisStore,
    purpose: str | None = None,
    limit: Annotated[int, Query(ge=1, le=_MAX_LIST)] = _MAX_LIST,
    after: str | None = None,
    order: Literal["asc", "desc"] = "desc",
) -> Response:
    """List files of the caller's tenant, by default the newest first."""
    files, has_more = await asyncio.to_thread(
        store.page, *caller.reach, purpose=purpose, limit=limit, after=after, order=order
    )

    def as_json() -> Work[str]:
        objects = []
        for stored in files:
            objects.append(stored.to_api())
            yield
        return (yield from written(page_of(objects, has_more)))

    body = await gateway.client.turns.run(as_json())
    return Response(body, media_type="application/json")


@router.get("/v1/files/{file_id}")
async def retrieve(file_id: str, caller: ThisCaller, store: ThisStore) -> dict[str, object]:
    """Describe a file."""
    return (await asyncio.to_thread(store.get, file_id, *caller.reach)).to_api()


@router.get("/v1/files/{file_id}/content", **COUNTED_READ)
async def content(file_id: str, caller: ThisCaller, store: ThisStore) -> FileResponse:
    """Download a file."""
    stored = await asyncio.to_thread(store.get, file_id, *caller.reach)
    return FileResponse(
        store.path(stored), media_type="application/octet-stream", filename=stored.filename
    )


@router.delete("/v1/files/{file_id}")
async def delete(file_id: str, caller: ThisCaller, store: ThisStore) -> dict[str, object]:
    """Delete a file. Batches that have begun to read the file continue, others fail."""
    await asyncio.to_thread(store.delete, file_id, *caller.reach)
    return {"id": file_id, "object": "file", "deleted": True}


def page_of(objects: list[dict[str, Any]], has_more: bool) -> dict[str, object]:
    """Returns a page of a list as OpenAI's list object."""
    return {
        "object": "list",
        "data": objects,
        "first_id": objects[0]["id"] if objects else None,
        "last_id": objects[-1]["id"] if objects else None,
        "has_more": has_more,
    }


def _checked(headers: Headers) -> Headers:
    """Returns an upload's headers unchanged. Raises ApiError 400 if the upload is not a multipart
    form, or if its charset is not supported."""
    kind, options = parse_options_header(headers.get("content-type"))
    if not kind.startswith(b"multipart/"):
        raise ApiError(
            400, f"Content-Type: {kind[:80].decode('latin-1')!r} is not multipart/form-data"
        )
    charset = options.get(b"charset", b"utf-8").decode("latin-1")
    try:
        is_served = codecs.lookup(charset).name in _CHARSETS
    except (LookupError, ValueError):
        is_served = False
    if not is_served:
        raise ApiError(400, f"Content-Type: the charset {charset[:80]!r} is not served; use utf-8")
    return headers


def _expiry(seconds: object, anchor: object) -> int | None:
    if seconds is None and anchor is None:
        return None
    least, most = LEAST_EXPIRY_SECONDS, BATCH_FILE_SECONDS
    text = str(seconds)
    is_number = text.isascii() and text.isdecimal() and len(text) <= len(str(most))
    if anchor != "created_at" or not is_number or not least <= int(text) <= most:
        raise wrong_field(
            "expires_after", f"needs the anchor 'created_at' and {least} to {most} seconds"
        )
    return int(text)

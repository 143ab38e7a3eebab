"""What a caller has to be let do before the body of its upload is read."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Annotated, BinaryIO

from fastapi import Depends, Request, Response

from promptq.producer.admin.request_fields import whole
from promptq.producer.batch_store.file_quotas import FileQuotaError, Upload
from promptq.producer.batch_store.files import StoredFile
from promptq.producer.gateway.context.access import ThisCaller, admit_call
from promptq.producer.gateway.context.context import ThisGateway
from promptq.producer.gateway.http.errors import ApiError

FORM_BYTES = 1 << 16
"""What a form may have beside the file; so much does not count as the file's."""


class UploadCall:
    """An upload that was let in: it took a request of its caller's rate, and counts as a file."""

    def __init__(self, upload: Upload, declared: int) -> None:
        self._upload = upload
        self._seen = 0
        self._counted = declared

    async def counting(self, pieces: AsyncIterator[bytes]) -> AsyncGenerator[bytes, None]:
        """The body as it comes. Raises ApiError 413 once it is more than the tenant may have."""
        async for piece in pieces:
            self._seen += len(piece)
            more = self._seen - FORM_BYTES - self._counted
            if more > 0:
                with in_quota():
                    self._upload.grow(more)
                self._counted += more
            yield piece

    async def add(
        self, source: BinaryIO, *, filename: str, purpose: str, ttl_seconds: int | None
    ) -> StoredFile:
        """Keep the file. Raises ApiError 413."""
        with in_quota():
            return await asyncio.to_thread(
                self._upload.add,
                source,
                filename=filename,
                purpose=purpose,
                ttl_seconds=ttl_seconds,
            )


async def admit_upload(
    request: Request, response: Response, gateway: ThisGateway, caller: ThisCaller
) -> AsyncIterator[UploadCall]:
    """Before anything of the body is read. Raises ApiError 429 and 413."""
    response.headers.update(await admit_call(gateway, caller))
    declared = max(0, whole(request.headers.get("content-length")) - FORM_BYTES)
    with in_quota():
        begin = gateway.file_quotas.begin
        upload = await asyncio.to_thread(begin, caller.tenant or "", declared)
    with upload:
        yield UploadCall(upload, declared)


ThisUpload = Annotated[UploadCall, Depends(admit_upload)]
"""A route's parameter of this type is the upload that it takes in."""


@contextmanager
def in_quota() -> Iterator[None]:
    """Turns what is beyond a quota into its answer. Not 429: no time passing helps."""
    try:
        yield
    except FileQuotaError as error:
        raise ApiError(413, str(error), param="file", code="file_quota_exceeded") from None

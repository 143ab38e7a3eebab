"""Lets a caller upload a file, before the body is read."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Annotated, BinaryIO

from fastapi import Depends, Request, Response

from promptq.producer.admin.request_fields import whole
from promptq.producer.batch_store.file_quotas import Upload
from promptq.producer.batch_store.files import StoredFile
from promptq.producer.gateway.context.access import ThisCaller
from promptq.producer.gateway.context.caller_rates import admit_call
from promptq.producer.gateway.context.gateway import ThisGateway

FORM_BYTES = 1 << 16
"""The bytes that a form may have beside the file. They do not count as the file."""


class UploadCall:
    """An upload that was let in. It took one request of its caller's rate and counts as a file."""

    def __init__(self, upload: Upload, declared: int) -> None:
        self._upload = upload
        self._seen = 0
        self._counted = declared

    async def counting(self, pieces: AsyncIterator[bytes]) -> AsyncGenerator[bytes, None]:
        """The body as it comes. Raises FileQuotaError once the tenant may not have more."""
        async for piece in pieces:
            self._seen += len(piece)
            more = self._seen - FORM_BYTES - self._counted
            if more > 0:
                self._upload.grow(more)
                self._counted += more
            yield piece

    async def add(
        self, source: BinaryIO, *, filename: str, purpose: str, ttl_seconds: int | None
    ) -> StoredFile:
        """Keep the file. Raises FileQuotaError."""
        return await asyncio.to_thread(
            self._upload.add, source, filename=filename, purpose=purpose, ttl_seconds=ttl_seconds
        )


async def admit_upload(
    request: Request, response: Response, gateway: ThisGateway, caller: ThisCaller
) -> AsyncIterator[UploadCall]:
    """Let an upload in before its body is read. Raises ApiError 429, FileQuotaError."""
    response.headers.update(await admit_call(gateway, caller))
    declared = max(0, whole(request.headers.get("content-length")) - FORM_BYTES)
    with await asyncio.to_thread(
        gateway.file_quotas.begin, caller.tenant or "", declared
    ) as upload:
        yield UploadCall(upload, declared)


ThisUpload = Annotated[UploadCall, Depends(admit_upload)]
"""A route's parameter of this type is the upload that it takes in."""

"""Limits each tenant's part of the folder for files, including uploads in progress.

Each check counts the files anew, because other gateways and jobs add and delete files too. An
expired file counts until it is deleted. Of uploads in progress, each process counts only its own.
At an upload's end, one process at a time counts again, so all gateways together keep the quota.
"""

from __future__ import annotations

import fcntl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import BinaryIO, Self

from promptq.producer.batch_store.files import FileStore, StoredFile
from promptq.shared.errors import PromptqError


class FileQuotaError(PromptqError):
    """A tenant has reached its limit of files, or of bytes in files."""


class FileQuotas:
    """Each tenant's quotas of files and bytes in a folder; 0 means no quota. Thread-safe."""

    def __init__(self, store: FileStore, max_bytes: int, max_files: int) -> None:
        self.store = store
        self.max_bytes = max_bytes
        self.max_files = max_files
        self._uploads: set[Upload] = set()
        self._changing = threading.Lock()

    def check(self, tenant: str) -> None:
        """Raises FileQuotaError if the tenant has reached a quota."""
        self._check(tenant, *self.kept(tenant), more_bytes=1)

    def begin(self, tenant: str, num_bytes: int) -> Upload:
        """Returns a new upload, whose first `num_bytes` count at once. Raises FileQuotaError."""
        upload = Upload(self, tenant, *self.kept(tenant))
        with self._changing:
            self._uploads.add(upload)
        try:
            upload.grow(num_bytes)
        except FileQuotaError:
            self.end(upload)
            raise
        return upload

    def grow(self, upload: Upload, num_bytes: int) -> None:
        """Counts further bytes of an upload, without reading the disk. Raises FileQuotaError."""
        with self._changing:
            uploads = [each for each in self._uploads if each.tenant == upload.tenant]
            files = upload.kept_files + len(uploads) - 1  # without this upload
            size = upload.kept_bytes + sum(each.num_bytes for each in uploads)
            self._check(upload.tenant, files, size, more_bytes=num_bytes)
            upload.num_bytes += num_bytes

    def end(self, upload: Upload) -> None:
        with self._changing:
            self._uploads.discard(upload)

    @contextmanager
    def entering(self, tenant: str, num_bytes: int) -> Iterator[None]:
        """Context manager that locks the quotas while its block adds a file of `num_bytes`. Raises
        FileQuotaError if the tenant may not add the file."""
        with (self.store.folder / "quotas.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            self._check(tenant, *self.kept(tenant), more_bytes=num_bytes)
            yield

    def kept(self, tenant: str) -> tuple[int, int]:
        """Returns the number of a tenant's files in the folder, and the sum of their bytes."""
        sizes = [file.bytes for file in self.store.of(tenant)]
        return len(sizes), sum(sizes)

    def _check(self, tenant: str, files: int, size: int, *, more_bytes: int) -> None:
        whose = f"the tenant {tenant!r}" if tenant else "the tenant without a name"
        if self.max_files and files + 1 > self.max_files:
            raise FileQuotaError(
                f"file: {whose} has {files} files, also counting what is being uploaded, and may"
                f" have {self.max_files}; delete some"
            )
        if self.max_bytes and size + more_bytes > self.max_bytes:
            raise FileQuotaError(
                f"file: {whose} has {size} bytes of files, also counting what is being uploaded,"
                f" and may have {self.max_bytes}: {more_bytes} more are too many; delete some"
            )


@dataclass(eq=False, slots=True)
class Upload:
    """An upload in progress. It counts towards its tenant's quota until its `with` block ends."""

    _quotas: FileQuotas
    tenant: str
    kept_files: int
    kept_bytes: int
    """Bytes of the tenant's files when the upload began."""
    num_bytes: int = 0

    def grow(self, num_bytes: int) -> None:
        """Counts further bytes of the upload towards its tenant's quota. Raises FileQuotaError."""
        self._quotas.grow(self, num_bytes)

    def add(
        self, source: BinaryIO, *, filename: str, purpose: str, ttl_seconds: int | None
    ) -> StoredFile:
        """Adds the upload to the store. Returns the stored file. Raises FileQuotaError."""
        return self._quotas.store.add(
            source,
            filename=filename,
            purpose=purpose,
            tenant=self.tenant,
            ttl_seconds=ttl_seconds,
            entering=self._quotas.entering,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._quotas.end(self)

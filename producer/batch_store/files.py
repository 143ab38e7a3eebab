"""Uploaded files and the answers of batches, in a folder.

A file is two entries: `ID.data` is its content; `ID.json` describes it and is written last. So a
file is either complete or absent. No other record exists, so the folder can be copied, restored or
put on a shared disk. Ids sort by time.
"""

from __future__ import annotations

import io
import os
import re
import secrets
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import BinaryIO, Literal

from pydantic import BaseModel, ValidationError

from promptq.shared.errors import PromptqError
from promptq.shared.queue.request_queue import new_request_id

DAY_SECONDS = 86_400
BATCH_FILE_SECONDS = 30 * DAY_SECONDS
"""Seconds for which files of batches are kept, as at OpenAI."""

_FILE_ID = re.compile(r"file-[0-9a-f]{32,40}")
_ABANDONED_SECONDS = DAY_SECONDS


class FileMissingError(PromptqError):
    """The file does not exist, or belongs to another tenant."""


class StoredFile(BaseModel):
    """Description of a stored file. Times are Unix seconds. Only the tenant may read the file."""

    id: str
    filename: str
    purpose: str
    bytes: int
    created_at: int
    expires_at: int | None = None
    tenant: str = ""

    @property
    def is_over(self) -> bool:
        """Whether the file has expired."""
        return self.expires_at is not None and self.expires_at < time.time()

    def to_api(self) -> dict[str, object]:
        """Returns OpenAI's file object."""
        shown = self.model_dump(exclude={"tenant"})
        return {**shown, "object": "file", "status": "processed", "status_details": None}


class FileStore:
    """The files in a folder. The first file creates the folder. Thread-safe."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._known: dict[str, StoredFile] = {}
        self._looking = threading.Lock()

    def add(
        self,
        source: BinaryIO | Path,
        *,
        filename: str,
        purpose: str,
        tenant: str = "",
        ttl_seconds: int | None = None,
        file_id: str | None = None,
        entering: Callable[[str, int], AbstractContextManager[None]] | None = None,
    ) -> StoredFile:
        """Adds a file: copies a stream, or moves a file from the same disk.

        If a file with this id exists, adds nothing and returns the existing file. The file is added
        inside the context manager `entering(tenant, bytes)`. If the manager raises an error, no
        file is added.
        """
        file_id = file_id or "file-" + new_request_id().replace("-", "")
        with suppress(FileMissingError):
            return self._read(file_id)
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        data = self._data(file_id)
        if isinstance(source, Path):
            with suppress(FileNotFoundError):  # a process moved it and died before the next line
                source.replace(data)
        else:
            with _nothing_left(data):
                _write(source, data)
        now = int(time.time())
        stored = StoredFile(
            id=file_id,
            filename=filename,
            purpose=purpose,
            bytes=data.stat().st_size,
            created_at=now,
            expires_at=None if ttl_seconds is None else now + ttl_seconds,
            tenant=tenant,
        )
        with (
            nullcontext() if isinstance(source, Path) else _nothing_left(data),
            entering(tenant, stored.bytes) if entering else nullcontext(),
        ):
            _write_whole(io.BytesIO(stored.model_dump_json().encode()), self._meta(file_id))
        return stored

    def get(self, file_id: str, *tenants: str) -> StoredFile:
        """Returns a file of one of these tenants. Raises FileMissingError."""
        if _FILE_ID.fullmatch(file_id):
            stored = self._read(file_id)
            if stored.tenant in tenants and not stored.is_over:
                return stored
        raise FileMissingError(f"no file {file_id[:80]!r} is known")

    def path(self, stored: StoredFile) -> Path:
        """Returns the path of a file's content."""
        return self._data(stored.id)

    def keep(self, file_id: str, tenant: str, path: Path) -> None:
        """Links or copies a file's content to `path`. The copy stays after the file is deleted.

        If `path` exists, only sets its modification time to now. Raises FileMissingError.
        """
        if not path.exists():
            data = self.path(self.get(file_id, tenant))
            path.parent.mkdir(parents=True, exist_ok=True)
            try:
                source = data.open("rb")
            except FileNotFoundError:
                raise FileMissingError(f"no file {file_id!r} is known") from None
            with source:
                try:
                    os.link(data, path)
                except OSError:  # no hard links here, or another user made the file
                    _write_whole(source, path)
        try:
            os.utime(path)
        except PermissionError:  # another user's file, which can only be read
            with path.open("rb") as source:
                _write_whole(source, path)

    def delete(self, file_id: str, *tenants: str) -> None:
        """Deletes a file of one of these tenants. Raises FileMissingError."""
        self._remove(self.get(file_id, *tenants).id)

    def page(
        self,
        *tenants: str,
        purpose: str | None = None,
        limit: int = 10_000,
        after: str | None = None,
        order: Literal["asc", "desc"] = "desc",
    ) -> tuple[list[StoredFile], bool]:
        """Returns up to `limit` of the tenants' files after the id `after`, and whether more
        exist."""
        is_newest_first = order == "desc"
        files = [
            file
            for file in self.of(*tenants)
            if not file.is_over
            and purpose in (None, file.purpose)
            and (after is None or (file.id < after if is_newest_first else file.id > after))
        ]
        files.sort(key=lambda file: file.id, reverse=is_newest_first)
        return files[:limit], len(files) > limit

    def of(self, *tenants: str) -> list[StoredFile]:
        """Returns all files of these tenants, including expired ones that are not deleted yet."""
        with self._looking:
            known = {}
            for file_id in self._ids():
                with suppress(FileMissingError):
                    known[file_id] = self._known.get(file_id) or self._read(file_id)
            self._known = known
        return [file for file in known.values() if file.tenant in tenants]

    def sweep(self) -> int:
        """Deletes expired files and leftovers of uploads. Returns the number of deletions."""
        count = 0
        known = set()
        for file_id in list(self._ids()):
            with suppress(FileMissingError):
                if self._read(file_id).is_over:
                    self._remove(file_id)
                    count += 1
                else:
                    known.add(file_id)
        for pattern in ("file-*.data", "file-*.json*.new"):
            for path in self.folder.glob(pattern):
                if path.name.split(".", 1)[0] not in known:
                    with suppress(FileNotFoundError):
                        if path.stat().st_mtime < time.time() - _ABANDONED_SECONDS:
                            path.unlink()
                            count += 1
        return count

    def _ids(self) -> Iterator[str]:
        with suppress(FileNotFoundError):
            for entry in os.scandir(self.folder):
                if entry.name.endswith(".json"):
                    yield entry.name.removesuffix(".json")

    def _read(self, file_id: str) -> StoredFile:
        try:
            return StoredFile.model_validate_json(self._meta(file_id).read_bytes())
        except (FileNotFoundError, ValidationError):
            raise FileMissingError(f"no file {file_id!r} is known") from None

    def _remove(self, file_id: str) -> None:
        self._meta(file_id).unlink(missing_ok=True)  # first, so that the file is never incomplete
        self._data(file_id).unlink(missing_ok=True)

    def _meta(self, file_id: str) -> Path:
        return self.folder / f"{file_id}.json"

    def _data(self, file_id: str) -> Path:
        return self.folder / f"{file_id}.data"


@contextmanager
def _nothing_left(path: Path) -> Iterator[None]:
    try:
        yield
    except BaseException:
        path.unlink(missing_ok=True)
        raise


def _write(source: BinaryIO, path: Path) -> None:
    """Writes a file, and waits until the file is on the disk and would survive a power cut."""
    with path.open("wb") as target:
        shutil.copyfileobj(source, target, 1 << 20)
        target.flush()
        os.fsync(target.fileno())


def _write_whole(source: BinaryIO, path: Path) -> None:
    """Writes a temporary file, then renames it to `path`, which another process may write, too."""
    new = path.with_name(f"{path.name}.{secrets.token_hex(8)}.new")
    try:
        _write(source, new)
        new.replace(path)
    finally:
        new.unlink(missing_ok=True)

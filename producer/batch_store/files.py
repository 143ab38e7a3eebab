"""Uploaded files and the answers of batches: a folder, and nothing but it.

A file is two entries: `ID.data`, its content, and `ID.json`, which is written last and says what it
is. So a file is there whole or not at all, and the folder can be copied, restored or put on a
shared disk. Ids sort by time.
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
"""Files of batches are kept so long, as OpenAI keeps them."""

_FILE_ID = re.compile(r"file-[0-9a-f]{32,40}")
_ABANDONED_SECONDS = DAY_SECONDS


class FileMissingError(PromptqError):
    """There is no such file, or it belongs to somebody else."""


class StoredFile(BaseModel):
    """What is known of a file. Times are Unix seconds; `tenant` may see it, and nobody else."""

    id: str
    filename: str
    purpose: str
    bytes: int
    created_at: int
    expires_at: int | None = None
    tenant: str = ""

    @property
    def is_over(self) -> bool:
        """Whether it has expired."""
        return self.expires_at is not None and self.expires_at < time.time()

    def is_of(self, *tenants: str) -> bool:
        """Whether one of them has it, as long as it has not expired."""
        return self.tenant in tenants and not self.is_over

    def to_api(self) -> dict[str, object]:
        """OpenAI's file object."""
        shown = self.model_dump(exclude={"tenant"})
        return {**shown, "object": "file", "status": "processed", "status_details": None}


def new_file_id() -> str:
    return "file-" + new_request_id().replace("-", "")


class FileStore:
    """The files in a folder, which is made when the first one comes. Thread-safe."""

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
        """Copy a stream, or move a file of the same disk, into the store.

        With an id that is there already nothing is done. `entering` is called with the tenant and
        the bytes, and the file is there when what it gives is left; where it raises, nothing is.
        """
        file_id = file_id or new_file_id()
        with suppress(FileMissingError):
            return self._read(file_id)
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        data = self._data(file_id)
        if isinstance(source, Path):
            with suppress(FileNotFoundError):  # moved by a process that died before the next line
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
        """A file of one of these tenants. Raises FileMissingError."""
        if _FILE_ID.fullmatch(file_id):
            stored = self._read(file_id)
            if stored.is_of(*tenants):
                return stored
        raise FileMissingError(f"no file {file_id[:80]!r} is known")

    def path(self, stored: StoredFile) -> Path:
        """Where its content lies."""
        return self._data(stored.id)

    def keep(self, file_id: str, tenant: str, path: Path) -> None:
        """Have a file's content at `path` as well, whatever becomes of the file.

        Where `path` is there already, it is as if written just now. Raises FileMissingError.
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
                except OSError:  # of a disk with no hard links, or of a file that another user made
                    _write_whole(source, path)
        try:
            os.utime(path)
        except PermissionError:  # another user's, which can be read and no more
            with path.open("rb") as source:
                _write_whole(source, path)

    def delete(self, file_id: str, *tenants: str) -> None:
        """Raises FileMissingError."""
        self._remove(self.get(file_id, *tenants).id)

    def page(
        self,
        *tenants: str,
        purpose: str | None = None,
        limit: int = 10_000,
        after: str | None = None,
        order: Literal["asc", "desc"] = "desc",
    ) -> tuple[list[StoredFile], bool]:
        """So many files of these tenants behind the id `after`, and whether there are more."""
        is_newest_first = order == "desc"
        found = [
            it
            for it in self.of(*tenants)
            if not it.is_over
            and purpose in (None, it.purpose)
            and (after is None or (it.id < after if is_newest_first else it.id > after))
        ]
        found.sort(key=lambda it: it.id, reverse=is_newest_first)
        return found[:limit], len(found) > limit

    def of(self, *tenants: str) -> list[StoredFile]:
        """All files of these tenants, those too that have expired and are not deleted yet.

        What was read of a file is not read again, for it never changes.
        """
        with self._looking:
            known = {}
            for file_id in self._ids():
                with suppress(FileMissingError):
                    known[file_id] = self._known.get(file_id) or self._read(file_id)
            self._known = known
        return [it for it in known.values() if it.tenant in tenants]

    def sweep(self) -> int:
        """Delete what is over, and what uploads that broke off left; gives how many files."""
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
        self._meta(file_id).unlink(missing_ok=True)  # first, so that none is there by half
        self._data(file_id).unlink(missing_ok=True)

    def _meta(self, file_id: str) -> Path:
        return self.folder / f"{file_id}.json"

    def _data(self, file_id: str) -> Path:
        return self.folder / f"{file_id}.data"


@contextmanager
def _nothing_left(path: Path) -> Iterator[None]:
    """Delete what has been written there if what is done inside fails."""
    try:
        yield
    except BaseException:
        path.unlink(missing_ok=True)
        raise


def _write(source: BinaryIO, path: Path) -> None:
    """To the disk itself, so that what is renamed or told of then is whole after a crash."""
    with path.open("wb") as target:
        shutil.copyfileobj(source, target, 1 << 20)
        target.flush()
        os.fsync(target.fileno())


def _write_whole(source: BinaryIO, path: Path) -> None:
    """Under a name of its own first, for another process may be writing it too."""
    new = path.with_name(f"{path.name}.{secrets.token_hex(8)}.new")
    try:
        _write(source, new)
        new.replace(path)
    finally:
        new.unlink(missing_ok=True)

"""A batch keeps its input, by a copy where it lies on another disk."""

from __future__ import annotations

import asyncio
import errno
import io
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from promptq.producer.batch_store.files import FileMissingError, FileStore
from promptq.producer.batches import batch_job
from promptq.producer.settings.jobs import JobsSettings
from promptq.shared.settings.common import read_settings_of
from tests.producer.batches.conftest import add_batch, line
from tests.producer.playing import KEYS, HandWorker
from tests.support.model_free import running_worker
from tests.support.roles import as_role


@pytest.fixture
def other_disk(tmp_path: Path) -> Iterator[Path]:
    """A folder that no hard link leads to from the test's own."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        if Path(folder).stat().st_dev == tmp_path.stat().st_dev:
            pytest.skip("there is one disk only")
        yield Path(folder)


def with_a_file(folder: Path) -> tuple[FileStore, str]:
    """A store there with one file, and the file's id."""
    store = FileStore(folder)
    return store, store.add(io.BytesIO(b"lines"), filename="a", purpose="batch").id


def test_a_file_is_kept_on_another_disk(
    tmp_path: Path, other_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where no hard link leads to, it is copied, and is on the disk before it bears its name."""
    store, file_id = with_a_file(tmp_path)
    kept = other_disk / "kept"
    fsync = os.fsync
    synced: list[tuple[int, int, bool]] = []

    def looking_on(file: int) -> None:
        fsync(file)
        synced.append((os.fstat(file).st_ino, os.fstat(file).st_size, kept.exists()))

    monkeypatch.setattr(os, "fsync", looking_on)
    store.keep(file_id, "", kept)
    assert synced == [(kept.stat().st_ino, len(b"lines"), False)]
    store.delete(file_id, "")
    store.keep(file_id, "", kept)
    assert [it.name for it in other_disk.iterdir()] == ["kept"]
    assert kept.read_bytes() == b"lines"
    with pytest.raises(FileMissingError):
        store.keep(file_id, "", other_disk / "late")


def test_two_processes_copy_a_file_at_once(
    tmp_path: Path, other_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one whose lease ran out meanwhile, and the next; its file is not missing to either."""
    store, file_id = with_a_file(tmp_path)
    kept = other_disk / "kept"
    fsync = os.fsync

    def the_next_is_faster(file: int) -> None:
        fsync(file)
        monkeypatch.setattr(os, "fsync", fsync)
        store.keep(file_id, "", kept)

    monkeypatch.setattr(os, "fsync", the_next_is_faster)
    store.keep(file_id, "", kept)
    assert kept.read_bytes() == b"lines"
    assert [it.name for it in other_disk.iterdir()] == ["kept"]


async def test_a_batch_is_its_runners_while_its_input_is_copied(
    redis_url: str, tmp_path: Path, own_worker: HandWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long that takes on a slow disk, which has no hard links."""
    files = tmp_path / "files"
    monkeypatch.setenv("PROMPTQ_REDIS_URL", as_role("jobs", redis_url))
    monkeypatch.setenv("PROMPTQ_FILES_DIR", str(files))
    monkeypatch.setattr(batch_job, "LEASE_MS", 400)  # after a quarter of it the lease is renewed
    batch_id = add_batch(redis_url, files, tmp_path, [line(0)])
    fsync = os.fsync
    left = []

    def no_hard_links(*_: object) -> None:
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    def until_the_lease_is_renewed_or_over(file: int) -> None:
        monkeypatch.setattr(os, "fsync", fsync)
        fsync(file)
        key = KEYS.batch_runner(batch_id)
        left[:] = [own_worker.redis.pttl(key)] * 2
        while 0 <= left[1] <= left[0]:
            left[:] = left[1], own_worker.redis.pttl(key)

    monkeypatch.setattr(os, "link", no_hard_links)
    monkeypatch.setattr(os, "fsync", until_the_lease_is_renewed_or_over)
    async with running_worker(redis_url):
        status = await asyncio.to_thread(
            batch_job.run_batch_job, read_settings_of(JobsSettings), batch_id
        )
    assert status == "completed"
    assert left[1] > left[0]
    assert list((files / "running").iterdir()) == []


def test_a_copy_that_breaks_off_leaves_nothing(
    tmp_path: Path, other_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, file_id = with_a_file(tmp_path)

    def full(file: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        store.keep(file_id, "", other_disk / "kept")
    assert list(other_disk.iterdir()) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be somebody else")
def test_what_another_user_kept_is_copied() -> None:
    """On a disk that several machines share, the process may read the file but not change its
    times.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        store, file_id = with_a_file(folder)
        kept, nobody = folder / "kept", 65534
        store.keep(file_id, "", kept)
        os.utime(kept, (1, 1))
        folder.chmod(0o777)
        os.seteuid(nobody)
        try:
            store.keep(file_id, "", kept)
        finally:
            os.seteuid(0)
        assert kept.read_bytes() == b"lines"
        assert kept.stat().st_uid == nobody
        assert kept.stat().st_mtime > 1
        assert len(list(folder.iterdir())) == 3

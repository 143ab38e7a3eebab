"""Files of a gateway: uploaded, listed, read, deleted, and swept."""

from __future__ import annotations

import os
from pathlib import Path

import openai
import pytest

from promptq.producer.batch_store.files import FileStore
from promptq.producer.batch_store.input_file import MAX_FILE_BYTES
from promptq.producer.http import connection_limits
from tests.producer.batches.conftest import line, upload


async def test_files(
    client: openai.AsyncOpenAI, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Uploaded, listed page by page, read and deleted; and what is refused."""
    # The refused upload is dropped as fast as it comes, and not in 25 s.
    monkeypatch.setattr(connection_limits, "_DROPPED_BYTES_A_SECOND", 1 << 40)
    ids = [await upload(client, [line(n)]) for n in range(3)]
    other = await client.files.create(file=("a.bin", b"\0\xff"), purpose="user_data")
    assert (other.filename, other.bytes, other.purpose) == ("a.bin", 2, "user_data")
    assert [it.id async for it in client.files.list(purpose="batch", limit=2)] == ids[::-1]
    assert [it.id async for it in client.files.list(order="asc", limit=1)] == [*ids, other.id]
    assert (await client.files.content(other.id)).content == b"\0\xff"
    found = await client.files.retrieve(ids[0])
    assert found.expires_at == found.created_at + 30 * 86_400
    assert (await client.files.delete(ids[0])).deleted
    for missing in (ids[0], "file-no", "..%2F..%2Fetc%2Fpasswd"):
        with pytest.raises(openai.NotFoundError):
            await client.files.retrieve(missing)
    with pytest.raises(openai.BadRequestError, match="purpose"):
        await client.files.create(file=("a", b"a"), purpose="nothing")
    for wrong in ({"input_file_id": ids[0]}, {"input_file_id": other.id}):
        with pytest.raises(openai.BadRequestError, match="input_file_id"):
            await client.batches.create(
                endpoint="/v1/completions", completion_window="24h", **wrong
            )
    with pytest.raises(openai.BadRequestError, match="endpoint"):
        await client.batches.create(
            endpoint="/v1/moderations", completion_window="24h", input_file_id=ids[1]
        )
    for window in ("25h", "0m", "soon"):
        with pytest.raises(openai.BadRequestError, match="completion_window"):
            await client.batches.create(
                endpoint="/v1/completions", completion_window=window, input_file_id=ids[1]
            )
    for seconds in (60, 10**9):
        with pytest.raises(openai.BadRequestError, match=r"output_expires_after\.seconds"):
            await client.batches.create(
                endpoint="/v1/completions",
                completion_window="24h",
                input_file_id=ids[1],
                output_expires_after={"anchor": "created_at", "seconds": seconds},
            )
    with pytest.raises(openai.NotFoundError):
        await client.batches.retrieve("batch_no")
    big = tmp_path / "big"
    with big.open("wb") as file:
        file.truncate(MAX_FILE_BYTES + 100_000)
    with pytest.raises(openai.APIStatusError) as refused:
        await client.files.create(file=big, purpose="batch")
    assert (refused.value.status_code, refused.value.code) == (413, "file_too_large")
    assert len(list((tmp_path / "files").glob("*.data"))) == 3


def test_files_are_swept(tmp_path: Path) -> None:
    """`sweep` deletes expired files and the rest of broken uploads, but no upload in progress."""
    store = FileStore(tmp_path)
    with (tmp_path / "source").open("wb+") as empty:
        kept = store.add(empty, filename="a", purpose="batch", ttl_seconds=3600)
        over = store.add(empty, filename="b", purpose="batch", ttl_seconds=-10)
    broken, coming = tmp_path / f"{over.id}f.data", tmp_path / f"{over.id}e.data"
    broken.touch()
    coming.touch()
    os.utime(broken, (1, 1))
    assert store.sweep() == 2
    assert [it.id for it in store.page("")[0]] == [kept.id]
    assert not broken.exists()
    assert coming.exists()

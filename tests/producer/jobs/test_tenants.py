"""Files and batches are their tenants' own."""

from __future__ import annotations

from pathlib import Path

import openai
import pytest

from promptq import Client
from promptq.producer.admin.api_keys import ApiKey
from promptq.producer.batch_store.files import FileStore
from tests.producer.gateway.living import live_gateway


async def test_nobody_reaches_what_another_tenant_has(redis_url: str, tmp_path: Path) -> None:
    """For others it is not there: neither to read, nor to list, nor to use, nor to end."""
    with Client(redis_url) as client:
        ours, theirs, nobodys = (
            client.create_api_key(ApiKey(name=name, tenant=tenant))[0]
            for name, tenant in (("ours", "us"), ("theirs", "them"), ("nobodys", None))
        )
    with live_gateway(redis_url, files_dir=tmp_path) as gateway:

        def calling(key: str) -> openai.AsyncOpenAI:
            return openai.AsyncOpenAI(base_url=gateway.base_url, api_key=key, max_retries=0)

        async with calling(ours) as us, calling(theirs) as them, calling(nobodys) as nobody:
            file = await us.files.create(file=("in.jsonl", b"{}\n"), purpose="batch")
            with (tmp_path / "answers").open("wb+") as answers:
                output = FileStore(tmp_path).add(
                    answers, filename="answers", purpose="batch_output", tenant="us"
                )
            batch = await us.batches.create(
                input_file_id=file.id, endpoint="/v1/completions", completion_window="24h"
            )
            for other in (them, nobody):
                for file_id in (file.id, output.id):
                    for call in (other.files.retrieve, other.files.content, other.files.delete):
                        with pytest.raises(openai.NotFoundError):
                            await call(file_id)
                for call in (other.batches.retrieve, other.batches.cancel):
                    with pytest.raises(openai.NotFoundError):
                        await call(batch.id)
                with pytest.raises(openai.BadRequestError, match="input_file_id: no file"):
                    await other.batches.create(
                        input_file_id=file.id, endpoint="/v1/completions", completion_window="24h"
                    )
                with pytest.raises(openai.BadRequestError, match="after: no batch"):
                    await other.batches.list(after=batch.id)
                assert [it async for it in other.files.list()] == []
                assert [it async for it in other.batches.list()] == []
            assert [it.id async for it in us.files.list()] == [output.id, file.id]
            assert [it.id async for it in us.batches.list()] == [batch.id]
            assert (await us.files.content(file.id)).content == b"{}\n"
            assert (await us.batches.retrieve(batch.id)).status == "validating"

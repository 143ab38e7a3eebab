"""A worker forwards the pictures of chats to a server that was seen to take them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from promptq.producer.clients.request_builder import compose
from promptq.shared.protocol.pictures import data_url, picture_part
from promptq.shared.protocol.request import SamplingParams
from promptq.shared.queue.request_queue import AsyncRequestQueue
from promptq.worker.engine.api.messages import EngineRequest
from promptq.worker.upstream.dialects.dialect import Continuation
from promptq.worker.upstream.dialects.vllm import VllmDialect
from tests.programs.engines.pngs import png
from tests.programs.stand_in_server.starting import StandIn, save_byte_model, stand_in_server
from tests.programs.stand_in_server.vllm import PLACE, tokens_of_picture
from tests.support.model_free import finished, running_worker
from tests.support.requests import async_put
from tests.support.waiting import async_until
from tests.worker.upstream.test_watched_streams import served

MARK = "<picture>"
TEMPLATE = """{% for message in messages %}{% if message.content is string %}{{ message.content }}
{%- else %}{% for part in message.content %}{% if part.type == 'image' %}<picture>
{%- else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}{% endfor %}"""
URLS = [data_url(png(seed)) for seed in (1, 2)]
LARGE = data_url(png(1, 230, 230))


@pytest.fixture(scope="module")
def vision_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tokenizer of bytes and a token for a picture's place."""
    folder = save_byte_model(tmp_path_factory.mktemp("vision"))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_special_tokens({"additional_special_tokens": [MARK]})
    assert tokenizer.convert_tokens_to_ids(MARK) == PLACE
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text()) | {"vocab_size": PLACE + 1}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture
def stand_in() -> Iterator[StandIn]:
    with stand_in_server("vllm", "--pictures") as server:
        yield server


def chat(*parts: str, **fields: Any) -> dict[str, Any]:
    content = [
        picture_part(part) if part in (*URLS, LARGE) else {"type": "text", "text": part}
        for part in parts
    ]
    messages = [{"role": "user", "content": content}]
    return {"messages": messages, "temperature": 0.0, "max_tokens": 30, **fields}


async def result_of(queue: AsyncRequestQueue, *parts: str, **fields: Any) -> Any:
    return await finished(queue, await async_put(queue, **chat(*parts, **fields)))


def prompt_of(*parts: str) -> list[int]:
    """Returns the prompt that the server computes."""
    tokens = [tokens_of_picture(part) if part in URLS else part.encode() for part in parts]
    return [token for part in tokens for token in part]


async def test_pictures_reach_the_server_in_their_places(
    redis_url: str, queue: AsyncRequestQueue, vision_model: Path, stand_in: StandIn
) -> None:
    first, second = URLS
    async with running_worker(
        redis_url, await served("vllm", stand_in.url, vision_model)
    ) as worker:
        assert "pictures" not in worker.engine.abilities.refused
        for parts in (["a", first, "b", second], [second, "b", first, "c"], [first, first]):
            result = await result_of(queue, *parts)
            plain = await finished(
                queue,
                await async_put(queue, prompt=prompt_of(*parts), temperature=0.0, max_tokens=30),
            )
            assert result["token_ids"] == plain["token_ids"]
            assert result["usage"] == plain["usage"]
        assert worker.engine.stats.prompt_tokens == 2 * (12 + 12 + 10)


async def test_a_stored_picture_reaches_the_server_with_each_attempt(
    redis_url: str, queue: AsyncRequestQueue, vision_model: Path, stand_in: StandIn
) -> None:
    async with running_worker(redis_url, await served("vllm", stand_in.url, vision_model)):
        stand_in.fail("freeze")
        new = [{**chat("a", LARGE), "seed": seed} for seed in (1, 2)]
        first, second = await queue.enqueue(compose(new))
        assert len(await queue.redis.keys(f"{queue.keys.prefix}picture:*")) == 1
        await async_until(lambda: stand_in.told()["running"] == 2)
        stand_in.fail("break")
        results = [await finished(queue, each) for each in (first, second)]
        assert [result["stats"]["attempts"] for result in results] == [2, 2]
        plain = {"temperature": 0.0, "max_tokens": 30}
        prompt = [ord("a"), *tokens_of_picture(LARGE)]
        expected = await finished(queue, await async_put(queue, prompt=prompt, **plain))
        assert [result["token_ids"] for result in results] == [expected["token_ids"]] * 2
        for key in await queue.redis.keys(f"{queue.keys.prefix}picture:*"):
            assert 0 < await queue.redis.pttl(key) <= 3_600_000


async def test_a_picture_that_is_gone_fails_its_request_alone(
    redis_url: str, queue: AsyncRequestQueue, vision_model: Path, stand_in: StandIn
) -> None:
    [request_id] = await queue.enqueue(compose([chat("a", LARGE)]))
    [key] = await queue.redis.keys(f"{queue.keys.prefix}picture:*")
    await queue.redis.delete(key)
    name = key.decode().rpartition(":")[2]
    async with running_worker(redis_url, await served("vllm", stand_in.url, vision_model)):
        assert (await finished(queue, request_id))["error"] == {
            "type": "invalid_request",
            "message": f"messages: the picture sha256:{name} is not stored with this request, or no"
            " longer",
        }
        assert (await result_of(queue, "a"))["finish_reason"] == "length"


async def test_the_exact_length_is_reported_once_it_is_known(
    redis_url: str, queue: AsyncRequestQueue, vision_model: Path, stand_in: StandIn
) -> None:
    async with running_worker(redis_url, await served("vllm", stand_in.url, vision_model)):
        stand_in.fail("freeze")
        request_id = await async_put(queue, **chat("a", URLS[0]))
        await async_until(lambda: stand_in.told()["running"] == 1)
        record, leases = queue.keys.request(request_id), queue.keys.leases
        begun = await queue.redis.zscore(leases, request_id)
        while await queue.redis.zscore(leases, request_id) == begun:  # until the lease is renewed
            await asyncio.sleep(0.05)
        assert await queue.redis.hget(record, "prompt_tokens") is None
        stand_in.fail("")
        await finished(queue, request_id)
        assert await queue.redis.hget(record, "prompt_tokens") == b"6"


async def test_a_broken_stream_continues_with_its_pictures(
    redis_url: str, queue: AsyncRequestQueue, vision_model: Path, stand_in: StandIn
) -> None:
    async with running_worker(redis_url, await served("vllm", stand_in.url, vision_model)):
        whole = await result_of(queue, "a", URLS[0])
        request_id = await async_put(queue, **chat("a", URLS[0]))
        await async_until(lambda: stand_in.told()["running"] == 1)
        stand_in.fail("break")
        again = await finished(queue, request_id)
        assert again["stats"]["attempts"] == 2
        assert again["token_ids"] == whole["token_ids"]
        assert again["usage"] == whole["usage"]


@pytest.mark.parametrize("text", [MARK, f"a{MARK}b"])
async def test_a_text_that_names_a_place_is_refused(
    redis_url: str, queue: AsyncRequestQueue, vision_model: Path, stand_in: StandIn, text: str
) -> None:
    async with running_worker(redis_url, await served("vllm", stand_in.url, vision_model)):
        error = (await result_of(queue, URLS[0], text))["error"]
        assert error["type"] == "invalid_request"
        assert error["message"].startswith("messages: the chat must have 1 places for pictures")


async def test_a_picture_that_the_server_refuses_is_its_request_s_fault_alone(
    redis_url: str, queue: AsyncRequestQueue, vision_model: Path, stand_in: StandIn
) -> None:
    async with running_worker(
        redis_url, await served("vllm", stand_in.url, vision_model)
    ) as worker:
        stand_in.fail("refuse_pictures")
        assert (await result_of(queue, URLS[0]))["error"] == {
            "type": "invalid_request",
            "message": "messages: Failed to load image: image file is truncated",
        }
        assert worker.engine.is_accepting
        assert (await result_of(queue, "a"))["finish_reason"] == "length"


async def test_a_picture_that_breaks_the_call_is_refused_after_several_attempts(
    redis_url: str, queue: AsyncRequestQueue, vision_model: Path, stand_in: StandIn
) -> None:
    here = await served("vllm", stand_in.url, vision_model)
    async with running_worker(redis_url, here):
        stand_in.fail("break_pictures")
        request_id = await async_put(queue, **chat(URLS[0]))
        beside = await result_of(queue, "a")
        error = (await finished(queue, request_id))["error"]
        assert error["type"] == "invalid_request"
        assert error["message"].startswith("messages: the inference server's answer cannot be used")
        assert beside["finish_reason"] == "length"
        record = await queue.redis.hgetall(queue.keys.request(request_id))
        assert int(record[b"attempt"]) >= 3, "a claim while the server is away tries nothing"
        assert b"crashes" not in record


def test_pictures_of_tenants_are_apart_in_the_server_s_caches() -> None:
    request = EngineRequest(0, [PLACE] * 3, SamplingParams(), 0, 1, pictures=(*URLS, URLS[0]))
    dialect = VllmDialect()

    def names(**fields: Any) -> list[str]:
        body = dialect._body(Continuation(replace(request, **fields), (), "m"))
        return [part["uuid"] for part in body["content_parts"]]

    first, second, again = names(tenant="a")
    assert first == again != second
    others = [
        names(tenant=tenant, cache_salt=salt) for tenant, salt in (("b", ""), ("a", "s"), ("", ""))
    ]
    assert len({name for named in others for name in named} | {first, second}) == 8


async def test_a_server_that_ignores_pictures_gets_none(
    redis_url: str, queue: AsyncRequestQueue, model: Path
) -> None:
    with stand_in_server("vllm") as stand_in:
        async with running_worker(redis_url, await served("vllm", stand_in.url, model)):
            assert (await result_of(queue, URLS[0]))["error"] == {
                "type": "unsupported",
                "message": "messages: no live worker's engine serves pictures",
            }


async def test_a_chat_template_without_places_is_named(
    redis_url: str, queue: AsyncRequestQueue, model: Path, stand_in: StandIn
) -> None:
    async with running_worker(redis_url, await served("vllm", stand_in.url, model)):
        message = (await result_of(queue, URLS[0]))["error"]["message"]
        assert message == "messages: the model's chat template has no place for pictures"

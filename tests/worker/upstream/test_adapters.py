"""LoRA adapters of an inference server: each is the model of a queue, and its worker loads it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from promptq.shared.errors import ConfigurationError, ModelNotFoundError
from promptq.shared.queue.request_queue import AsyncRequestQueue
from promptq.shared.settings.worker import WorkerSettings
from promptq.worker.serve.build import Served, build
from promptq.worker.serve.model_identity import identify
from promptq.worker.upstream.dialects.adapter import ENGINES, adapter_of
from promptq.worker.upstream.dialects.vllm import VllmDialect
from tests.programs.stand_in_server.batch import continuation
from tests.programs.stand_in_server.starting import StandIn, stand_in_server
from tests.programs.stand_in_server.vllm import OF_ADAPTER
from tests.support.model_free import finished, running_worker
from tests.support.requests import async_put, until_tokens
from tests.support.servers import free_port
from tests.support.waiting import async_until

NUM_TOKENS = 60
KINDS = {"vllm": "vllm", "llama.cpp": "llama.cpp", "openai": "vllm"}
FIELDS: dict[str, Any] = {"prompt": "a fox", "max_tokens": NUM_TOKENS, "temperature": 0.0}
TOKENS = continuation([ord("a") + OF_ADAPTER, *b" fox"], NUM_TOKENS)
"""The adapter's answer to FIELDS."""


@pytest.fixture
def stand_in() -> Iterator[StandIn]:
    with stand_in_server("vllm") as server:
        yield server


@pytest.fixture
def adapter(tmp_path: Path, model: Path) -> Path:
    return saved(tmp_path / "sql", model)


def saved(folder: Path, base: Path, weights: bytes = b"1") -> Path:
    """Saves an adapter's files. No server reads the weights."""
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(base)}))
    (folder / "adapter_model.safetensors").write_bytes(weights)
    return folder


def loras(folder: Path) -> tuple[str, ...]:
    """Returns a stand-in's options for the adapter in a folder, and for another one before it."""
    return ("--lora", "other=/other", "--lora", f"{folder.name}={folder}")


def settings(folder: Path, **more: Any) -> WorkerSettings:
    return WorkerSettings(**{"engine": "vllm", "model": str(folder), "dtype": "float32", **more})


async def served(folder: Path, stand_in: StandIn, **more: Any) -> Served:
    return await asyncio.to_thread(build, settings(folder, upstream=stand_in.url, **more))


def post(stand_in: StandIn, path: str, name: str, folder: Path | None = None) -> None:
    body = {"lora_name": name, "lora_path": str(folder)}
    httpx2.post(f"{stand_in.url}/v1/{path}", json=body, timeout=None).raise_for_status()


@pytest.mark.parametrize(
    ("engine", "is_static"), [("vllm", False), *((engine, True) for engine in ENGINES)]
)
async def test_requests_by_the_adapters_name_have_its_tokens_across_a_fault(
    redis_url: str, queue: AsyncRequestQueue, adapter: Path, engine: str, is_static: bool
) -> None:
    options = loras(adapter) if is_static else ()
    with stand_in_server(KINDS[engine], *options) as stand_in:
        async with running_worker(redis_url, await served(adapter, stand_in, engine=engine)):
            request_id = await async_put(queue, model="sql", **FIELDS)
            await until_tokens(queue, request_id, 5)
            stand_in.fail("break")
            assert (await finished(queue, request_id))["token_ids"] == TOKENS
            assert stand_in.told()["broken_off"] > 0
            foreign = await finished(queue, await async_put(queue, model="../sql", **FIELDS))
            assert foreign["error"]["message"] == "model: this queue serves 'sql', not '../sql'"
            assert (await finished(queue, await async_put(queue, **FIELDS)))["token_ids"] == TOKENS


async def test_an_adapter_that_vanished_is_loaded_again(
    redis_url: str, queue: AsyncRequestQueue, stand_in: StandIn, adapter: Path
) -> None:
    async with running_worker(redis_url, await served(adapter, stand_in)):
        post(stand_in, "unload_lora_adapter", "sql")
        ids = [await async_put(queue, **FIELDS) for _ in range(3)]
        for request_id in ids:
            result = await finished(queue, request_id)
            assert (result["token_ids"], result["finish_reason"]) == (TOKENS, "length")


async def test_an_adapter_that_stays_away_ends_the_worker_and_no_request(
    redis_url: str, queue: AsyncRequestQueue, stand_in: StandIn, adapter: Path
) -> None:
    why = r"^--model: vLLM at .* does not load the adapter 'sql'"
    here = await served(adapter, stand_in)
    stand_in.fail("forbid_adapters")
    post(stand_in, "unload_lora_adapter", "sql")
    request_id = await async_put(queue, **FIELDS)

    async def lose() -> None:
        async with running_worker(redis_url, here) as worker:
            await async_until(lambda: worker.engine.has_failed)

    with pytest.raises(ConfigurationError, match=why):
        await lose()
    assert await queue.state(request_id) == "waiting"
    with pytest.raises(ConfigurationError, match=why):
        await served(adapter, stand_in)
    stand_in.fail("")
    async with running_worker(redis_url, await served(adapter, stand_in)):
        assert (await finished(queue, request_id))["token_ids"] == TOKENS


@pytest.mark.parametrize("engine", ["llama.cpp", "openai"])
async def test_a_restarted_server_without_the_adapter_ends_the_worker_and_no_request(
    redis_url: str, queue: AsyncRequestQueue, adapter: Path, engine: str
) -> None:
    port = free_port()
    with stand_in_server(KINDS[engine], *loras(adapter), port=port) as stand_in:
        here = await served(adapter, stand_in, engine=engine)
    with stand_in_server(KINDS[engine], port=port) as stand_in:
        request_id = await async_put(queue, **FIELDS)
        why = "^--model: .* (has no|has 0) LoRA adapter"

        async def lose() -> None:
            async with running_worker(redis_url, here) as worker:
                await async_until(lambda: worker.engine.has_failed)

        with pytest.raises(ConfigurationError, match=why):
            await lose()
        assert await queue.state(request_id) == "waiting"
        with pytest.raises(ConfigurationError, match=why):
            await served(adapter, stand_in, engine=engine)


async def test_an_adapter_at_another_place_of_llama_cpps_list_is_found(
    redis_url: str, queue: AsyncRequestQueue, adapter: Path
) -> None:
    port, before = free_port(), loras(adapter)
    with stand_in_server("llama.cpp", *before, port=port) as stand_in:
        here = await served(adapter, stand_in, engine="llama.cpp")
    with stand_in_server("llama.cpp", *before[2:], *before[:2], port=port):
        async with running_worker(redis_url, here):
            assert (await finished(queue, await async_put(queue, **FIELDS)))["token_ids"] == TOKENS


async def test_another_adapter_of_the_name_is_refused(
    stand_in: StandIn, adapter: Path, model: Path, tmp_path: Path
) -> None:
    post(stand_in, "load_lora_adapter", "sql", saved(tmp_path / "other" / "sql", model))
    with pytest.raises(ConfigurationError, match="another model 'sql'"):
        await served(adapter, stand_in)
    renamed = await served(adapter, stand_in, served_model_name="sql2")
    assert renamed.identity.name == "sql2"
    with pytest.raises(ConfigurationError, match="another model 'm'"):
        await served(adapter, stand_in, served_model_name="m")  # as the base model
    cards = httpx2.get(f"{stand_in.url}/v1/models", timeout=None).json()["data"]
    assert [card["id"] for card in cards] == ["m", "sql", "sql2"]


def test_the_fingerprint_is_that_of_base_and_adapter(
    adapter: Path, model: Path, tmp_path: Path
) -> None:
    same = saved(tmp_path / "same" / "sql", model)
    other = saved(tmp_path / "other" / "sql", model, weights=b"2")
    names = [identify(settings(folder)).fingerprint for folder in (adapter, same, other, model)]
    assert names[0] == names[1]
    assert len({*names}) == 3


def test_a_started_server_gets_the_base_and_the_adapter(adapter: Path, model: Path) -> None:
    dialect = VllmDialect(adapter=adapter_of(settings(adapter)))
    command = dialect.start_command(settings(adapter), 1)
    assert command[2] == str(model)
    module = json.loads(command[command.index("--lora-modules") + 1])
    assert module == {"name": "sql", "path": str(adapter)}


@pytest.mark.parametrize("engine", ["sglang", "openai-remote"])
def test_other_engines_refuse_adapters_by_name(adapter: Path, engine: str) -> None:
    with pytest.raises(ConfigurationError, match="is a LoRA adapter, and only --engine vllm"):
        build(settings(adapter, engine=engine))


WRONG = ["7", '"--x=y"']
NO_BASES = ["", "[]", "{}", *(f'{{"base_model_name_or_path": {name}}}' for name in WRONG)]


@pytest.mark.parametrize("config", NO_BASES)
def test_a_folder_that_names_no_base_model_is_refused(adapter: Path, config: str) -> None:
    (adapter / "adapter_config.json").write_text(config)
    with pytest.raises(ModelNotFoundError, match="names no base model"):
        adapter_of(settings(adapter))


def test_no_adapter_chooses_whose_code_runs(adapter: Path) -> None:
    for read in (adapter_of, identify, build):
        with pytest.raises(ConfigurationError, match=r"^--trust-remote-code: .* is a LoRA adapter"):
            read(settings(adapter, trust_remote_code=True))


def test_a_merged_model_beside_its_adapters_file_is_a_model(adapter: Path) -> None:
    (adapter / "model-00001-of-00002.safetensors").touch()
    for engine in ("native", "vllm", "openai"):
        assert adapter_of(settings(adapter, engine=engine)) is None

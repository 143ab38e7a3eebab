"""A real vLLM with a vision model gets the pictures of chats, and continues interrupted answers
exactly."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from promptq import Client
from promptq.shared.protocol.pictures import MAX_PIXELS, data_url, picture_part
from tests.programs.engines.pngs import png
from tests.programs.engines.real_servers import (
    NUM_TOKENS,
    RealServer,
    real_server,
    why_missing,
)
from tests.programs.engines.tiny_vision_model import TOKENS_OF_PICTURE, save_vision_model
from tests.support.processes import started
from tests.support.roles import as_role
from tests.support.waiting import until

SEEDS = (1, 2, 3)
TEXT = " ".join(["One day a fox saw this:"] * 40)
"""Longer than a block of vLLM's prefix cache, behind a picture."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_vision_model(tmp_path_factory.mktemp("vision"))


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    if why := why_missing("vllm") or why_missing("torchvision"):
        pytest.skip(why)
    with real_server("vllm", tmp_path_factory.mktemp("server"), model=model) as running:
        yield running


@pytest.fixture
def client(redis_url: str) -> Iterator[Client]:
    with Client(as_role("operator", redis_url)) as connected:
        yield connected


def worker(server: RealServer, model: Path, tmp_path: Path, redis_url: str) -> Any:
    return started(
        tmp_path,
        redis_url,
        *("--engine", "vllm", "--upstream", server.url, "--dtype", "float32"),
        *("--model", str(model), "--lease-ms", "2000", "--max-crashes", "50"),
    )


def chat(*parts: dict[str, Any] | str, **fields: Any) -> dict[str, Any]:
    content = [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]
    greedy = {"temperature": 0.0, "max_tokens": NUM_TOKENS, "ignore_eos": True}
    return {"messages": [{"role": "user", "content": content}], **greedy, **fields}


def asked(seed: int, **fields: Any) -> dict[str, Any]:
    return chat(picture_part(data_url(png(seed))), TEXT, **fields)


def test_pictures_have_their_own_tokens_and_share_no_prefix(
    redis_url: str, tmp_path: Path, client: Client, server: RealServer, model: Path
) -> None:
    with worker(server, model, tmp_path, redis_url):
        alone = [
            client.result(client.enqueue(**asked(seed, cache_salt=f"s{seed}"))) for seed in SEEDS
        ]
        tokens = [result.token_ids for result in alone]
        assert len({*map(tuple, tokens)}) == len(SEEDS)
        for _ in range(2):
            ids = [client.enqueue(**asked(seed)) for seed in SEEDS]
            assert [client.result(request_id).token_ids for request_id in ids] == tokens
        swapped = [picture_part(data_url(png(seed))) for seed in (2, 1)]
        both = client.result(client.enqueue(**chat(*swapped, TEXT)))
        again = client.result(client.enqueue(**chat(*reversed(swapped), TEXT)))
        assert both.token_ids != again.token_ids
        assert alone[0].usage is not None
        assert both.usage is not None
        # The marks around a picture are two tokens.
        assert both.usage.prompt_tokens == alone[0].usage.prompt_tokens + TOKENS_OF_PICTURE + 2


def test_a_killed_worker_s_streams_continue_exactly(
    redis_url: str, tmp_path: Path, client: Client, server: RealServer, model: Path
) -> None:
    def one(tmp_path: Path) -> Any:
        return worker(server, model, tmp_path, redis_url)

    with one(tmp_path) as first:
        undisturbed = [client.result(client.enqueue(**asked(seed))) for seed in SEEDS]
        ids = [client.enqueue(**asked(seed, resume="exact_only")) for seed in SEEDS]
        for request_id in ids:
            next(client.stream(request_id))
        first.process.kill()
        until(lambda: server.num_running() == 0)
    with one(tmp_path):
        for request_id, whole in zip(ids, undisturbed, strict=True):
            result = client.result(request_id)
            assert result.token_ids == whole.token_ids
            assert result.stats is not None
            assert result.usage == whole.usage
            assert result.stats.attempts > 1
            assert not result.stats.resumed_inexactly


def test_a_bad_picture_is_its_request_s_fault_alone(
    redis_url: str, tmp_path: Path, client: Client, server: RealServer, model: Path
) -> None:
    good, side = png(1), int(MAX_PIXELS**0.5) + 1
    wrong = {
        "truncated": png(1)[:-300],
        "header": good[:33],
        "wide": png(1, 2000, 4),
        "no picture": b"GIF89a" + bytes([1, 0, 1, 0]),
    }
    with worker(server, model, tmp_path, redis_url) as running:
        before = client.result(client.enqueue(**asked(1))).token_ids
        beside = [client.enqueue(**asked(seed)) for seed in SEEDS]
        for content in wrong.values():
            result = client.result(
                client.enqueue(**chat(picture_part(data_url(content)))), check=False
            )
            assert result.error is not None, content
            assert result.error.type == "invalid_request"
            assert result.error.message.startswith("messages: ")
        stray = chat(picture_part(data_url(good)), "<|image_pad|>")
        error = client.result(client.enqueue(**stray), check=False).error
        assert error is not None
        assert "places for pictures" in error.message
        # Two requests of a long prompt: the pictures' tokens make the second one too long.
        assert client.result(client.enqueue(**asked(1))).token_ids == before
        assert client.result(beside[0]).token_ids == before
        assert all(client.result(request_id).finish_reason == "length" for request_id in beside)
        assert client.stats().dead == 0
        assert running.process.poll() is None
    with pytest.raises(Exception, match="pixels in all"):
        client.enqueue(**chat(picture_part(data_url(png(1, side, side, num_rows=1)))))

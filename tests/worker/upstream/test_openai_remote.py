"""A server that takes and returns only text, such as a cloud's API."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from tokenizers import Tokenizer, processors
from transformers import PreTrainedTokenizerFast

from promptq.shared.errors import ConfigurationError
from promptq.shared.protocol.request import FinishReason, SamplingParams
from promptq.shared.queue.request_queue import AsyncRequestQueue
from promptq.shared.settings.worker import WorkerSettings
from promptq.worker.engine.api.messages import EngineRequest
from promptq.worker.serve.build import Served, build
from promptq.worker.text.tokenizer import HuggingFaceTokenizer
from promptq.worker.upstream.dialects.dialect import Chunk, Continuation
from promptq.worker.upstream.dialects.openai_remote import OpenAIRemoteDialect
from promptq.worker.upstream.dialects.transport import Server, ServerFaultError
from tests.programs.stand_in_server.starting import StandIn, stand_in_server, text_after
from tests.support.model_free import finished, running_worker
from tests.support.requests import async_put, until_tokens
from tests.worker.upstream.test_faults import GREEDY, assert_whole_texts, put_some

SLOWLY = ("--token-seconds", "0.01")


@pytest.fixture
def stand_in() -> Iterator[StandIn]:
    with stand_in_server("openai-remote", *SLOWLY) as server:
        yield server


def settings(model: Path, url: str, **more: Any) -> WorkerSettings:
    named = {"served_model_name": "m", "max_model_len": 1024, "dtype": "float32", **more}
    return WorkerSettings(engine="openai-remote", model=str(model), upstream=url, **named)


@pytest.fixture
async def served(model: Path, stand_in: StandIn) -> Served:
    return await asyncio.to_thread(build, settings(model, stand_in.url))


async def test_streams_are_whole(
    redis_url: str, queue: AsyncRequestQueue, served: Served, stand_in: StandIn
) -> None:
    async with running_worker(redis_url, served):
        await assert_whole_texts(queue, await put_some(queue, 8, 20))
        stopped = await async_put(queue, prompt="p", max_tokens=90, stop=" ", **GREEDY)
        result = await finished(queue, stopped)
        assert result["text"] == text_after("p", 90).split(" ")[0]
        assert result["finish_reason"] == "stop"
    assert stand_in.told()["running"] == 0


@pytest.mark.matrix(2)
@pytest.mark.parametrize("fault", ["break", "abort", "end", "malformed"])
async def test_a_broken_stream_goes_on_and_is_marked(
    redis_url: str, queue: AsyncRequestQueue, served: Served, stand_in: StandIn, fault: str
) -> None:
    async with running_worker(redis_url, served):
        wanted = await put_some(queue, 4, 300)
        exact = await async_put(queue, prompt="p", resume="exact_only", **GREEDY)
        for request_id in (*wanted, exact):
            await until_tokens(queue, request_id, 5)
        stand_in.fail(fault)
        await assert_whole_texts(queue, wanted)
        for request_id in wanted:
            result = await finished(queue, request_id)
            assert result["stats"]["attempts"] > 1
            assert result["stats"]["resumed_inexactly"]
        assert (await finished(queue, exact))["error"]["type"] == "cannot_resume"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("logit_bias", {"97": 5}),
        ("logprobs", 1),
        ("presence_penalty", 0.5),
        ("response_format", {"type": "json_object"}),
        ("stop_token_ids", [97]),
        ("top_k", 5),
    ],
)
async def test_fields_that_need_token_ids_are_refused(
    redis_url: str, queue: AsyncRequestQueue, served: Served, field: str, value: Any
) -> None:
    async with running_worker(redis_url, served) as worker:
        worker._exchange._beating_since = -1e9  # it knows that it is alone
        request_id = await async_put(queue, prompt="p", **{field: value})
        error = (await finished(queue, request_id))["error"]
        assert error["type"] == "unsupported"
        assert error["message"].startswith(field)


def test_the_server_must_serve_the_model_and_its_length_be_known(
    model: Path, stand_in: StandIn
) -> None:
    with pytest.raises(ConfigurationError, match=r"does not complete a text with the model 'z'"):
        build(settings(model, stand_in.url, served_model_name="z"))
    with pytest.raises(ConfigurationError, match=r"^--max-model-len: .* 'm' takes"):
        build(settings(model, stand_in.url, max_model_len=None))
    with pytest.raises(ConfigurationError, match=r"^--engine openai-remote: give --upstream"):
        build(settings(model, "").model_copy(update={"upstream": None}))


class TestStream:
    """The token ids of a server's texts."""

    @staticmethod
    @asynccontextmanager
    async def server(texts: Sequence[Any], seen: list[Any]) -> AsyncIterator[Server]:
        """Serves a stream of these texts, and notes the calls in `seen`."""

        async def answer(request: web.Request) -> web.Response:
            seen.append(await request.json())
            events = [{"choices": [{"text": text, "finish_reason": None}]} for text in texts]
            events.append({"choices": [{"text": "", "finish_reason": "stop"}]})
            body = "".join(f"data: {json.dumps(event)}\n\n" for event in events)
            return web.Response(text=body, content_type="text/event-stream")

        app = web.Application()
        app.router.add_post("/v1/completions", answer)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        server = Server(f"http://127.0.0.1:{runner.addresses[0][1]}")
        try:
            yield server
        finally:
            await server.close()
            await runner.cleanup()

    async def chunks(
        self,
        tokenizer: HuggingFaceTokenizer,
        texts: Sequence[Any],
        *,
        prompt: Sequence[int] = b"p",
        emitted: Sequence[int] = (),
        max_tokens: int = 100,
    ) -> tuple[list[Chunk], Any]:
        """Returns the chunks of a stream with these texts, and the call."""
        dialect, seen = OpenAIRemoteDialect(model="m", max_model_len=9), list[Any]()
        dialect.use(tokenizer)
        request = EngineRequest(0, [*prompt], SamplingParams(), 7, max_tokens)
        async with (
            self.server(texts, seen) as server,
            aclosing(dialect.generate(server, Continuation(request, emitted, "m"))) as stream,
        ):
            return [chunk async for chunk in stream], *seen

    @pytest.fixture
    def tokenizer(self, model: Path) -> HuggingFaceTokenizer:
        return HuggingFaceTokenizer.load(str(model))

    async def test_a_piece_of_text_may_have_several_tokens(
        self, tokenizer: HuggingFaceTokenizer
    ) -> None:
        found, call = await self.chunks(tokenizer, ["ab", "", "é🙂"], emitted=b"xy")
        assert [bytes(chunk.token_ids).decode() for chunk in found] == ["ab", "é🙂", ""]
        assert [chunk.finish_reason for chunk in found] == [None, None, FinishReason.STOP]
        assert (call["prompt"], call["max_tokens"], call["seed"]) == ("pxy", 98, 7)

    @pytest.mark.parametrize(("max_tokens", "last"), [(5, b"d"), (4, b""), (3, b"")])
    async def test_no_more_tokens_than_requested(
        self, tokenizer: HuggingFaceTokenizer, max_tokens: int, last: bytes
    ) -> None:
        """The server counts other tokens."""
        found, _ = await self.chunks(tokenizer, ["abc", "def"], emitted=b"x", max_tokens=max_tokens)
        text = b"".join(bytes(chunk.token_ids) for chunk in found)
        assert text == b"abc"[: max_tokens - 1] + last
        assert found[-1].finish_reason is FinishReason.LENGTH

    async def test_text_that_is_no_text(self, tokenizer: HuggingFaceTokenizer) -> None:
        with pytest.raises(ServerFaultError):
            await self.chunks(tokenizer, [["a"]])

    async def test_special_tokens_of_a_prompt_are_sent_by_name_without_the_first(
        self, model: Path
    ) -> None:
        """The server adds the first one."""
        backend = Tokenizer.from_file(str(model / "tokenizer.json"))
        backend.add_special_tokens(["<s>"])
        first = ("<s>", backend.token_to_id("<s>"))
        backend.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[first])
        tokenizer = HuggingFaceTokenizer(PreTrainedTokenizerFast(tokenizer_object=backend))
        prompt = tokenizer.encode_text("a<end><s>b", add_special_tokens=True)
        _, call = await self.chunks(tokenizer, [], prompt=prompt)
        assert call["prompt"] == "a<end><s>b"

"""Finds the server, reads its description, and checks that it computes the right model."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from urllib.parse import urlsplit

from promptq.shared.errors import ConfigurationError
from promptq.shared.runtime.logs import get_logger
from promptq.shared.settings.worker import WorkerSettings
from promptq.worker.engine.api.messages import EngineLimits
from promptq.worker.text.tokenizer import HuggingFaceTokenizer
from promptq.worker.upstream.dialects.dialect import Dialect, ServerDescription
from promptq.worker.upstream.dialects.llama_cpp import LlamaCppDialect
from promptq.worker.upstream.dialects.openai_completions import OpenAIDialect
from promptq.worker.upstream.dialects.openai_remote import OpenAIRemoteDialect
from promptq.worker.upstream.dialects.sglang import SglangDialect
from promptq.worker.upstream.dialects.transport import (
    OverloadedError,
    RefusedError,
    Server,
    ServerFaultError,
    malformed_as_fault,
)
from promptq.worker.upstream.dialects.vllm import VllmDialect
from promptq.worker.upstream.probing import describe
from promptq.worker.upstream.server_process import ServerProcess, free_port

DIALECTS: dict[str, Callable[..., Dialect]] = {
    "vllm": VllmDialect,
    "llama.cpp": LlamaCppDialect,
    "sglang": SglangDialect,
    "openai": OpenAIDialect,
    "openai-remote": OpenAIRemoteDialect,
}
"""Dialects by the engine's name. All dialects take these parameters, and may ignore some of them:
`is_exact`, whether the server computes in fp32; `shares_prefixes`, whether tenants share cached
prefixes; `adapter`, for all calls; `model`, the server's name for the model; `max_model_len`."""

_PROBE = "Grüße, 世界! 12345\n\tdef f(x): return x # 🙂"
"""A text for which different tokenizers probably return different token ids."""
_RETRY_SECONDS = 0.5


@dataclass(frozen=True, slots=True)
class FoundServer:
    """A server that answers. `probe_token_ids` has the server's token ids for a short text, or is
    None if the server cannot tokenise."""

    url: str
    description: ServerDescription
    probe_token_ids: list[int] | None

    def limits(self, settings: WorkerSettings, vocab_size: int) -> EngineLimits:
        """Returns the limits of the part of the server that this worker uses."""
        server = self.description
        longest = min(server.max_model_len, settings.max_model_len or server.max_model_len)
        slots = min(settings.max_num_seqs, server.max_num_seqs or settings.max_num_seqs)
        kv_tokens = server.kv_tokens or slots * longest
        return EngineLimits(
            max_num_seqs=slots,
            max_num_batched_tokens=settings.max_num_batched_tokens,
            max_model_len=longest,
            kv_tokens=max(longest, int(kv_tokens * settings.upstream_share)),
            block_size=server.block_size,
            bytes_per_token=0,  # not known
            vocab_size=vocab_size,
            embedding_size=server.embedding_size,
        )

    def check_tokenizer(self, tokenizer: HuggingFaceTokenizer) -> None:
        """Raise ConfigurationError if the server has another tokenizer."""
        if self.probe_token_ids not in (None, tokenizer.encode_text(_PROBE)):
            raise ConfigurationError(
                "--model: its tokenizer is not that of the model"
                f" {self.description.model!r:.200}, which {self.description.software} at {self.url}"
                " serves; name that model's files"
            )


def key_of(settings: WorkerSettings) -> str | None:
    """Returns the server's API key as plain text; None without a key."""
    key = settings.upstream_key
    return None if key is None else key.get_secret_value()


def start_server(dialect: Dialect, settings: WorkerSettings) -> ServerProcess:
    """Start a server for this worker, without waiting for an answer. Raises ConfigurationError."""
    if settings.model is None:
        raise ConfigurationError(
            f"--engine {settings.engine}: give --model, for a server to be started, or --upstream,"
            " the URL of one that runs"
        )
    port = free_port()
    return ServerProcess(dialect.start_command(settings, port), port)


def find_server(
    dialect: Dialect, settings: WorkerSettings, process: ServerProcess | None
) -> FoundServer:
    """Wait for the server while its `process` runs, or for --redis-wait seconds if `process` is
    None. Raises ConfigurationError if no usable server answers."""
    url = process.url if process is not None else _checked(settings.upstream or "")
    return asyncio.run(_find(dialect, url, settings, process))


def _checked(url: str) -> str:
    try:
        parts = urlsplit(url)
        is_url = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # no port, or no address
        is_url = False
    if "@" in url:  # the URL is shown in logs and to all operators
        raise ConfigurationError("--upstream: holds a password; give a key with --upstream-key")
    if not is_url or parts.query or parts.fragment:
        raise ConfigurationError(
            f"--upstream: {url!r} is not the URL of a server; write http://host:8000"
        )
    return url.rstrip("/")


async def _find(
    dialect: Dialect, url: str, settings: WorkerSettings, process: ServerProcess | None
) -> FoundServer:
    loop = asyncio.get_running_loop()
    deadline = loop.time() + settings.redis_wait
    server, reported = Server(url, key_of(settings)), ""
    try:
        while True:
            try:
                with malformed_as_fault():
                    description = await describe(dialect, server)
                    probe = await dialect.tokenize(server, _PROBE)
                break
            except (ServerFaultError, OverloadedError, RefusedError) as error:
                if process is not None:
                    process.check()
                elif loop.time() >= deadline:
                    raise ConfigurationError(f"--upstream: no server to use: {error}") from error
                if str(error) != reported:
                    reported = str(error)
                    get_logger().info("waiting for the inference server", why=reported)
            await asyncio.sleep(_RETRY_SECONDS)
    finally:
        await server.close()
    if process is not None:
        process.has_answered()
    return FoundServer(url, description, probe)

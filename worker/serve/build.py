"""Builds the parts of a worker that depend on its model, such as engine and tokenizer."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from promptq.shared.errors import ConfigurationError
from promptq.shared.protocol.claims import ModelIdentity
from promptq.shared.protocol.request import Pooling
from promptq.shared.runtime.extras import require
from promptq.shared.runtime.logs import get_logger, take_over_logs
from promptq.shared.runtime.quick_imports import quick_imports
from promptq.shared.settings.common import flag_of
from promptq.shared.settings.worker import WorkerSettings
from promptq.worker.engine.api.port import Engine, EnginePort, Progress, ignore_progress
from promptq.worker.engine.checkpoints.configurations import pooling_of
from promptq.worker.engine.checkpoints.location import is_gguf
from promptq.worker.engine.core.llm_engine import LLMEngine
from promptq.worker.engine.core.runner import Runner
from promptq.worker.serve.model_identity import (
    MODEL_FREE,
    NATIVE,
    folder_of,
    identity_of,
    shown_name,
)
from promptq.worker.shipped import MODEL_DIR
from promptq.worker.text.grammars.schema_masks import Grammars
from promptq.worker.text.tokenizer import ByteTokenizer, HuggingFaceTokenizer, Tokenizer

if TYPE_CHECKING:
    from promptq.worker.engine.load_check.checked_model import Verdict
    from promptq.worker.engine.runner.model_runner import ModelRunner

_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_MODEL_FREE_BLOCK_SIZE = 16
_SPECULATIVE_TOKENS = 7
_MODEL_FREE_KV_BYTES = 2**23
_MODEL_FREE_MODEL_LEN = 8192


@dataclass(frozen=True, slots=True)
class Served:
    """A loaded model with all that a worker needs to serve it."""

    engine: Engine | EnginePort
    """An Engine, for which the worker starts a thread, or an EnginePort, which needs none."""
    tokenizer: Tokenizer
    identity: ModelIdentity
    end_token_ids: frozenset[int]
    device: str
    dtype: str
    """The dtype in which the model computes; empty if this process computes nothing."""
    method: str = ""
    """Text for the ready line, which a worker prints when it can serve. The text names the
    inference server. Without a server, the text says whether promptq's code computes the model, or
    why not, and names the number formats."""
    grammars: Grammars | None = None
    """Compiles grammars for structured output; None for an engine that cannot use grammars."""
    verdict: Verdict | None = None
    """The result of the test of the model at load. A later load of the same model can reuse it."""
    pooling: Pooling | None = "last"
    """The default pooling of embedding requests; see `Preparation`."""

    @property
    def computes_here(self) -> bool:
        """Whether this process computes a model. Then the engine's steps release the interpreter's
        lock. False for `model-free`, and if an inference server computes the model."""
        return bool(self.dtype) and not isinstance(self.engine, EnginePort)


def _kv_cache_bytes(settings: WorkerSettings) -> int | None:
    """Returns the bytes of a setting such as `4G`, `512M` or `1048576`; None if it is not set.
    Raises ConfigurationError."""
    if not (text := settings.kv_cache_memory):
        return None
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?\s*", text, re.IGNORECASE)
    if match is None:
        raise ConfigurationError(
            f"--kv-cache-memory: {text!r} is not a size; write 512M, 4G or a number of bytes"
        )
    return int(float(match[1]) * _UNITS[match[2].upper()])


def build(
    settings: WorkerSettings, progress: Progress = ignore_progress, known: Verdict | None = None
) -> Served:
    """Load the model that the settings name, and return it with its tokenizer and engine. Blocks
    for seconds or minutes. If `known` has the result of an earlier test of the model, no test runs.

    Raises ConfigurationError, ModelError.
    """
    memory = _kv_cache_bytes(settings)
    if settings.engine != NATIVE:
        return _build_upstream(settings, progress)
    for name in ("upstream", "upstream_key", "engine_command", "engine_arguments"):
        if getattr(settings, name):
            raise ConfigurationError(
                f"{flag_of(name)}: belongs to an inference server; name its kind with --engine,"
                " such as --engine vllm"
            )
    require("the native engine", "worker")
    if settings.model == MODEL_FREE:
        return _build_model_free(settings, memory)
    return _build_model(settings, memory, progress, known)


def fits_beside_others(settings: WorkerSettings) -> bool:
    """Returns whether the model certainly fits into memory beside other loaded models."""
    if settings.engine != NATIVE:
        return settings.upstream is not None  # the memory of its server is unknown
    if settings.model == MODEL_FREE:
        return True
    from promptq.worker.engine.model import loading
    from promptq.worker.engine.model.backend_choice import resolve_device

    name = settings.model or str(MODEL_DIR)
    return loading.fits_beside_others(
        name if is_gguf(name) else str(folder_of(name)),
        resolve_device(settings.device),
        settings.dtype,
        _kv_cache_bytes(settings),
        trust_remote_code=settings.trust_remote_code,
    )


def _build_model_free(settings: WorkerSettings, memory: int | None) -> Served:
    from promptq.worker.engine.core.model_free import END_TOKEN_ID, ModelFreeRunner

    runner = ModelFreeRunner(
        num_blocks=(memory or _MODEL_FREE_KV_BYTES) // (_MODEL_FREE_BLOCK_SIZE * 8),
        block_size=_MODEL_FREE_BLOCK_SIZE,
        max_model_len=_MODEL_FREE_MODEL_LEN,
    )
    engine = _engine(runner, settings, _SPECULATIVE_TOKENS)
    identity = ModelIdentity(shown_name(settings), MODEL_FREE)
    return Served(engine, ByteTokenizer(), identity, frozenset({END_TOKEN_ID}), "none", "")


def _build_model(
    settings: WorkerSettings, memory: int | None, progress: Progress, known: Verdict | None
) -> Served:
    progress("libraries")
    with quick_imports():
        from transformers.utils import logging as transformers_logging

        from promptq.worker.engine.model.loading import LoadOptions
        from promptq.worker.engine.runner.load_runner import load_runner

    take_over_logs("transformers", "huggingface_hub")
    cast("Any", transformers_logging).disable_progress_bar()  # `progress` shows the whole start
    name = settings.model or str(MODEL_DIR)
    options = LoadOptions(
        device=settings.device,
        dtype=settings.dtype,
        trust_remote_code=settings.trust_remote_code,
        kv_cache_memory=memory,
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        max_model_len=settings.max_model_len,
        attention=settings.attention,
        native=settings.native,
        quantization=settings.quantization,
        quantization_group=int(settings.quantization_group),
        quantize_embeddings=settings.quantize_embeddings,
        kv_cache_dtype=settings.kv_cache_dtype,
        drafts=None if settings.speculative_tokens is None else settings.speculative_tokens > 0,
        compile=settings.compile,
        cuda_graphs=settings.cuda_graphs,
    )
    runner = load_runner(name, options, progress, known)
    if runner.is_slow_in_bf16:
        get_logger().warning(
            "this processor has no fast products in bfloat16, and there is no native code for this"
            " model: --dtype float32 is many times faster",
            why_no_own_code=runner.why_no_own_code,
        )
    progress("tokenizer")
    is_on_cuda = runner.device.type == "cuda"
    engine = _engine(
        runner,
        settings,
        # A sequence that may draft keeps the next step from being launched ahead.
        _SPECULATIVE_TOKENS if runner.is_row_invariant and not is_on_cuda else 0,
        async_scheduling=is_on_cuda,
    )
    tokenizer = HuggingFaceTokenizer.load(
        name,
        trust_remote_code=settings.trust_remote_code,
        max_prompt_tokens=engine.limits.max_model_len,
    )
    ends = _end_token_ids(runner.end_token_ids, tokenizer, runner.vocab_size)
    identity = identity_of(settings, tokenizer)
    style = identity.output_style
    return Served(
        engine=engine,
        tokenizer=tokenizer,
        identity=identity,
        end_token_ids=ends,
        device=str(runner.device),
        dtype=str(runner.dtype).removeprefix("torch."),
        method=_method(runner, settings),
        grammars=Grammars(tokenizer, runner.vocab_size, ends, vets=True, style=style),
        verdict=runner.verdict,
        pooling=settings.pooling or pooling_of(folder_of(name)),
    )


def _build_upstream(settings: WorkerSettings, progress: Progress) -> Served:
    require("an engine behind HTTP", "upstream")
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # "torch is missing"
    from promptq.worker.upstream.connecting import DIALECTS, find_server, key_of, start_server
    from promptq.worker.upstream.dialects.adapter import adapter_of
    from promptq.worker.upstream.forwarding_engine import ForwardingEngine
    from promptq.worker.upstream.model_files import read_model_facts, require_for_gguf

    for setting in ("engine_command", "engine_arguments") if settings.upstream else ():
        if getattr(settings, setting):
            raise ConfigurationError(
                f"{flag_of(setting)}: belongs to a server that the worker starts, but --upstream"
                " names one that runs already; leave one of the two out"
            )
    take_over_logs("transformers", "huggingface_hub")
    if is_gguf(settings.model or ""):
        require_for_gguf()
    adapter = adapter_of(settings)
    dialect = DIALECTS[settings.engine](
        is_exact=settings.dtype == "float32",
        shares_prefixes=settings.share_prefix_cache,
        adapter=adapter,
        model=shown_name(settings),
        max_model_len=settings.max_model_len,
    )
    progress("server")
    process = None if settings.upstream else start_server(dialect, settings)
    server = find_server(dialect, settings, process)
    named = settings.model or server.description.model_dir
    if named is None or (settings.trust_remote_code and settings.model is None):
        raise ConfigurationError(
            "--model: name the directory, GGUF file or hub name of the model that the server"
            " serves; the server does not name the model, or its answer is not trusted with"
            " --trust-remote-code"
        )
    name = adapter.base if adapter else named
    progress("tokenizer")
    facts = read_model_facts(name, trust_remote_code=settings.trust_remote_code)
    limits = server.limits(settings, facts.vocab_size)
    tokenizer = HuggingFaceTokenizer.load(
        name,
        trust_remote_code=settings.trust_remote_code,
        max_prompt_tokens=limits.max_model_len,
    )
    server.check_tokenizer(tokenizer)
    dialect.use(tokenizer)
    engine = ForwardingEngine(
        server.url,
        key_of(settings),
        dialect,
        limits,
        server.description,
        settings.stuck_seconds,
        process,
    )
    get_logger().info(
        "features that this engine lacks",
        server=server.description.software,
        refused=" ".join(engine.abilities.refused),
        exact_resume=engine.abilities.exact_resume,
        not_exact_with=" ".join(sorted(engine.abilities.inexact_with)),
    )
    ends = _end_token_ids(facts.end_token_ids, tokenizer, facts.vocab_size)
    identity = identity_of(settings.model_copy(update={"model": named}), tokenizer)
    style = identity.output_style
    return Served(
        engine=engine,
        tokenizer=tokenizer,
        identity=identity,
        end_token_ids=ends,
        device=server.url,
        dtype="" if settings.dtype == "auto" else settings.dtype,
        method=server.description.software,
        grammars=Grammars(tokenizer, facts.vocab_size, ends, vets=True, style=style),
        pooling=settings.pooling
        or (pooling_of(folder_of(name)) if limits.embedding_size else None),
    )


def _end_token_ids(
    of_model: frozenset[int], tokenizer: HuggingFaceTokenizer, vocab_size: int
) -> frozenset[int]:
    """Returns the end tokens of both the model and the tokenizer, as vLLM does. A fine-tuned model
    often has its base model's configuration, without the tokenizer's end token."""
    own = tokenizer.end_token_id
    return of_model if own is None or own >= vocab_size else of_model | {own}


def _method(runner: ModelRunner, settings: WorkerSettings) -> str:
    method, origin = runner.own_code, "of"
    if runner.why_no_own_code:
        is_compiled = runner.compiled is not None and runner.compiled.is_compiled
        method = f"no {method} ({runner.why_no_own_code}){', compiled' * is_compiled}"
        origin = "widened from"
    if runner.saved_format:
        method += f", weights {origin} {runner.saved_format}"
    if settings.quantization != "none":
        method += f", weights in {settings.quantization}"
    if settings.kv_cache_dtype != "auto":
        method += f", KV cache in {settings.kv_cache_dtype}"
    layout = runner.kv_layout
    if layout.num_states is not None and not layout.states_skip_drafts:
        method += ", no drafts (recurrent layers)"
    elif runner.why_no_head:
        method += f", no drafts by its head ({runner.why_no_head})"
    return method + f", no CUDA graphs ({runner.why_no_graphs})" * bool(runner.why_no_graphs)


def _engine(
    runner: Runner,
    settings: WorkerSettings,
    speculative_tokens: int,
    *,
    async_scheduling: bool = False,
) -> Engine:
    if settings.speculative_tokens is not None:
        speculative_tokens = settings.speculative_tokens
    if settings.async_scheduling is not None:
        async_scheduling = settings.async_scheduling
    return LLMEngine(
        runner,
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        prefill_chunk=settings.prefill_chunk,
        max_model_len=settings.max_model_len,
        speculative_tokens=speculative_tokens,
        async_scheduling=async_scheduling,
        share_prefix_cache=settings.share_prefix_cache,
    )

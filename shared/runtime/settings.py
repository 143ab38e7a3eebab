"""All settings. The environment is read here, once; flags of the command override it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeVar

from pydantic import Field, ValidationError
from pydantic_settings import BaseSettings, SettingsConfigDict

from promptq.shared.errors import ConfigurationError

ENV_PREFIX = "PROMPTQ_"


T = TypeVar("T", bound="Settings")


class Settings(BaseSettings):
    """Each field is the environment variable of that name with the prefix `PROMPTQ_`."""

    model_config = SettingsConfigDict(env_prefix=ENV_PREFIX, extra="ignore")

    redis_url: str | None = Field(
        None,
        description="redis://, rediss://, unix:// or redis+sentinel:// address; without it,"
        " the server of the running `promptq up`, for a worker otherwise one of its own",
    )
    redis_wait: float = Field(
        0.0, ge=0, description="seconds a starting worker waits for the server to answer"
    )
    redis_retry_seconds: float = Field(
        60.0,
        ge=0,
        description="seconds a worker keeps what it has generated and tries to send it, while the"
        " server is away or refuses it, before it exits",
    )
    queue: str = Field("default", description="name of the queue")
    log_format: Literal["auto", "console", "json"] = Field(
        "auto", description="auto: colour in a terminal, JSON otherwise"
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="least severe level that is logged"
    )

    model: str | None = Field(
        None,
        description="local directory or hub name; without it, the shipped model; `model-free`"
        " serves letters without any model, to try or load a queue",
    )
    trust_remote_code: bool = Field(
        False, description="run code that comes with the model; leave it off unless you read it"
    )
    device: str = Field("auto", description="cpu, cuda, cuda:1, ...; auto: cuda where there is one")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="auto: as the model was saved"
    )
    attention: str = Field(
        "auto",
        description="attention backend, by name; auto: native code where it serves the model, or"
        " else the fastest backend there",
    )
    native: bool = Field(
        True, description="on a CPU, compute models of the Llama kind in native code"
    )
    compile: bool = Field(
        False,
        description="where there is no native code, so on a GPU, run the model's layers through"
        " torch.compile: a faster step for a longer start",
    )
    cuda_graphs: bool = Field(
        True, description="on a GPU, run decode steps as CUDA graphs; off, for debugging or memory"
    )
    max_num_seqs: int = Field(64, ge=1, description="most sequences in the batch (slots)")
    max_num_batched_tokens: int = Field(2048, ge=1, description="token budget of a step")
    prefill_chunk: int | None = Field(
        None, ge=1, description="most prompt tokens of one sequence a step; default: the budget"
    )
    max_model_len: int | None = Field(
        None, ge=2, description="longest prompt and output; default: the model's, if it fits"
    )
    kv_cache_memory: str | None = Field(
        None, description="KV cache size, such as 512M or 4G; default: by what is free"
    )
    speculative_tokens: int | None = Field(
        None,
        ge=0,
        le=64,
        description="most tokens a step drafts for one sequence out of its own text, where that"
        " pays; default: 7 if no token's logits depend on what else a step computes, otherwise 0",
    )
    async_scheduling: bool | None = Field(
        None,
        description="launch a step of decodes before the last one's tokens are collected; default:"
        " on CUDA, where the host would keep the device waiting",
    )
    share_prefix_cache: bool = Field(
        False,
        description="let tenants share cached prefixes of prompts; off, each has its own, so that"
        " nobody learns from the cache what another sent",
    )
    seed: int | None = Field(
        None, description="makes the seeds of requests that bring none reproducible, by their id"
    )
    prefetch_depth: int | None = Field(
        None, ge=0, description="requests prepared beyond free slots; default: about 100 ms of work"
    )
    max_events_per_second: float | None = Field(
        None,
        gt=0,
        description="tokens that come faster are sent some of a stream at a time, up to 100 ms"
        " late; first tokens, ends and streams with stop strings pass; inf: each by itself;"
        " default: 500 for each core",
    )
    lease_ms: int = Field(10_000, ge=100, description="how long a silent worker keeps its requests")
    max_crashes: int = Field(
        3,
        ge=1,
        description="crashes of workers, the last of them while it ran alone, that make a request a"
        " dead letter",
    )
    stuck_seconds: float = Field(
        120.0,
        gt=0,
        description="seconds that one step may take, after which the engine counts as hung: the"
        " worker gives everything back and exits",
    )
    drain_seconds: float = Field(
        20.0, ge=0, description="how long a stopping worker goes on with what runs"
    )
    otlp_endpoint: str | None = Field(
        None,
        description="base URL of an OpenTelemetry collector for traces, such as"
        " http://localhost:4318 (extra `tracing`); default: OTEL_EXPORTER_OTLP_ENDPOINT, or none",
    )
    metrics_port: int | None = Field(
        None,
        ge=0,
        le=65535,
        description="port of the worker's metrics for Prometheus; 0: a free one; default: none",
    )
    metrics_host: str = Field(
        "127.0.0.1", description="address that the metrics are served at; 0.0.0.0: all"
    )


def read_settings(**overrides: Any) -> Settings:
    """Settings of the environment, overridden. Raises ConfigurationError naming what is wrong."""
    return read_settings_of(Settings, overrides, flag_of)


def read_settings_of(
    kind: type[T], overrides: Mapping[str, Any], named: Callable[[str], str] = str
) -> T:
    """As `read_settings`, of another class; `named` is how people know a setting by its name.

    An override that is None is left out.
    """
    try:
        return kind(**{name: it for name, it in overrides.items() if it is not None})
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        name = str(first["loc"][0])
        raise ConfigurationError(
            f"{named(name)} ({ENV_PREFIX}{name.upper()}): {first['msg']}, got {first['input']!r}"
        ) from None


def flag_of(name: str) -> str:
    """The command-line flag of a setting."""
    return "--redis" if name == "redis_url" else "--" + name.replace("_", "-")

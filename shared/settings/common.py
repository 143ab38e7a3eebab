"""Settings of all processes, and the functions that read settings from the environment."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, TypeVar

from pydantic import Field, ValidationError
from pydantic_settings import BaseSettings, SettingsConfigDict, SettingsError

from promptq.shared.errors import ConfigurationError

ENV_PREFIX = "PROMPTQ_"


T = TypeVar("T", bound="Settings")


class Settings(BaseSettings):
    """Settings of every process. A field's environment variable is `PROMPTQ_` and its name.

    Each kind of process has a subclass with more fields. A process ignores all other variables.
    """

    model_config = SettingsConfigDict(env_prefix=ENV_PREFIX, extra="ignore")

    redis_url: str | None = Field(
        None,
        description="redis://, rediss://, unix://, redis+sentinel:// or redis+cluster:// address;"
        " default: the server of the running `promptq up`; if there is none, a worker starts"
        " one",
    )
    queue: str = Field("default", description="name of the queue")
    log_format: Literal["auto", "console", "json"] = Field(
        "auto", description="auto: colour in a terminal, JSON otherwise"
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="least severe level that is logged"
    )
    otlp_endpoint: str | None = Field(
        None,
        description="base URL of an OpenTelemetry collector for traces, such as"
        " http://localhost:4318 (extra `tracing`); default: OTEL_EXPORTER_OTLP_ENDPOINT, or none",
    )


class ReaperSettings(Settings):
    """Settings of processes that wait for their server and reap leases: workers and jobs."""

    redis_wait: float = Field(
        0.0,
        ge=0,
        description="seconds that `promptq jobs`, or a starting worker (also for --upstream), waits"
        " for the server to answer",
    )
    redis_retry_seconds: float = Field(
        60.0,
        ge=0,
        description="seconds for which a worker keeps its output and tries to send it while the"
        " server is away or refuses writes; then the worker exits. The run of a batch"
        " file tries as long",
    )
    lease_ms: int = Field(
        10_000, ge=100, description="milliseconds after which a silent worker loses its requests"
    )
    max_crashes: int = Field(
        3,
        ge=1,
        description="crashes of workers after which a request becomes a dead letter, if it ran"
        " alone at the last of them",
    )


def read_settings(**overrides: Any) -> Settings:
    """Returns settings of all processes; `overrides` have priority. Raises ConfigurationError."""
    return read_settings_of(Settings, flag_of, **overrides)


def read_settings_of(kind: type[T], named: Callable[[str], str] = str, /, **overrides: Any) -> T:
    """Returns the settings of the class `kind`. Raises ConfigurationError.

    `overrides` that are not None replace environment variables. `named` turns a field's name into
    the name that an error message shows.
    """
    try:
        return kind(**{name: value for name, value in overrides.items() if value is not None})
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        name = str(first["loc"][0])
        raise ConfigurationError(
            f"{named(name)} ({ENV_PREFIX}{name.upper()}): {first['msg']}, got {first['input']!r}"
        ) from None
    except SettingsError as error:  # a list in the environment that is not JSON
        raise ConfigurationError(f"{error}; write a JSON list") from None


def flag_of(name: str) -> str:
    """Returns a setting's name on a worker's command line, such as `--redis` or `-- ARGUMENTS`."""
    others = {"redis_url": "--redis", "engine_arguments": "-- ARGUMENTS"}
    return others.get(name) or "--" + name.replace("_", "-")

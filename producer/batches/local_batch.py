"""Runs a batch from a local file to a local file. Needs no service except the queue."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from promptq.producer.batch_store.input_file import (
    BatchFileError,
    count_lines,
    new_batch_id,
)
from promptq.producer.batch_store.line_order import lines_by_prefix
from promptq.producer.batches.batch_journal import Journal
from promptq.producer.batches.batch_run import LINES_AHEAD, BatchRun
from promptq.producer.batches.run_options import BatchProgress, Ending, RunOptions, stop_signals
from promptq.producer.calls.caller import Caller
from promptq.producer.calls.picture_urls import PictureFetcher
from promptq.producer.calls.queues import ServedQueues
from promptq.producer.clients.async_client import AsyncClient
from promptq.producer.clients.connecting import explained, server_url, without_server
from promptq.producer.settings.gateway import GatewaySettings
from promptq.shared.errors import ConfigurationError, RedisUnavailableError
from promptq.shared.server.connection import open_async_redis
from promptq.shared.settings.common import ReaperSettings, read_settings_of


@dataclass(frozen=True, slots=True)
class BatchOutcome:
    """The outcome of a local batch. `is_complete`: each input line has an answer or an error."""

    is_complete: bool
    progress: BatchProgress


def errors_beside(output: Path) -> Path:
    """Returns the default path of the file for errors, such as `out.errors.jsonl`."""
    return output.with_name(f"{output.stem}.errors{output.suffix}")


def run_batch(
    input_file: str | Path,
    output_file: str | Path,
    *,
    error_file: str | Path | None = None,
    server: str | None = None,
    queue: str | None = None,
    max_in_flight: int = 128,
    fields: Mapping[str, Any] | None = None,
    on_progress: Callable[[BatchProgress], object] = lambda _: None,
) -> BatchOutcome:
    """Runs a file of requests in OpenAI's batch format, and writes the answers in that format.

    Without a `queue`, each line goes to the queue that serves the line's model. `fields` are
    default fields of each request; a line may override them.

    If a signal or a crash interrupts the run, the same call continues it. Until the end of the run,
    a file `OUTPUT.batch` beside the output identifies the run. After SIGINT or SIGTERM, requests in
    flight stay in the queue, and the next call collects their results. If an event loop is running,
    call this function through `asyncio.to_thread`.

    Raises BatchFileError for an input that cannot be run; ConfigurationError if the output belongs
    to another run, the input changed during the run, or a file cannot be read or written;
    BatchIsRunningError, RedisUnavailableError.
    """
    source, output = Path(input_file), Path(output_file)
    errors = errors_beside(output) if error_file is None else Path(error_file)
    pictures = PictureFetcher(None, LINES_AHEAD)
    options = RunOptions(
        fetch=partial(pictures.fetch, caller=Caller(name="batch")),
        max_in_flight=max_in_flight,
        defaults=dict(fields or {}),
        retry_seconds=read_settings_of(ReaperSettings).redis_retry_seconds,
    )
    served = read_settings_of(GatewaySettings, queues=queue and [queue]).served_queues
    url = server_url(server)

    async def run(total: int) -> BatchOutcome:
        try:
            connection = await open_async_redis(url)
        except RedisUnavailableError as error:
            raise without_server(error) from error
        async with connection:
            queues = ServedQueues(lambda name: AsyncClient(connection, name), served)
            batch_id = _run_id(source, output, errors, mark)
            with Journal(batch_id, output, errors) as journal:
                run = BatchRun(
                    batch_id,
                    queues,
                    lines_by_prefix(source),
                    total,
                    journal,
                    options,
                    stop_signals(),
                    on_progress,
                )
                with explained(url):
                    ending = await run.run(_never)
                return BatchOutcome(ending is Ending.COMPLETED, run.progress())

    try:
        if not source.is_file():
            is_what = "is not a file" if source.exists() else "does not exist"
            raise BatchFileError("no_file", f"{source} {is_what}")
        mark = output.with_name(output.name + ".batch")
        _check_apart(source, output, errors, mark)
        outcome = asyncio.run(run(count_lines(source)))
        if outcome.is_complete:
            if source.exists():
                _run_id(source, output, errors, mark)  # refuses a file that changed meanwhile
            mark.unlink(missing_ok=True)
    except OSError as error:
        raise ConfigurationError(f"the batch's files cannot be used: {error}") from error
    finally:
        pictures.close()
    return outcome


async def _never() -> Ending | None:
    """Returns None: a local batch has no reason to end early except a signal."""


def _check_apart(source: Path, *others: Path) -> None:
    """Raises ConfigurationError if two paths name one file, or if a file is not a plain file."""
    seen = {source.resolve()}
    for file in others:
        if file.exists() and not file.is_file():
            raise ConfigurationError(f"{file} is not a plain file; name another one")
        if file.resolve() in seen:
            raise ConfigurationError(
                f"{file} cannot be two of the batch's input, output, errors and mark at once"
            )
        seen.add(file.resolve())


def _run_id(source: Path, output: Path, errors: Path, mark: Path) -> str:
    """Returns the id of the run that began the output, which the file `mark` stores. If no run has
    begun the output, writes a new id to `mark` and returns this id. Raises ConfigurationError if
    the output belongs to another run, or the input has changed."""
    with source.open("rb") as content:
        digest = hashlib.file_digest(content, "sha256").hexdigest()
    if mark.exists() and output.exists():  # the output is created before any request is enqueued
        try:
            begun = json.loads(mark.read_text())
            begun_id, begun_digest = str(begun["id"]), begun["input_sha256"]
        except (ValueError, KeyError, TypeError):
            raise ConfigurationError(f"{mark} is not the mark of a batch; delete it") from None
        if begun_digest != digest:
            raise ConfigurationError(
                f"{source} is not the file that {output} was begun with; to begin anew, delete"
                f" {output}, {errors} and {mark}"
            )
        return begun_id
    for file in (output, errors):
        if file.exists() and file.stat().st_size:
            raise ConfigurationError(f"{file} exists already; delete it or name another file")
    batch_id = new_batch_id()
    mark.parent.mkdir(parents=True, exist_ok=True)
    begun_mark = mark.with_name(mark.name + ".new")
    begun_mark.write_text(json.dumps({"id": batch_id, "input_sha256": digest}) + "\n")
    begun_mark.replace(mark)
    return batch_id

"""What RQ may run: a few functions of ours, each with arguments of its own, and nothing else.

Whoever can write to RQ's server can write any job. So nothing in one is believed: its function is
looked up here and never imported, its arguments are validated, and how long it may take and is kept
stands here too.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from promptq.producer.batch_store.batch_lines import is_batch_id
from promptq.producer.batches.batch_job import run_batch_job
from promptq.producer.jobs import upkeep
from promptq.shared.errors import PromptqError
from promptq.shared.protocol.keys import NAME

MAX_DATA_BYTES = 4096
"""Of a job's function and arguments, packed and unpacked; ours are below 300."""
UPKEEP, BATCHES = "upkeep", "batches"
"""What the names of our queues of RQ's end in."""
_SHORT_SECONDS = 600
_WEEK_SECONDS = 7 * 86_400
_NO_LIMIT = -1
_SHOWN_CHARACTERS = 100


class RefusedJobError(PromptqError):
    """RQ holds a job that is none of ours; it is not run."""


class Arguments(BaseModel):
    """Of every job."""

    model_config = ConfigDict(strict=True, extra="forbid", hide_input_in_errors=True)

    queue: Annotated[str, Field(pattern=NAME)]
    """The queue that it is for."""


def _batch_id(text: str) -> str:
    if not is_batch_id(text):
        raise ValueError("is no batch's id")
    return text


class BatchArguments(Arguments):
    """Of a batch."""

    batch_id: Annotated[str, Field(max_length=100), AfterValidator(_batch_id)]


@dataclass(frozen=True, slots=True)
class AllowedJob:
    """A function that RQ may run, and how. Seconds; a timeout of -1 is none."""

    function: Callable[..., str]
    arguments: type[Arguments]
    work: str
    """The queue of RQ's that it is for, by the end of its name."""
    timeout: int
    failure_seconds: int
    """How long it is listed among the failed ones."""
    result_seconds: int = _SHORT_SECONDS

    @property
    def name(self) -> str:
        """What jobs name it by."""
        return f"{self.function.__module__}.{self.function.__qualname__}"


BATCH_JOB = AllowedJob(run_batch_job, BatchArguments, BATCHES, _NO_LIMIT, _WEEK_SECONDS)
REAP, SWEEP, ROLL_UP = (
    AllowedJob(function, Arguments, UPKEEP, 60, _SHORT_SECONDS)
    for function in (upkeep.reap, upkeep.sweep, upkeep.roll_up)
)
_ALLOWED = {it.name: it for it in (BATCH_JOB, REAP, SWEEP, ROLL_UP)}


def rq_queue_name(queue: str, work: str) -> str:
    """What RQ calls the queue for one kind of our queue's work."""
    return f"promptq-{queue}-{work}"


def unpacked(data: bytes) -> bytes:
    """The JSON of a job, as RQ packs it. Raises RefusedJobError for what is none or too large."""
    if len(data) > MAX_DATA_BYTES:
        raise RefusedJobError("it is too large for a job of ours")
    unpacking = zlib.decompressobj()
    try:
        found = unpacking.decompress(data, MAX_DATA_BYTES + 1)
    except zlib.error:
        raise RefusedJobError("it is not packed as jobs are") from None
    if len(found) > MAX_DATA_BYTES:
        raise RefusedJobError("it is too large for a job of ours")
    return found


@dataclass(frozen=True, slots=True)
class JobCall:
    """A job's function with arguments that were validated."""

    job: AllowedJob
    arguments: Arguments

    def bind(self, rq_queue: str) -> Callable[[], str]:
        """What to call. Raises RefusedJobError where it lay in another queue than it is for."""
        if rq_queue != rq_queue_name(self.arguments.queue, self.job.work):
            raise RefusedJobError(f"it is not for the queue {rq_queue[:_SHOWN_CHARACTERS]}")
        return partial(self.job.function, *self.arguments.model_dump().values())


def read_call(data: bytes) -> JobCall:
    """Raises RefusedJobError for whatever is not a job of ours."""
    try:
        name, instance, args, kwargs = json.loads(data)
        allowed = _ALLOWED[name]
    except (ValueError, RecursionError):
        raise RefusedJobError("it is no job at all") from None
    except (KeyError, TypeError):
        shown = repr(name)[:_SHOWN_CHARACTERS]
        raise RefusedJobError(
            f"{shown} is none of this version's jobs: an earlier version left it, and only that"
            " runs it (docs/operations.md, Updates), or somebody else put it there"
        ) from None
    names = list(allowed.arguments.model_fields)
    if instance is not None or kwargs != {} or not isinstance(args, list):
        raise RefusedJobError(f"{name} takes nothing but a list of arguments")
    if len(args) != len(names):
        raise RefusedJobError(f"{name} takes {len(names)} arguments: {', '.join(names)}")
    try:
        return JobCall(allowed, allowed.arguments(**dict(zip(names, args, strict=True))))
    except ValidationError as error:
        problem = error.errors(include_url=False, include_input=False)[0]
        raise RefusedJobError(f"{name}: {problem['loc'][0]}: {problem['msg']}") from None

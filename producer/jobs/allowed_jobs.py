"""What RQ may run: a few functions of ours with arguments of their own, and nothing else.

Whoever can write to RQ's server can write any job. So nothing in a job is trusted. Its function is
looked up here and never imported, and its arguments are validated. How long a job may take, and how
long it is kept, is also defined here.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from promptq.producer.batch_store.input_file import is_batch_id
from promptq.producer.batches.batch_job import run_batch_job
from promptq.producer.jobs import upkeep
from promptq.producer.settings.jobs import JobsSettings
from promptq.shared.errors import PromptqError
from promptq.shared.protocol.keys import NAME

MAX_DATA_BYTES = 4096
"""The limit for a job's function and arguments, packed and unpacked. Ours are below 300."""
UPKEEP, BATCHES = "upkeep", "batches"
"""The last words of the names of our queues in RQ."""
_SHORT_SECONDS = 600
_WEEK_SECONDS = 7 * 86_400
_NO_LIMIT = -1
_SHOWN_CHARACTERS = 100


class RefusedJobError(PromptqError):
    """RQ holds a job that is not ours. It is not run."""


class Arguments(BaseModel):
    """The arguments of every job."""

    model_config = ConfigDict(strict=True, extra="forbid", hide_input_in_errors=True)

    queue: Annotated[str, Field(pattern=NAME)]
    """The queue whose work it is."""


def _batch_id(text: str) -> str:
    if not is_batch_id(text):
        raise ValueError("is no batch's id")
    return text


class BatchArguments(Arguments):
    """The arguments of a job that runs a batch."""

    batch_id: Annotated[str, Field(max_length=100), AfterValidator(_batch_id)]


@dataclass(frozen=True, slots=True)
class AllowedJob:
    """A function that RQ may run, and how. Times are seconds; a timeout of -1 means no limit."""

    function: Callable[..., str]
    arguments: type[Arguments]
    work: str
    """The last word of the name of its queue in RQ."""
    timeout: int
    failure_seconds: int
    """How long it is listed among the failed ones."""
    result_seconds: int = _SHORT_SECONDS

    @property
    def name(self) -> str:
        """The name of the function in jobs."""
        return f"{self.function.__module__}.{self.function.__qualname__}"


BATCH_JOB = AllowedJob(run_batch_job, BatchArguments, BATCHES, _NO_LIMIT, _WEEK_SECONDS)
REAP, SWEEP, ROLL_UP = (
    AllowedJob(function, Arguments, UPKEEP, 60, _SHORT_SECONDS)
    for function in (upkeep.reap, upkeep.sweep, upkeep.roll_up)
)
_ALLOWED = {it.name: it for it in (BATCH_JOB, REAP, SWEEP, ROLL_UP)}


def rq_queue_name(queue: str, work: str) -> str:
    """The name of the queue in RQ for one kind of work of our queue."""
    return f"promptq-{queue}-{work}"


def unpacked(data: bytes) -> bytes:
    """The JSON of a job that RQ has packed. Raises RefusedJobError for anything else."""
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

    def bind(self, rq_queue: str, settings: JobsSettings) -> Callable[[], str]:
        """Returns the function to call; `settings` are those of the job's queue.

        Raises RefusedJobError if the job was in the wrong queue of RQ.
        """
        if rq_queue != rq_queue_name(self.arguments.queue, self.job.work):
            raise RefusedJobError(f"it is not for the queue {rq_queue[:_SHOWN_CHARACTERS]}")
        others = self.arguments.model_dump(exclude={"queue"})
        return partial(self.job.function, settings, *others.values())


def read_call(data: bytes) -> JobCall:
    """The call of a job. Raises RefusedJobError for everything that is not a job of ours."""
    try:
        name, instance, args, kwargs = json.loads(data)
        allowed = _ALLOWED[name]
    except (ValueError, RecursionError):
        raise RefusedJobError("it is no job at all") from None
    except (KeyError, TypeError):
        shown = repr(name)[:_SHOWN_CHARACTERS]
        raise RefusedJobError(
            f"{shown} is not a job of this version: an earlier version left it, and only that"
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

"""Runs jobs in RQ, limited to a table of functions.

Any program that can write to RQ's server can write any job, but RQ sees only the jobs of promptq.
`JobJson` decodes a call only if its function is in the table and its arguments are valid.
`ListedJob` reads three fields of a job's record, so that RQ finds no callback, URL, dependency,
retry or rate there. Jobs of other programs do not exist for RQ. RQ itself provides queues, workers,
processes, timeouts and the list of failed jobs.
"""

from __future__ import annotations

import hashlib
import json
import re
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import redis
from rq import Queue, Worker
from rq.exceptions import AbandonedJobError, DeserializationError, NoSuchJobError, StopRequested
from rq.job import Job, JobStatus
from rq.timeouts import JobTimeoutException
from rq.utils import now
from rq.worker_registration import WORKERS_BY_QUEUE_KEY, clean_worker_registry, register

from promptq.producer.batch_store.input_file import is_batch_id
from promptq.producer.batches.batch_job import run_batch_job
from promptq.producer.clients.connecting import server_url
from promptq.producer.jobs import upkeep
from promptq.producer.settings.jobs import JobsSettings
from promptq.shared.errors import ConfigurationError, PromptqError
from promptq.shared.queue.call import ids_of
from promptq.shared.queue.lookups import shown
from promptq.shared.queue.spoilt import errors_logged, is_wrong_type
from promptq.shared.runtime.logs import get_logger
from promptq.shared.server.connection import MIN_REDIS, hides_info, open_redis, without_password

MakeQueue = Callable[[str, redis.Redis], Queue]

MAX_DATA_BYTES = 4096
"""The most bytes of a compressed call. promptq's calls have under 300 bytes. RQ decompresses a call
before `JobJson` checks it, and 4096 bytes can become 4 MiB."""
UPKEEP, BATCHES = "upkeep", "batches"
"""The last part of the names of promptq's queues in RQ."""
_NO_LIMIT = -1
_RESULT_SECONDS = 600
_WEEK_SECONDS = 7 * 86_400
_BATCH_JOB = "promptq-"
_JOB_ID = re.compile(rb"promptq-[A-Za-z0-9_-]{1,192}")
_errors_logged = partial(errors_logged, stop=StopRequested)
"""`errors_logged` for code in RQ's worker, whose signal handler may raise StopRequested."""
_EXECUTION = re.compile(_JOB_ID.pattern + rb":[A-Za-z0-9_-]{1,200}")
_WORKER_KEY = re.compile(rb"rq:worker:promptq-[0-9a-f]{32}")
_STATUSES = {status.value.encode() for status in JobStatus}
_QUEUED_OR_STARTED = {status.value.encode() for status in (JobStatus.QUEUED, JobStatus.STARTED)}


@dataclass(frozen=True, slots=True)
class Listed:
    """A function that RQ may run. Times are in seconds."""

    function: Callable[..., str]
    work: str
    """The kind of work, `UPKEEP` or `BATCHES`; RQ has a queue for each."""
    timeout: int
    failure_seconds: int
    """Seconds for which a failed job stays in RQ's list."""

    @property
    def name(self) -> str:
        """The name by which jobs refer to the function."""
        return f"{self.function.__module__}.{self.function.__qualname__}"


RUN_BATCH = Listed(run_batch_job, BATCHES, _NO_LIMIT, _WEEK_SECONDS)
REAP, SWEEP, ROLL_UP = (
    Listed(function, UPKEEP, 60, _RESULT_SECONDS)
    for function in (upkeep.reap, upkeep.sweep, upkeep.roll_up)
)
_TABLE = {listed.name: listed for listed in (RUN_BATCH, REAP, SWEEP, ROLL_UP)}


def rq_queue_name(queue: str, work: str) -> str:
    """Returns the name of RQ's queue for one kind of work of a promptq queue."""
    return f"promptq-{queue}-{work}"


@dataclass(frozen=True, slots=True)
class JobJson:
    """A serializer for one queue of RQ. It decodes only calls of functions in `_TABLE`."""

    rq_queue: str
    more: dict[str, Any] = field(default_factory=dict, repr=False)
    """Further arguments that this process passes to each job, such as its settings."""

    def dumps(self, value: Any) -> bytes:
        return json.dumps(value).encode()

    def loads(self, data: bytes) -> tuple[str, None, list[Any], dict[str, Any]]:
        """Decodes a call if its function is in `_TABLE`. Raises ValueError for any other call.

        The arguments in `data` are the promptq queue, and the batch's id if the job runs a batch.
        """
        match json.loads(data):
            case [str(name), None, [str(queue), *others], dict(kwargs)] if not kwargs:
                pass
            case _:
                raise ValueError("the job is not a call of a function with a list of arguments")
        if name not in _TABLE:
            raise ValueError(
                f"{name!r:.100} is not a job of this version: an earlier version left it, and only"
                " that runs it (docs/operations.md, Updates), or somebody else put it there"
            )
        if self.rq_queue != rq_queue_name(queue, _TABLE[name].work):
            raise ValueError(f"the job is not for the queue {self.rq_queue}")
        match others:
            case [] if name != RUN_BATCH.name:
                return name, None, [], {**self.more}
            case [str(batch_id)] if name == RUN_BATCH.name and is_batch_id(batch_id):
                return name, None, [], {**self.more, "batch_id": batch_id}
        raise ValueError(f"{name} has other arguments than a job of promptq")


class ListedJob(Job):
    """A job that calls a function of `_TABLE`.

    RQ's record of a job has more fields. Only the call, the queue and the status are read.
    """

    serializer: JobJson

    @classmethod
    def fetch(cls, id: str, connection: Any = None, serializer: Any = None) -> Job:
        """Returns a job. Raises NoSuchJobError if the job is not promptq's."""
        try:
            if not _JOB_ID.fullmatch(id.encode()):
                raise ValueError("it is not the id of a job")
            return super().fetch(id, connection, serializer)
        except (ValueError, redis.ResponseError) as error:
            if isinstance(error, redis.ResponseError) and not is_wrong_type(error):
                raise
            intermediate = f"rq:queue:{serializer.rq_queue}:intermediate"
            _delete_id(connection, intermediate, id.encode(), str(error))
            raise NoSuchJobError(f"not a job of promptq: {id}") from None

    def restore(self, raw_data: Any) -> None:
        """Sets the job's fields from its record. Raises ValueError for a job of other programs."""
        fields = {name: raw_data.get(name, b"") for name in (b"data", b"origin", b"status")}
        if len(fields[b"data"]) > MAX_DATA_BYTES:
            raise ValueError("the job is too large for a job of promptq")
        if fields[b"origin"] != self.serializer.rq_queue.encode():
            raise ValueError(f"the job is not for the queue {self.serializer.rq_queue}")
        if fields[b"status"] not in _STATUSES:
            raise ValueError("the job has no valid status")
        super().restore(fields)
        try:
            listed = _TABLE[self.func_name or ""]
        except DeserializationError as error:
            raise ValueError(str(error.__cause__)) from None
        self.timeout, self.result_ttl = listed.timeout, _RESULT_SECONDS
        self.failure_ttl = listed.failure_seconds


def _delete_id(connection: Any, key: str, job_id: bytes, reason: str) -> None:
    """Deletes the id of a job that is not promptq's from a list, and logs this in one line."""
    if connection.lrem(key, 1, job_id):
        get_logger().warning("job entry removed", job_id=shown(job_id), reason=reason)


class ListedQueue(Queue):
    """A queue of RQ whose jobs never wait for another job."""

    def move_dependents_to_ready(self, *_: Any, **__: Any) -> dict[str, list[str]]:
        """Does nothing. Otherwise a forged list of dependent jobs could make RQ fail."""
        return {}


class ListedWorker(Worker):
    """RQ's worker, limited to one queue. With several queues, RQ may lose a job."""

    def heartbeat(self, timeout: int | None = None, pipeline: Any = None) -> None:
        """Sends a heartbeat. Also registers the worker again, in case the server has lost it."""
        super().heartbeat(timeout, pipeline)
        if pipeline is None:
            register(self)

    def subscribe(self) -> None:
        """Does nothing. Otherwise commands on RQ's channel could stop a worker or kill its job."""

    def run_maintenance_tasks(self) -> None:
        """Cleans the lists of this queue. RQ would also clean lists that all queues share."""
        [queue] = self.queues
        if queue.acquire_maintenance_lock():
            try:
                for clean in (
                    partial(_delete_strangers, queue),
                    partial(queue.started_job_registry.cleanup, None, self._exc_handlers),
                    queue.finished_job_registry.cleanup,
                    queue.failed_job_registry.cleanup,
                    partial(clean_worker_registry, queue),
                    partial(queue.intermediate_queue.cleanup, self, queue),
                ):
                    with _errors_logged(queue.key):
                        clean()
            finally:
                queue.release_maintenance_lock()  # type: ignore[no-untyped-call] # RQ has no types for it
        self.last_cleaned_at = now()  # type: ignore[assignment] # RQ's own type is None


def _delete_strangers(queue: Queue) -> None:
    """Deletes entries of RQ's lists that are not ids in the form that RQ writes."""
    client: Any = queue.connection
    for key in (queue.key, queue.intermediate_queue.key):
        with _errors_logged(key):
            for job_id in client.lrange(key, 0, -1):
                if not _JOB_ID.fullmatch(job_id):
                    _delete_id(client, key, job_id, "it is not the id of a job")
    started, workers = queue.started_job_registry.key, WORKERS_BY_QUEUE_KEY % queue.name
    with _errors_logged(started):
        for entry in client.zrange(started, 0, -1):
            if not _EXECUTION.fullmatch(entry):
                client.zrem(started, entry)
    with _errors_logged(workers):
        for entry in client.smembers(workers):
            if not _WORKER_KEY.fullmatch(entry):
                client.srem(workers, entry)


def run_worker(queue: Queue, settings: JobsSettings, *, burst: bool = False, **more: Any) -> None:
    """Runs a worker until SIGTERM or SIGINT; with `burst`, until no job waits.

    Passes the settings and `more` to jobs in memory: other processes could read the environment.
    """
    pool: Any = queue.connection.connection_pool
    # RQ sets its longer timeout only for new connections, and an idle worker whose wait for a job
    # fails pauses, each time twice as long.
    pool.disconnect()
    pool.reset()
    worker = ListedWorker(
        [queue],
        name=f"promptq-{secrets.token_hex(16)}",  # the role `jobs` may use only such names
        connection=queue.connection,
        job_class=ListedJob,
        queue_class=ListedQueue,
        job_monitoring_interval=5,
        maintenance_interval=15,
        worker_ttl=30,
        log_job_description=False,
        exception_handlers=[_log_failure],
        serializer="json",  # RQ takes no object here
    )
    worker.serializer = JobJson(queue.name, {"settings": settings, **more})
    worker.work(burst=burst, logging_level="CRITICAL")  # promptq logs what matters


def _log_failure(job: Job, kind: type[BaseException], error: BaseException, _: object) -> None:
    log = get_logger(job_id=job.id)
    if isinstance(error, AbandonedJobError):
        log.warning(
            "job failed", reason="its process ended too early, or was disconnected for a long time"
        )
    elif isinstance(error, PromptqError | JobTimeoutException | redis.RedisError):
        log.warning("job failed", reason=str(error))
    else:
        log.error("job failed", exc_info=error)


def upkeep_queue(queue: str, connection: redis.Redis) -> Queue:
    """Returns RQ's queue for upkeep. It is separate, because batches occupy workers for hours."""
    return _queue(rq_queue_name(queue, UPKEEP), connection)


def batch_queue(queue: str, connection: redis.Redis) -> Queue:
    """Returns RQ's queue for batch files, each of which may take hours."""
    return _queue(rq_queue_name(queue, BATCHES), connection)


def _queue(name: str, connection: redis.Redis) -> Queue:
    return ListedQueue(name, connection=connection, job_class=ListedJob, serializer=JobJson(name))


def enqueue_batch(queue: Queue, promptq_queue: str, batch_id: str) -> None:
    """Enqueues a batch in RQ."""
    _enqueue(queue, RUN_BATCH, _BATCH_JOB + batch_id, promptq_queue, batch_id)


def enqueue_upkeep(queue: Queue, job: Listed, promptq_queue: str) -> None:
    """Enqueues a job of upkeep in RQ, unless the job is waiting already."""
    name = queue.name
    if "." in name:  # RQ's ids have no dots, but names of queues may
        name = f"promptq-{hashlib.sha256(name.encode()).hexdigest()}"
    job_id = f"{name}-{job.function.__name__}"
    if job_id not in _waiting_ids(queue):
        _enqueue(queue, job, job_id, promptq_queue)


def _enqueue(queue: Queue, job: Listed, job_id: str, *args: str) -> None:
    queue.enqueue_call(
        job.function,
        args=args,
        job_id=job_id,
        timeout=job.timeout,
        result_ttl=_RESULT_SECONDS,
        failure_ttl=job.failure_seconds,
    )


def _waiting_ids(queue: Queue) -> list[str]:
    client: Any = queue.connection
    return ids_of(client.lrange(queue.key, 0, -1))


def batches_waiting(queue: Queue) -> set[str]:
    """Returns the ids of batches that wait for a worker of RQ."""
    ids = (job_id.removeprefix(_BATCH_JOB) for job_id in _waiting_ids(queue))
    return {batch_id for batch_id in ids if is_batch_id(batch_id)}


def num_workers(queue: Queue) -> int:
    """Returns the number of RQ's live workers. A killed worker counts for about another minute."""
    client: Any = queue.connection
    listed = client.smembers(WORKERS_BY_QUEUE_KEY % queue.name)
    return sum(1 for key in listed if _WORKER_KEY.fullmatch(key))


def is_queued_or_started(queue: Queue, batch_id: str) -> bool:
    """Returns whether a batch waits or runs according to RQ's record.

    If its worker has died, the record may still say so for hours, or for ever.
    """
    status = queue.connection.hget(Job.key_for(_BATCH_JOB + batch_id), "status")
    return status in _QUEUED_OR_STARTED


def open_jobs_redis(settings: JobsSettings) -> redis.Redis:
    """Returns a client of RQ's server. Raises ConfigurationError for a Cluster."""
    url = settings.jobs_redis_url or server_url(settings.redis_url)
    why = "is a Cluster"
    if "+cluster://" not in url:
        connection = open_redis(url)
        client: Any = connection
        info: dict[str, Any] = {}
        try:
            info = client.info("cluster")
        except redis.ResponseError as error:
            if not hides_info(error):
                raise
            # RQ would take the server for Redis 5, and lose the job of a worker that dies.
            setattr(connection, "__rq_redis_server_version", (MIN_REDIS, 0, 0))
        if not info.get("cluster_enabled"):
            return connection
        connection.close()
        why = "is part of a Cluster"
    raise ConfigurationError(
        f"jobs_redis_url (PROMPTQ_JOBS_REDIS_URL): RQ needs a server without Cluster, and"
        f" {without_password(url)} {why}; name another one, for RQ alone"
    )

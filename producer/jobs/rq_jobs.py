"""Runs jobs in RQ, limited to a table of functions.

Any program that can write to RQ's server can write any job, but RQ sees only the jobs of promptq.
`JobJson` decodes only the calls that promptq makes. `ListedJob` reads two fields of a job's record,
so that RQ finds no callback, URL, dependency, retry or rate there. Jobs of other programs do not
exist for RQ. RQ itself provides queues, workers, processes, timeouts and the list of failed jobs.
"""

from __future__ import annotations

import hashlib
import json
import re
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import redis
from rq import Queue, Worker
from rq.exceptions import AbandonedJobError, DeserializationError, NoSuchJobError, StopRequested
from rq.job import Job
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
"""The kinds of work. RQ has a queue for each kind; the queue's name ends in the kind."""
REAP, SWEEP, ROLL_UP = upkeep.reap, upkeep.sweep, upkeep.roll_up
_TABLE = {
    work: {f"{function.__module__}.{function.__qualname__}" for function in functions}
    for work, functions in ((UPKEEP, (REAP, SWEEP, ROLL_UP)), (BATCHES, (run_batch_job,)))
}
"""The names of the functions that RQ may run, by the kind of work."""
_OPTIONS: dict[str, dict[str, Any]] = {
    UPKEEP: {"timeout": 60, "result_ttl": 600, "failure_ttl": 600},
    BATCHES: {"timeout": -1, "result_ttl": 600, "failure_ttl": 7 * 86_400},  # -1: no limit
}
"""RQ's options of jobs, in seconds, by the kind of work."""
_BATCH_JOB = "promptq-"
_JOB_ID = re.compile(rb"promptq-[A-Za-z0-9_-]{1,192}")
_EXECUTION = re.compile(_JOB_ID.pattern + rb":[A-Za-z0-9_-]{1,200}")
_WORKER_KEY = re.compile(rb"rq:worker:promptq-[0-9a-f]{32}")


def rq_queue_name(queue: str, work: str) -> str:
    """Returns the name of RQ's queue for one kind of work of a promptq queue."""
    return f"promptq-{queue}-{work}"


@dataclass(frozen=True, slots=True)
class JobJson:
    """A serializer for one queue of RQ. It decodes only calls that promptq enqueues there."""

    queue: str
    work: str
    more: dict[str, Any] = field(default_factory=dict, repr=False)
    """Further arguments that this process passes to each job, such as its settings."""

    def dumps(self, value: Any) -> bytes:
        return json.dumps(value).encode()

    def loads(self, data: bytes) -> tuple[str, None, list[Any], dict[str, Any]]:
        """Decodes a call of one of promptq's functions. Raises ValueError for any other call.

        The arguments in `data` are the promptq queue, and the batch's id if the job runs a batch.
        """
        names = _TABLE[self.work]
        match json.loads(data):
            case [str(name), None, [self.queue, *ids], {**rest}] if name in names and not rest:
                match self.work == BATCHES, ids:
                    case False, []:
                        return name, None, [], self.more
                    case True, [str(batch_id)] if is_batch_id(batch_id):
                        return name, None, [], {**self.more, "batch_id": batch_id}
        raise ValueError(
            "it is not a call of this version: an earlier version left it, and only that runs it"
            " (docs/operations.md, Updates), or somebody else put it there"
        )


class ListedJob(Job):
    """A job that calls one of promptq's functions.

    RQ's record of a job has more fields. Only the call and the status are read.
    """

    serializer: JobJson

    @classmethod
    def fetch(cls, id: str, connection: Any = None, serializer: Any = None) -> Job:
        """Returns a job. Raises NoSuchJobError if the job is not promptq's."""
        try:
            if not _JOB_ID.fullmatch(id.encode()):
                raise ValueError("it is not the id of a job")
            return super().fetch(id, connection, serializer)
        except (ValueError, DeserializationError, redis.ResponseError) as error:
            if isinstance(error, redis.ResponseError) and not is_wrong_type(error):
                raise
            key = f"rq:queue:{rq_queue_name(serializer.queue, serializer.work)}:intermediate"
            reason = str(error.__cause__ or error)
            _delete_entry(id.encode(), reason, partial(connection.lrem, key, 1))
            raise NoSuchJobError(f"not a job of promptq: {id}") from None

    def restore(self, raw_data: Any) -> None:
        """Sets the job's fields. Raises ValueError or DeserializationError for another program's
        job."""
        data, queue, work = raw_data.get(b"data", b""), self.serializer.queue, self.serializer.work
        if len(data) > MAX_DATA_BYTES:
            raise ValueError("the job is too large for a job of promptq")
        own = {b"data": data, b"origin": rq_queue_name(queue, work).encode()}
        super().restore({**own, b"status": raw_data.get(b"status", b"")})
        if self.func_name:  # RQ decodes the call here
            vars(self).update(_OPTIONS[work])

    @property
    def dependents_key(self) -> str:
        """A random key, which nobody writes. RQ reads there which jobs wait for this job."""
        return f"{self.key}:{secrets.token_hex(8)}"


class ListedWorker(Worker):
    """RQ's worker, limited to one queue. With several queues, RQ may lose a job."""

    def heartbeat(self, timeout: int | None = None, pipeline: Any = None) -> None:
        """Sends a heartbeat, and registers the worker again, in case the server has lost it."""
        super().heartbeat(timeout, pipeline)
        if pipeline is None:
            register(self)

    def subscribe(self) -> None:
        """Does nothing, because commands on RQ's channel could stop a worker or kill its job."""

    def run_maintenance_tasks(self) -> None:
        """Cleans the lists of this queue. RQ would also clean lists that all queues share."""
        [queue] = self.queues
        for clean in (
            partial(_delete_strangers, queue),
            partial(queue.started_job_registry.cleanup, None, self._exc_handlers),
            queue.finished_job_registry.cleanup,
            queue.failed_job_registry.cleanup,
            partial(clean_worker_registry, queue),
            partial(queue.intermediate_queue.cleanup, self, queue),
        ):
            with errors_logged(queue.key, StopRequested):
                clean()
        self.last_cleaned_at = now()  # type: ignore[assignment] # RQ's own type is None


def _delete_strangers(queue: Queue) -> None:
    """Deletes entries of RQ's lists that are not in the form that RQ writes."""
    client: Any = queue.connection
    wip, workers = queue.started_job_registry.key, WORKERS_BY_QUEUE_KEY % queue.name
    for key, form, read, delete in (
        *(
            (key, _JOB_ID, partial(client.lrange, key, 0, -1), partial(client.lrem, key, 1))
            for key in (queue.key, queue.intermediate_queue.key)
        ),
        (wip, _EXECUTION, partial(client.zrange, wip, 0, -1), partial(client.zrem, wip)),
        (workers, _WORKER_KEY, partial(client.smembers, workers), partial(client.srem, workers)),
    ):
        with errors_logged(key, StopRequested):
            for entry in read():
                if not form.fullmatch(entry):
                    _delete_entry(entry, "it has not the form that RQ writes", delete)


def _delete_entry(entry: bytes, reason: str, delete: Callable[[bytes], int]) -> None:
    """Deletes an entry that is not promptq's from a list, and logs this in one line."""
    if delete(entry):
        get_logger().warning("job entry removed", job_id=shown(entry), reason=reason)


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
        job_monitoring_interval=5,
        maintenance_interval=15,
        worker_ttl=30,
        log_job_description=False,
        exception_handlers=[_log_failure],
        serializer="json",  # RQ takes no object here
    )
    own: Any = queue.serializer
    worker.serializer = replace(own, more={"settings": settings, **more})
    worker.work(burst=burst, logging_level="CRITICAL")  # promptq logs what matters


def _log_failure(job: Job, kind: type[BaseException], error: BaseException, _: object) -> None:
    log = get_logger(job_id=job.id)
    lost = "its process ended too early, or was disconnected for a long time"
    if isinstance(error, AbandonedJobError | PromptqError | JobTimeoutException | redis.RedisError):
        log.warning("job failed", reason=str(error) or lost)
    else:
        log.error("job failed", exc_info=error)


def upkeep_queue(queue: str, connection: redis.Redis) -> Queue:
    """Returns RQ's queue for upkeep, which is separate because batches occupy workers for hours."""
    return _queue(queue, UPKEEP, connection)


def batch_queue(queue: str, connection: redis.Redis) -> Queue:
    """Returns RQ's queue for batch files, each of which may take hours."""
    return _queue(queue, BATCHES, connection)


def _queue(queue: str, work: str, connection: redis.Redis) -> Queue:
    name, serializer = rq_queue_name(queue, work), JobJson(queue, work)
    return Queue(name, connection=connection, job_class=ListedJob, serializer=serializer)


def enqueue_batch(queue: Queue, promptq_queue: str, batch_id: str) -> None:
    arguments, job_id = (promptq_queue, batch_id), _BATCH_JOB + batch_id
    queue.enqueue_call(run_batch_job, args=arguments, job_id=job_id, **_OPTIONS[BATCHES])


def enqueue_upkeep(queue: Queue, job: Callable[..., str], promptq_queue: str) -> None:
    """Enqueues a job of upkeep in RQ, unless the job is waiting already."""
    name = queue.name
    if "." in name:  # RQ's ids have no dots, but names of queues may
        name = f"promptq-{hashlib.sha256(name.encode()).hexdigest()}"
    job_id = f"{name}-{job.__name__}"
    if job_id not in _waiting_ids(queue):
        queue.enqueue_call(job, args=(promptq_queue,), job_id=job_id, **_OPTIONS[UPKEEP])


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
    return int(client.scard(WORKERS_BY_QUEUE_KEY % queue.name))


def is_queued_or_started(queue: Queue, batch_id: str) -> bool:
    """Returns whether a batch waits or runs according to RQ's record.

    If the batch's worker has died, the record may be wrong for hours, or for ever.
    """
    status = queue.connection.hget(Job.key_for(_BATCH_JOB + batch_id), "status")
    return status in (b"queued", b"started")


def open_jobs_redis(settings: JobsSettings) -> redis.Redis:
    """Returns a client of RQ's server. Raises ConfigurationError for a Cluster."""
    url = settings.jobs_redis_url or server_url(settings.redis_url)
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
    raise ConfigurationError(
        f"jobs_redis_url (PROMPTQ_JOBS_REDIS_URL): RQ needs a server without Cluster, and"
        f" {without_password(url)} is a Cluster or part of one; name another one, for RQ alone"
    )
